"""The same traffic with experts in other formats, for a simulated comparison side by side.

A format changes the bytes of an expert, with them the time to move it and how many fit, and what computing
it costs. The memory stays the same: the ECR that is asked for is that of the format the trace was recorded
in, and a format of half the bytes gets about twice the share.

What computing costs comes from the machine's profile, and every format says from where (``Basis``): measured
in that format by ``daop calibrate --format``; assumed, where a shipped profile says by which share of its
figures; or not known, and then it is taken to be bound by the profile's figures as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from daop.core import DaopError, Geometry
from daop.runtime.format_names import BITS, GROUPS, PAGE

if TYPE_CHECKING:
    from daop.comparison import Recorded, Setting
    from daop.hardware import HardwareProfile

KEEP = "keep"
AS_THEY_ARE = "the machine's figures as they are"


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What a format's costs of computing rest on. ``kind``: measured, assumed or unknown; ``text``: the
    figures; ``why``: where they are from."""

    machine: str
    format: str
    kind: str
    text: str
    why: str

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class InFormat:
    """One format of a comparison: the traffic with experts of its size, and what is simulated with it."""

    name: str
    recorded: Recorded
    settings: list[Setting]
    bases: list[Basis]


def formats_of(text: str, *, keep: bool = True) -> list[str]:
    """Formats of a comma-separated list; ``keep``: whether that may be among them."""
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = [*([KEEP] if keep else []), *BITS]
    for name in chosen:
        if name not in known:
            raise DaopError(f"--format {name} is not known; known: {', '.join(known)}")
    if not chosen:
        raise DaopError("--format names no format")
    return chosen


def in_formats(formats: Sequence[str], recorded: Recorded, settings: Sequence[Setting]) -> Iterator[InFormat]:
    """The comparison in each format. ``DaopError`` where machines disagree about the trace's own bits."""
    own = {(setting.weight_bits, setting.format) for setting in settings}
    if len(own) != 1:
        raise DaopError("--format needs one --weight-bits for all machines: give it")
    own_bits, own_format = own.pop()
    for name in formats:
        kept = name == KEEP
        real = own_format if kept else name
        geometry = recorded.traffic.geometry
        sized = geometry if kept else in_format(geometry, own_bits, name)
        fitting, bases = [], {}
        for setting in settings:
            profile, basis = machine_for(setting.hardware, real, name)
            bases[basis.machine] = basis
            fitting.append(
                dataclasses.replace(
                    setting,
                    hardware=profile,
                    weight_bits=own_bits if kept else BITS[name],
                    format=real,
                    ecr=setting.ecr if kept else share_that_fits(geometry, sized, setting.ecr),
                    memory_ecr=setting.ecr,
                )
            )
        traffic = dataclasses.replace(recorded.traffic, geometry=sized)
        yield InFormat(
            name=name,
            recorded=dataclasses.replace(recorded, traffic=traffic),
            settings=fitting,
            bases=list(bases.values()),
        )


def in_format(geometry: Geometry, own_bits: float, name: str) -> Geometry:
    """The geometry with experts as a format stores them; INT8 and INT4 in whole pages, as packed."""
    step = PAGE if name in GROUPS else 1
    sizes = [max(1, -(-round(size * BITS[name] / own_bits) // step) * step) for size in geometry.expert_bytes]
    return dataclasses.replace(geometry, expert_bytes=tuple(sizes))


def share_that_fits(before: Geometry, after: Geometry, ecr: float) -> float:
    """The share of the experts in one format that fit where ``ecr`` of those in the other do: whole experts,
    and never more than the memory holds."""
    memory = round(before.total * ecr) * float(np.mean(before.bytes_of))
    slots = min(after.total, int(memory / float(np.mean(after.bytes_of)) + 1e-9))
    return slots / after.total


def machine_for(profile: HardwareProfile, format_: str | None, asked: str) -> tuple[HardwareProfile, Basis]:
    """The machine as computing in a format sees it, and what that rests on. ``asked``: the format's name in
    the comparison; ``format_`` None: not known."""
    name = profile.hardware.name
    curve = profile.hardware.curve(format_)
    shares = profile.shares.get(format_ or "")
    if curve is not None:
        text = f"experts of {curve.nbytes} bytes"
        return profile, Basis(machine=name, format=asked, kind="measured", text=text, why=curve.source)
    if shares is not None:
        text = ", ".join(f"{figure} x {value:g}" for figure, value in _shown(shares).items() if value != 1)
        why = profile.derived.get("formats") or profile.sources.get("formats", "")
        basis = Basis(machine=name, format=asked, kind="assumed", text=text or AS_THEY_ARE, why=why)
        return dataclasses.replace(profile, hardware=shares.of(profile.hardware)), basis
    why = "The profile has no costs of that; `daop calibrate --format` measures them"
    if format_ is None:
        why = "No format has the trace's bits of a weight; --weight-bits says how many it has"
    return profile, Basis(machine=name, format=asked, kind="unknown", text=AS_THEY_ARE, why=why)


def _shown(shares: object) -> dict[str, float]:
    figures = {"host": "host_gbs", "host_rate": "host_gflops"}
    more = {"device": "device_gbs", "device_rate": "device_gflops"}
    return {figure: getattr(shares, key) for key, figure in (figures | more).items()}
