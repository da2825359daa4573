"""Runs on the device cuda, or on its stand-in: what the tests of the device share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cuda_standin import StandIn

from daop.api import Runtime
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.cuda.compute import DeviceBatch, DeviceExperts, Group, Sent
from daop.runtime.cuda.device import find_problem, open_gpu, read_facts
from daop.runtime.cuda.machinery import CudaDevice, CudaMachinery
from daop.runtime.cuda.slabs import DeviceSlab
from daop.runtime.cuda.streams import Gpu, PinError
from daop.runtime.machinery import Wishes
from daop.runtime.policies.base import Policy, make_policy
from daop.runtime.watching import Watcher

NO_GPU = find_problem(read_facts())  # why nothing can run on CUDA here; '' if it can
DEVICES = [
    "standin",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]),
]


def open_standin(
    model: Path,
    gpu: Gpu,
    policy: str | Policy,
    slots: int | None,
    *,
    ram: int = 1 << 40,
    dtype: str | None = None,
    watchers: Sequence[Watcher] = (),
) -> Runtime:
    """A runtime with so many slots of the first layer's size (None: as many as there are experts)."""
    checkpoint = open_checkpoint(model)
    asked = None if slots is None else slots * checkpoint.layouts[0].nbytes
    device = CudaDevice(checkpoint, Wishes(fast_memory=asked, context=64, dtype=dtype), gpu=gpu, ram=ram)
    chosen = policy if isinstance(policy, Policy) else make_policy(policy)
    runtime = Runtime(
        checkpoint,
        device,
        chosen,
        policy_name=str(policy),
        dtype=dtype,
        recorder=None,
        watchers=watchers,
        progress=lambda _, __: None,
    )
    if isinstance(gpu, StandIn):
        watch_reads(runtime, gpu)
    poison(runtime)
    gpu.synchronize()  # a real device fills on a stream of its own
    return runtime


def machinery(runtime: Runtime) -> CudaMachinery:
    found = runtime._machinery
    assert isinstance(found, CudaMachinery)
    return found


def watch_reads(runtime: Runtime, gpu: StandIn) -> None:
    """Tell the stand-in which slots every computation reads."""
    for one in machinery(runtime).compute:
        if isinstance(one.run, Watched):
            continue
        one.run = Watched(gpu, one)  # type: ignore[method-assign]


class Watched:
    """``DeviceExperts.run`` that is noted."""

    def __init__(self, gpu: StandIn, experts: DeviceExperts) -> None:
        self.gpu = gpu
        self.inner = experts.run

    def __call__(self, batch: DeviceBatch, slab: DeviceSlab, group: Group, sent: Sent) -> None:
        self.gpu.note_reads((slab.address(slot), slab.layout.nbytes) for slot in group.slots)
        self.inner(batch, slab, group, sent)


def poison(runtime: Runtime) -> None:
    """Fill what holds no expert with NaN: a byte that is computed with before it was copied shows."""
    memory = machinery(runtime).memory
    residency = runtime._machinery.residency
    for slab in memory.staging:
        slab.tensor.fill_(0xFF)
    for kind, slab in enumerate(memory.slabs):
        held = {
            residency.slot_of[flat]
            for flat in range(runtime.geometry.total)
            if residency.class_of[flat] == kind and residency.slot_of[flat] >= 0
        }
        for slot in range(slab.count):
            if slot not in held:
                slab.tensor[slot].fill_(0xFF)


def standin(seed: int | None = 0, **options: Any) -> StandIn:
    return StandIn(None if seed is None else Random(seed), **options)


def generate(
    runtime: Runtime, prompts: Sequence[Sequence[int]], steps: int, batch: int = 1
) -> list[list[int]]:
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    return [answer.token_ids for group in groups for answer in runtime.generate(group, steps)]


def open_device(
    kind: str,
    model: Path,
    gpu: StandIn,
    policy: str | Policy,
    slots: int | None,
    *,
    ram: int = 1 << 40,
    dtype: str | None = None,
) -> Runtime:
    """On the stand-in ``gpu``, or on the real device with its limit of locked memory."""
    used: Gpu = gpu
    if kind == "cuda":
        used = open_gpu()
        limit_pins(used, gpu.pin_limit)
    return open_standin(model, used, policy, slots, ram=ram, dtype=dtype)


def open_gpu_of(kind: str, random: Random | None, *, pin_limit: int = 1 << 62) -> Gpu:
    """The stand-in, or the real device, with a limit of locked memory."""
    if kind == "standin":
        return StandIn(random, pin_limit=pin_limit)
    gpu = open_gpu()
    limit_pins(gpu, pin_limit)
    return gpu


def check_faults(gpu: Gpu) -> None:
    """Nothing was done too early, as far as anybody looks, and nothing is left locked."""
    if isinstance(gpu, StandIn):
        assert gpu.faults == []
        assert gpu.locked == {}


def read(gpu: Gpu, slab: DeviceSlab, slot: int) -> None:
    """A computation reads a slot."""
    if isinstance(gpu, StandIn):
        gpu.note_reads([(slab.address(slot), slab.layout.nbytes)])
    else:
        slab.tensor[slot].sum()


def limit_pins(gpu: Gpu, limit: int) -> None:
    """Lock no more than ``limit`` bytes of arenas."""
    real, left = gpu.pin, [limit]

    def pin(address: int, nbytes: int) -> None:
        if nbytes > left[0]:
            raise PinError("out of the memory that may be locked")
        real(address, nbytes)
        left[0] -= nbytes

    gpu.pin = pin  # type: ignore[method-assign]
