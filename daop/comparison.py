"""Simulated comparison of placement policies: rows of figures, each with its ratios.

The best static policy is the best of ``STATIC`` at the same budget on the same machine; with the
``optimum`` it is always run, listed or not, because every row is compared with both.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, Geometry, IntArray
from daop.hardware import HardwareProfile, load
from daop.runtime.chrome_trace import write_chrome_trace
from daop.runtime.costs import HardwareCosts
from daop.runtime.format_names import BITS, format_of_bits, format_of_fingerprint
from daop.runtime.policies.base import POLICIES, make_policy
from daop.runtime.profile import Profile
from daop.runtime.sim_forecasts import OnlineForecaster
from daop.runtime.sim_traffic import Traffic
from daop.runtime.simulator import Simulator
from daop.runtime.timeline import Timeline
from daop.runtime.watching import Watcher
from daop.taught import open_profile
from daop.training.parquet import read_trace
from daop.training.split import split_by_sequence
from daop.training.trace import ABSENT, PHASES, Trace
from daop.units import format_size, parse_size

STATIC = ("static", "static_front", "static_frequency")
BOUND = "optimum"
Told = Callable[[str, float], None]
Watch = Callable[[str, float, str], Sequence[Watcher]]
"""Who watches the run of a policy: (machine, ECR, policy) -> watchers."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cell of a comparison, less the policy. ``format``: of the experts, if known. ``memory_ecr``: the
    ECR that the same memory has in the trace's own format, where formats are compared."""

    hardware: HardwareProfile
    ecr: float
    batch: int = 1
    weight_bits: float = 16.0
    format: str | None = None
    memory_ecr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Traffic to be simulated and what the policies may know of other traffic, with where that is from."""

    traffic: Traffic
    profile: Profile | None
    learnt_from: str | None


def settings(
    hardware: str,
    shares: Sequence[float],
    batch: int,
    weight_bits: float | None,
    geometry: Geometry | None = None,
) -> list[Setting]:
    """Every machine of a comma-separated list with every share. Where no bits are asked for they are those
    that the machine was measured with, on experts of ``geometry``'s size, or those of its format."""
    machines = [load(name.strip()) for name in hardware.split(",") if name.strip()]
    if not machines:
        raise DaopError("--hardware names no machine")
    out = []
    for machine in machines:
        bits, known = own_format(machine, geometry, weight_bits)
        out += [
            Setting(hardware=machine, ecr=share, batch=batch, weight_bits=bits, format=known)
            for share in shares
        ]
    return out


def own_format(
    machine: HardwareProfile, geometry: Geometry | None, weight_bits: float | None
) -> tuple[float, str | None]:
    """Bits of a weight of a trace's experts, and their format, if it is known: from the name that packing
    left in the fingerprint, from the machine having been measured with such experts, or from the bits."""
    packed = None if geometry is None else format_of_fingerprint(geometry.fingerprint)
    sizes = () if geometry is None else geometry.expert_bytes
    measured = machine.expert_bytes in sizes
    usual = BITS[packed] if packed is not None and not measured else machine.weight_bits
    bits = weight_bits or usual or 16.0
    if packed is not None:
        return bits, packed
    same = [curve.format for curve in machine.hardware.curves if curve.nbytes in sizes]
    return bits, same[0] if measured and same else format_of_bits(bits)


def mismatches(settings: Sequence[Setting], geometry: Geometry) -> list[str]:
    """Machines that were measured with experts of quite another size, said for people."""
    mine = float(np.mean(geometry.bytes_of))
    return [
        f"{machine.hardware.name} was calibrated with experts of {format_size(machine.expert_bytes)}, but "
        f"the trace's have {format_size(int(mine))}: calibrate again with --expert-bytes {int(mine)}"
        for machine in {setting.hardware.hardware.name: setting.hardware for setting in settings}.values()
        if machine.expert_bytes is not None and not 0.5 <= machine.expert_bytes / mine <= 2
    ]


def open_traffic(
    path: Path,
    profile: Path | None,
    expert_bytes: str | None,
    tokens: int | None,
    predictor: Path | None = None,
) -> Recorded:
    """A trace file; without a profile, most of its sequences are learnt from and the others simulated."""
    trace = read_trace(path)
    geometry = sized(trace.geometry, parse_size(expert_bytes, "--expert-bytes") if expert_bytes else None)
    known: Profile | None = None
    learnt_from: str | None = None
    if profile is not None or predictor is not None:
        known = open_profile(profile, predictor, geometry)
        learnt_from = str(profile or predictor)
    elif len(trace.grouped().sequences) > 1:
        known, trace = fitted(trace, geometry)
        learnt_from = "four fifths of the trace's sequences"
    scored = trace.grouped()
    traffic = traffic_of(scored if tokens is None else scored.take(slice(0, tokens)), geometry)
    return Recorded(traffic=traffic, profile=known, learnt_from=learnt_from)


def policies_of(text: str, *, real: bool = False) -> list[str]:
    """The policies named in a comma-separated list; ``all``: every registered exact one.

    ``real``: they are to run a model, so those that know the future are left out.
    """
    if text == "all":
        return [n for n, policy in POLICIES.items() if policy.exact and not (real and policy.needs_future)]
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not chosen:
        raise DaopError("--policies names no policy")
    for name in chosen:
        POLICIES.get(name)
    return chosen


def numbers_of(text: str, flag: str) -> list[float]:
    """Shares in a comma-separated list, each in 0..1."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise DaopError(f"{flag} {text!r} is not a list of numbers such as 0.125,0.25") from error
    if not values or any(not 0 <= value <= 1 for value in values):
        raise DaopError(f"{flag} {text!r}: every share must lie between 0 and 1 (1: all experts fit)")
    return values


def traffic_of(trace: Trace, geometry: Geometry) -> Traffic:
    """A trace as the simulator takes it."""
    trace = trace.grouped()
    if not len(trace):
        raise DaopError("the trace holds no tokens")
    ids = _signed(trace.ids)
    prefill = np.asarray([phase.value == "prefill" for phase in PHASES])[trace.phase]
    return Traffic(
        geometry=geometry,
        ids=ids,
        sequence=trace.sequence,
        prefill=prefill if prefill.any() else None,
        weights=trace.weights,
        distances=trace.distances,
        forecast_ids=None if trace.forecast_ids is None else _signed(trace.forecast_ids),
        forecast_weights=trace.forecast_weights,
    )


def _signed(ids: NDArray[Any]) -> IntArray:
    """A trace's expert numbers with -1 where it has none."""
    return np.where(ids == ABSENT, np.int32(-1), ids.astype(np.int32))


def sized(geometry: Geometry, expert_bytes: int | None) -> Geometry:
    """The geometry with the size of an expert filled in, or replaced by ``expert_bytes``."""
    if expert_bytes is None:
        if 0 in geometry.expert_bytes:
            raise DaopError(
                "the trace does not say how many bytes an expert of its model takes; "
                "give it with --expert-bytes, for instance 13.2MB for gpt-oss-20b in MXFP4"
            )
        return geometry
    return dataclasses.replace(geometry, expert_bytes=(expert_bytes,) * geometry.layers)


def fitted(trace: Trace, geometry: Geometry, *, seed: int = 0, share: float = 0.2) -> tuple[Profile, Trace]:
    """A profile of one part of the trace's sequences, and the other part to be scored on."""
    split = split_by_sequence(trace, test_share=share, seed=seed)
    learn = trace.select(split.train)
    return learn_profile(learn, geometry), trace.select(split.test)


def learn_profile(trace: Trace, geometry: Geometry) -> Profile:
    """Frequencies, activation matrices and the context model of a trace."""
    from daop.runtime import context_model

    whole = np.flatnonzero((trace.ids != ABSENT).all(axis=(1, 2)))
    traffic = traffic_of(trace.take(whole), geometry)
    profile = Profile.from_routing(geometry, traffic.ids, traffic.sequence)
    model = context_model.fit(geometry, traffic.ids, traffic.sequence)
    return dataclasses.replace(profile, arrays=model.as_arrays())


def budget_of(geometry: Geometry, ecr: float) -> int:
    """Slots of a share of all experts."""
    return round(geometry.total * ecr)


def simulate(
    traffic: Traffic,
    profile: Profile | None,
    setting: Setting,
    policies: Sequence[str],
    told: Told | None = None,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """One row per policy of ``policies``, in their order."""
    asked = list(dict.fromkeys([*policies, *STATIC, BOUND]))
    found: dict[str, dict[str, Any]] = {}
    for at, name in enumerate(asked):
        if told is not None:
            told(f"{setting.hardware.hardware.name}, ECR {setting.ecr:g}: {name}", at / len(asked))
        known = setting.hardware.hardware.name, setting.ecr, name
        watchers = watch(*known) if watch is not None and name in policies else ()
        found[name] = simulate_one(traffic, profile, setting, name, watchers)
    best = max(found[name]["tokens_per_second"] for name in STATIC)
    bound = found[BOUND]["tokens_per_second"]
    for row in found.values():
        row["ratio_to_best_static"] = row["tokens_per_second"] / best
        row["ratio_to_optimum"] = row["tokens_per_second"] / bound
    return [found[name] for name in policies]


def simulate_one(
    traffic: Traffic,
    profile: Profile | None,
    setting: Setting,
    name: str,
    watchers: Sequence[Watcher] = (),
) -> dict[str, Any]:
    """The row of one policy, its ratios still missing."""
    simulator = _simulator(traffic, profile, setting, name, watchers)
    run = simulator.run(traffic, setting.batch)
    policy = simulator.policy
    return {
        "policy": name,
        "exact": policy.exact,
        "ecr": setting.ecr,
        "slots": simulator.residency.capacity,
        "expert_bytes": float(np.mean(traffic.geometry.bytes_of)),
        **({} if setting.memory_ecr is None else {"memory_ecr": setting.memory_ecr}),
        "hardware": setting.hardware.hardware.name,
        "batch": setting.batch,
        "simulated": True,
        **run.as_dict(),
        "forecast": policy.forecast,
        "decision_us_per_layer": {"plan": policy.plan_us, "look_ahead": policy.look_ahead_us},
    }


def timeline(
    traffic: Traffic, profile: Profile | None, setting: Setting, name: str, tokens: int = 200
) -> str:
    """What device, host, link and main thread did in the trace's first tokens: a Chrome trace (JSON)."""
    watcher, text = Timeline(), io.StringIO()
    part = traffic.head(tokens)
    _simulator(part, profile, setting, name, [watcher]).run(part, setting.batch)
    write_chrome_trace(watcher, text)
    return text.getvalue()


def _simulator(
    traffic: Traffic,
    profile: Profile | None,
    setting: Setting,
    name: str,
    watchers: Sequence[Watcher] = (),
) -> Simulator:
    policy = make_policy(name, profile)
    costs = HardwareCosts(setting.hardware.hardware, traffic.geometry, setting.weight_bits, setting.format)
    forecaster = OnlineForecaster(traffic.geometry, profile) if policy.horizon else None
    slots = budget_of(traffic.geometry, setting.ecr)
    return Simulator(policy, traffic.geometry, costs, slots, forecaster, watchers)
