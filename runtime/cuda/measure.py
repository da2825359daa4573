"""What moving and computing an expert costs on this machine: measured with the model's own experts, in a
second.

The same functions serve the start of a run, whose policies need the ratios, and ``benchmarks/gpu_check.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from daop.runtime.costs import Hardware
from daop.runtime.host_compute import HostExperts

from .compute import DeviceExperts, Sent, make_group
from .slabs import DeviceSlab
from .streams import Gpu

TINY = 1e-9  # seconds; a clock's step, so that nothing is divided by zero
ROWS = (1, 8, 64, 512)


def copy_seconds(gpu: Gpu, target: int, source: int, nbytes: int, repeats: int = 5) -> float:
    """One copy from host memory at ``source``: the median of several that follow each other."""
    gpu.copy_in(target, source, nbytes)
    marks = [gpu.mark_copies(timed=True)]
    for _ in range(repeats):
        gpu.copy_in(target, source, nbytes)
        marks.append(gpu.mark_copies(timed=True))
    marks[-1].synchronize()
    return _median([gpu.seconds(a, b) for a, b in pairwise(marks)])


def device_seconds(
    gpu: Gpu,
    compute: DeviceExperts,
    slab: DeviceSlab,
    slots: Sequence[int],
    tokens: int,
    dtype: torch.dtype,
    repeats: int = 5,
) -> float:
    """Computing the experts in ``slots`` for ``tokens`` tokens each, per expert."""
    hidden = torch.randn(tokens, compute.form.hidden, device=gpu.device).to(dtype)
    weights = torch.rand(tokens, len(slots), device=gpu.device)
    pairs_of = [np.arange(tokens, dtype=np.int64) * len(slots) + k for k in range(len(slots))]
    group = make_group(slots, pairs_of)
    pairs, rows, *ends = [torch.from_numpy(array).to(gpu.device) for array in group.arrays()]
    sent = Sent(pairs, rows, ends)
    times = []
    for attempt in range(repeats + 1):
        began = gpu.mark_compute(timed=True)
        batch = compute.begin(hidden, weights)
        compute.run(batch, slab, group, sent)
        compute.finish(batch)
        ended = gpu.mark_compute(timed=True)
        ended.synchronize()
        if attempt:
            times.append(gpu.seconds(began, ended))
    return _median(times) / len(slots)


def host_seconds(
    compute: HostExperts, slots: Sequence[torch.Tensor], tokens: int, dtype: torch.dtype, repeats: int = 3
) -> float:
    """Computing an expert for so many tokens on the CPU, its weights not in cache if ``slots`` are many."""
    hidden = torch.randn(tokens, compute.form.hidden).to(dtype)
    ids = torch.arange(len(slots)).expand(tokens, -1).contiguous()
    weights = torch.rand(tokens, len(slots))

    def run() -> None:
        batch = compute.begin(hidden, ids, weights)
        compute.run(batch, list(range(len(slots))), slots)
        compute.total(batch)

    run()
    return _median([_timed(run) for _ in range(repeats)]) / len(slots)


def choose_way(
    gpu: Gpu, compute: DeviceExperts, slab: DeviceSlab, slots: Sequence[int], dtype: torch.dtype
) -> list[tuple[int, float, float]]:
    """Set ``compute.groups_from`` to what is fastest over the measured numbers of tokens. Returns (tokens,
    seconds as one grouped product, seconds as a loop), per expert."""
    if compute.groups_from == 0 or dtype != torch.bfloat16:
        return []
    found = []
    for tokens in ROWS:
        seconds = []
        for groups_from in (1, 1 << 62):
            compute.groups_from = groups_from
            seconds.append(device_seconds(gpu, compute, slab, slots, tokens, dtype, repeats=3))
        found.append((tokens, seconds[0], seconds[1]))
    # From the number of rows on from which grouping costs least in all; never: behind the last.
    totals = [
        sum(loop for _, _, loop in found[:cut]) + sum(grouped for _, grouped, _ in found[cut:])
        for cut in range(len(found) + 1)
    ]
    cut = totals.index(min(totals))
    compute.groups_from = 1 if cut == 0 else ROWS[cut - 1] * len(slots) + 1 if cut < len(ROWS) else 1 << 62
    return found


@dataclass(frozen=True)
class Bench:
    """What there is to measure with: the experts of one layer, and the staging slots that they fit into.
    ``flats`` are in RAM; ``source`` is where the first can be copied from without being staged, ``nbytes``
    how much of it."""

    compute: DeviceExperts
    host_compute: HostExperts
    staging: DeviceSlab
    slots: list[torch.Tensor]  # the experts' bytes in RAM
    source: int
    nbytes: int


def measure_machine(gpu: Gpu, bench: Bench, dtype: torch.dtype, layer: tuple[float, float]) -> Hardware:
    """Costs of this machine; sets which way of multiplying ``bench.compute`` uses. ``layer``: seconds of a
    layer without its experts, for one row and for every further one."""
    staging, nbytes = bench.staging, bench.nbytes
    for slot in range(staging.count):  # so that what is computed with are numbers
        gpu.copy_in(staging.address(slot), bench.source, nbytes)
    gpu.synchronize()
    pinned = copy_seconds(gpu, staging.address(0), bench.source, nbytes)
    small = copy_seconds(gpu, staging.address(0), bench.source, min(4096, nbytes))
    numbers = list(range(staging.count))
    choose_way(gpu, bench.compute, staging, numbers, dtype)
    return as_hardware(
        name="this machine",
        nbytes=staging.layout.nbytes,
        copied=nbytes,
        pinned=pinned,
        small=small,
        pageable=None,
        device={
            tokens: device_seconds(gpu, bench.compute, staging, numbers, tokens, dtype, repeats=3)
            for tokens in (1, 64)
        },
        host={
            tokens: host_seconds(bench.host_compute, bench.slots, tokens, dtype, repeats=2)
            for tokens in (1, 16)
        },
        bring=2 * small,
        layer=layer[0],
        layer_per_row=layer[1],
    )


def unmeasured(layer: tuple[float, float]) -> Hardware:
    """Rules of thumb, where no expert is in RAM to be measured."""
    return Hardware(
        name="this machine (not measured)",
        link_gbs=1.0,
        host_gbs=10.0,
        host_gflops=150.0,
        device_gbs=500.0,
        device_gflops=50000.0,
        layer_us=max(0.0, layer[0] * 1e6),
        layer_us_per_row=max(0.0, layer[1] * 1e6),
    )


def as_hardware(
    *,
    name: str,
    nbytes: int,
    copied: int,
    pinned: float,
    small: float,
    pageable: float | None,
    device: dict[int, float],
    host: dict[int, float],
    bring: float,
    layer: float,
    layer_per_row: float,
) -> Hardware:
    """A profile that the simulator reads, from seconds: of copying one expert of ``nbytes`` (``small``: of a
    few KB), of computing it on device and host by tokens, of a round trip of an activation (``bring``), and
    of a layer without its experts."""
    latency = min(small, pinned / 2)
    few, many = min(device), max(device)
    host_few, host_many = min(host), max(host)
    return Hardware(
        name=name,
        tier="device",
        link_gbs=_figure(copied / (pinned - latency) / 1e9),
        link_latency_us=round(latency * 1e6, 2),
        link_pageable_gbs=None if pageable is None else _figure(copied / pageable / 1e9),
        host_gbs=_figure(nbytes / host[host_few] / 1e9),
        host_gflops=_figure(max(host_many * nbytes / host[host_many], nbytes / host[host_few]) / 1e9),
        activation_us=round(bring * 1e6, 2),
        device_gbs=_figure(nbytes / device[few] / 1e9),
        device_gflops=_figure(max(many * nbytes / device[many], nbytes / device[few]) / 1e9),
        layer_us=round(max(layer, 0.0) * 1e6, 2),
        layer_us_per_row=round(max(layer_per_row, 0.0) * 1e6, 4),
    )


def _figure(value: float) -> float:
    return float(f"{min(max(value, 1e-3), 9e8):.4g}")


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _median(times: Sequence[float]) -> float:
    return max(TINY, statistics.median(times))
