"""The measurements of ``gpu_check.py``: each takes what it measures and returns figures as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_bench import Bench, Driven
from gpu_models import Shape, topical_tokens

from daop import comparison
from daop.core import Step
from daop.hardware import FIGURES, HardwareProfile, load, render
from daop.runtime.costs import Hardware
from daop.runtime.cuda import measure
from daop.runtime.cuda.streams import Gpu
from daop.runtime.policies.base import Plan, Policy, View
from daop.training.parquet import read_trace
from daop.training.recorder import TraceRecorder

MEGABYTES = (1, 4, 16, 64)
POLICIES = ("static", "static_frequency", "lru", "adaptive", "speculative", "fiddler")
REPEATS = 3
TOLERANCE = 4.0  # our distance from float32 may be so many times transformers' spread among its own ways


def check_link(gpu: Gpu, dry: bool) -> dict[str, Any]:
    """GB/s of copies to the device by size, from pinned and from pageable memory."""
    largest = (1 if dry else MEGABYTES[-1]) << 20
    target = torch.empty(largest, dtype=torch.uint8, device=gpu.device)
    pinned, pageable = gpu.pinned(largest), torch.ones(largest, dtype=torch.uint8)
    found: dict[str, Any] = {"pinned_gbs": {}, "pageable_gbs": {}}
    for megabytes in MEGABYTES:
        size = min(largest, megabytes << 20)
        for name, source in (("pinned_gbs", pinned), ("pageable_gbs", pageable)):
            seconds = measure.copy_seconds(gpu, target.data_ptr(), source.data_ptr(), size, repeats=9)
            found[name][f"{megabytes}MB"] = size / seconds / 1e9
    found["small_us"] = measure.copy_seconds(gpu, target.data_ptr(), pinned.data_ptr(), 4096) * 1e6
    return found


def check_experts(bench: Bench) -> dict[str, Any]:
    """Microseconds of one expert by tokens: on the device, both ways of multiplying, and on the host."""
    machinery, compute = bench.base, bench.compute[0]
    staging = machinery.memory.staging[0]
    slots = list(range(staging.count))
    dtype = bench.model.dtype
    ways = measure.choose_way(bench.gpu, compute, staging, slots, dtype)
    flats = [flat for flat in range(bench.checkpoint.geometry.experts[0]) if machinery.weights.in_ram(flat)]
    held = [torch.from_numpy(machinery.weights.array(flat)) for flat in flats[:16]]
    return {
        "grouped_us": {tokens: grouped * 1e6 for tokens, grouped, _ in ways},
        "loop_us": {tokens: loop * 1e6 for tokens, _, loop in ways},
        "grouped_from_rows": compute.groups_from,
        "host_us": {
            tokens: measure.host_seconds(machinery.host_compute[0], held, tokens, dtype) * 1e6
            for tokens in (1, 8, 64)
        },
        "measured_at_start": dataclasses.asdict(machinery.hardware),
    }


def check_logits(bench: Bench, tokens: list[int], steps: int, truth: Driven | None) -> dict[str, Any]:
    """Every policy's logits on poisoned slots. With ``truth``: against transformers'; and all against each
    other, which differ by rounding only."""
    cases: list[tuple[str | Policy, float]] = [
        *(("static", 1.0), ("lru", 0.25), ("speculative", 0.25), ("adaptive", 0.125), ("fiddler", 0.25)),
        *(("on_demand", 0.0), (Thirds(), 0.5)),
    ]
    found: dict[str, Any] = {"difference": {}, "same_token": {}, "wrong": []}
    first: Driven | None = truth
    for policy, ecr in cases:
        name = f"{policy if isinstance(policy, str) else 'thirds'}@{ecr}"
        with bench.run(policy, ecr, poison=True) as machinery:
            driven = bench.drive(machinery, tokens, steps)
        if first is None:
            first = driven
        scale = float(first.logits.std())
        away = float((driven.logits - first.logits).abs().mean()) / scale
        agree = float((driven.logits.argmax(-1) == first.logits.argmax(-1)).float().mean())
        found["difference"][name], found["same_token"][name] = away, agree
        if not bool(torch.isfinite(driven.logits).all()) or away > 0.05:
            found["wrong"].append(name)
    return found


class Thirds(Policy):
    """Serves misses in all three ways."""

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        return Plan(keep=missing[::3], stream=missing[1::3], host=missing[2::3])


class OnHost(Policy):
    """The first half of every layer is resident, the rest is computed on the host."""

    def start(self, geometry: Any, slots: int, costs: Any, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        halves = [
            range(geometry.offsets[n], geometry.offsets[n] + geometry.experts[n] // 2)
            for n in range(geometry.layers)
        ]
        return [flat for half in halves for flat in half][:slots]

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        return Plan(host=missing)


def check_overlap(bench: Bench) -> dict[str, Any]:
    """A layer's resident experts alone, host experts alone, both together: what of the shorter one is
    hidden."""
    count = bench.checkpoint.geometry.experts[0]
    form = bench.built.forms[0]
    best: dict[str, Any] = {"overlap": None}
    with bench.run(OnHost(), 0.5) as machinery:
        executor = machinery.executor
        for tokens in (1, 8, 64, 512):
            hidden = torch.randn(tokens, form.hidden, device=bench.gpu.device).to(bench.model.dtype)
            resident = torch.arange(count // 2, device=bench.gpu.device)
            absent = torch.arange(count // 2, count // 2 + min(4, count // 2), device=bench.gpu.device)
            times = [
                _layer_seconds(bench.gpu, executor, hidden, ids)
                for ids in (resident, absent, torch.cat((resident, absent)))
            ]
            shorter = min(times[:2])
            overlap = (times[0] + times[1] - times[2]) / shorter
            best[f"{tokens}_tokens"] = {
                "device_us": times[0] * 1e6,
                "host_us": times[1] * 1e6,
                "both_us": times[2] * 1e6,
                "overlap": overlap,
            }
            # Where the two are far apart there is little to hide and much noise.
            if best["overlap"] is None or overlap > best["overlap"]:
                best["overlap"] = overlap
    return best


def _layer_seconds(gpu: Gpu, executor: Any, hidden: torch.Tensor, ids: torch.Tensor) -> float:
    chosen = ids.expand(len(hidden), -1).contiguous()
    weights = torch.full(chosen.shape, 1 / len(ids), device=hidden.device)
    times = []
    for attempt in range(6):
        gpu.synchronize()
        began = gpu.mark_compute(timed=True)
        executor(0, hidden, chosen, weights)
        ended = gpu.mark_compute(timed=True)
        ended.synchronize()
        if attempt:
            times.append(gpu.seconds(began, ended))
    return float(np.median(times))


def check_policies(
    bench: Bench, shape: Shape, seed: int, steps: int, prompt: int, shares: Sequence[float]
) -> dict[str, Any]:
    """Decode and prefill tokens/s by budget and policy: medians, policies in turns. First the routing is
    recorded, so that the policies which learn from other traffic have some, and the simulator too."""
    told = bench.checkpoint.path.parent / "trace.parquet"
    source = {"engine": "daop", "model": shape.family}
    with bench.run("lru", 0.5) as machinery:
        recorder = TraceRecorder(told, bench.checkpoint.geometry, source=source)
        for sequence in range(8):
            tokens = topical_tokens(shape, prompt + steps, seed + 100 + sequence)
            bench.drive(machinery, tokens, steps, recorder, sequence)
        recorder.close()
    bench.profile = comparison.learn_profile(read_trace(told), bench.checkpoint.geometry)
    decode: dict[str, dict[str, float]] = {}
    prefill: dict[str, dict[str, float]] = {}
    details: dict[str, Any] = {}
    for share in shares:
        decode[str(share)], prefill[str(share)] = {}, {}
        for name in POLICIES if share < 1 else ("static", "adaptive"):
            with bench.run(name, share) as machinery:
                runs = []
                for repeat in range(REPEATS + 1):
                    tokens = topical_tokens(shape, prompt + steps, seed + 200 + repeat)
                    runs.append(bench.drive(machinery, tokens, steps))
                machinery.executor.settle()
                statistics = machinery.executor.conductor.statistics.as_dict()
            decode[str(share)][name] = float(np.median([run.tokens_per_second for run in runs[1:]]))
            prefill[str(share)][name] = float(np.median([run.prefill_tokens_per_second for run in runs[1:]]))
            details[f"{name}@{share}"] = {
                key: statistics[key] for key in ("hit_rate", "stall_ms", "policy_us_per_layer", "prefetches")
            }
    return {
        "decode": decode,
        "prefill": prefill,
        "details": details,
        "link_share": _link_share(bench, shape, seed, steps),
    }


def _link_share(bench: Bench, shape: Shape, seed: int, steps: int) -> float:
    """Nothing resident, everything streamed: bytes over time, as a share of what pinned copies reach."""
    with bench.run("on_demand", 0.0) as machinery:
        tokens = topical_tokens(shape, 16 + steps, seed + 300)
        bench.drive(machinery, tokens, steps)
        before = machinery.bytes_read
        driven = bench.drive(machinery, tokens, steps)
        moved = machinery.bytes_read - before
    seconds = steps / driven.tokens_per_second + 16 / driven.prefill_tokens_per_second
    return moved / seconds / (bench.base.hardware.link_gbs * 1e9)


def best_static(row: dict[str, float]) -> float | None:
    return max((value for name, value in row.items() if name.startswith("static")), default=None)


def save_machine(path: Path, hardware: Hardware, found: dict[str, Any], top_k: int, nbytes: int) -> None:
    """The machine as the simulator reads it. A layer's time beside its experts is what is left of a decode
    layer with everything resident, so that it holds what asking, planning and launching cost."""
    link = found.get("link", {})
    pageable = link.get("pageable_gbs", {}).get("16MB")
    named = found.get("conditions", {}).get("device", "this machine")
    hardware = dataclasses.replace(hardware, name=str(named), link_pageable_gbs=pageable)
    seen = found.get("policies", {}).get("layer_seconds_all_resident")
    if seen is not None:
        experts = top_k * nbytes / (hardware.device_gbs * 1e9)
        beside = max(hardware.layer_us, (seen - experts) * 1e6)
        hardware = dataclasses.replace(hardware, layer_us=round(beside, 2))
    figures = [f.name for f in dataclasses.fields(hardware) if f.name in FIGURES]
    sources = dict.fromkeys(figures, "benchmarks/gpu_check.py on this machine, medians")
    about = f"measured by benchmarks/gpu_check.py ({found.get('conditions')})"
    profile = HardwareProfile(
        hardware=hardware,
        about=about,
        sources=sources,
        derived={},
        expert_bytes=nbytes,
        weight_bits=16.0,
    )
    path.write_text(render(profile))


def check_simulated(bench: Bench, machine: Path, measured: dict[str, Any], trace: Path) -> dict[str, Any]:
    """The recorded routing on the measured machine: simulated decode tokens/s against measured."""
    recorded = read_trace(trace).grouped()
    last = recorded.select(recorded.sequences[-3:])
    traffic = comparison.traffic_of(last, bench.checkpoint.geometry)
    profile = load(str(machine))
    found: dict[str, Any] = {"rows": {}, "largest_difference": 0.0}
    for share, row in measured["decode"].items():
        setting = comparison.Setting(hardware=profile, ecr=float(share))
        for name, speed in row.items():
            simulated = comparison.simulate_one(traffic, bench.profile, setting, name)["tokens_per_second"]
            difference = abs(simulated - speed) / speed
            found["rows"][f"{name}@{share}"] = {
                "measured": speed,
                "simulated": simulated,
                "difference": difference,
            }
            found["largest_difference"] = max(found["largest_difference"], difference)
    return found
