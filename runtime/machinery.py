"""What of a loaded model depends on the device: memory, transfers, executor.

``Device`` is a device that could run a checkpoint, ``Machinery`` one that does. The device ``host``, a hot
set in RAM with files behind it, is here; ``cuda`` in the folder of that name."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from daop.core import DaopError

from .checkpoint import Checkpoint
from .conductor import Conductor
from .costs import ROUGH, Hardware, HardwareCosts
from .executor import Executor
from .experts import ExpertsFn
from .files import FileReader
from .formats import format_of
from .host_compute import HostExperts
from .host_executor import HostExecutor
from .memory import MemoryPlan, plan_memory
from .model import BuiltModel
from .policies.base import Policy
from .recording import Recorder
from .residency import Residency
from .slots import SlotMemory
from .statistics import Statistics
from .transfers import CHUNK, FileTransfers
from .watching import Watcher

DEVICES = ("host", "cuda")

READ_THREADS = 8
"""Reads in flight. An SSD needs several to reach its bandwidth; they sleep, so cores do not limit them."""

STAGING = 4
"""Experts that are computed and dropped pass through so many buffers: one computed, the rest being read."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a run asks of its device: see ``daop.load``. ``hardware``: what things cost, if known."""

    fast_memory: int | str | None = None
    ecr: float | None = None
    context: int = 2048
    batch: int = 1
    dtype: str | None = None
    direct_io: bool = False
    hardware: Hardware | None = None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a device is set up for. ``use`` sets what the model's experts modules call, for trials; what they
    call in the end is the caller's to set. ``told``: what is being done, and the share done."""

    built: BuiltModel
    policy: Policy
    use: Callable[[ExpertsFn], None]
    told: Callable[[str, float], None]
    recorder: Recorder | None = None
    watchers: Sequence[Watcher] = ()


class Device(Protocol):
    """A device that was found to be there and large enough for a checkpoint."""

    @property
    def torch_device(self) -> torch.device:
        """Where everything but the routed experts lies."""

    def set_up(self, setup: Setup) -> Machinery:
        """Allocate and connect."""


def find_device(name: str, checkpoint: Checkpoint, wishes: Wishes) -> Device:
    """The device of that name; raises DaopError if it is not there or the model does not fit."""
    if name == "host":
        return HostDevice(checkpoint, wishes)
    if name == "cuda":
        from .cuda.machinery import CudaDevice

        return CudaDevice(checkpoint, wishes)
    raise DaopError(f"--device {name} is not known; known: {', '.join(DEVICES)}")


class Machinery(Protocol):
    """A device at work on one model."""

    @property
    def plan(self) -> MemoryPlan: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def residency(self) -> Residency: ...

    @property
    def bytes_read(self) -> int:
        """Bytes of experts moved towards fast memory since the start."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes in use, by purpose."""

    def drop_cache(self) -> None:
        """Ask the kernel to forget what it cached of the checkpoint's files."""

    def make_room(self) -> bool:
        """Give up fast memory because there is too little beside it; False if there is none to give up."""

    def close(self) -> None:
        """End threads, free memory, close files. Safe to call twice."""


class HostDevice:
    """RAM, with files behind it."""

    torch_device = torch.device("cpu")

    def __init__(self, checkpoint: Checkpoint, wishes: Wishes) -> None:
        self._checkpoint = checkpoint
        self._wishes = wishes
        self.plan = plan_memory(
            checkpoint,
            fast_memory=wishes.fast_memory,
            ecr=wishes.ecr,
            context=wishes.context,
            batch=wishes.batch,
            staging=STAGING,
            dtype=wishes.dtype,
        )

    def set_up(self, setup: Setup) -> HostMachinery:
        return HostMachinery(self._checkpoint, self.plan, setup, self._wishes)


class HostMachinery:
    """The device ``host``."""

    def __init__(self, checkpoint: Checkpoint, plan: MemoryPlan, setup: Setup, wishes: Wishes) -> None:
        self.plan = plan
        self.memory = SlotMemory(checkpoint.layouts, plan.slots, STAGING)
        self.reader = FileReader(checkpoint.files, direct_io=wishes.direct_io, largest=CHUNK)
        self.transfers = FileTransfers(checkpoint, self.memory, self.reader, threads=READ_THREADS)
        try:
            self.executor = self._executor(checkpoint, setup, wishes.hardware)
        except BaseException:
            self.close()
            raise

    def _executor(self, checkpoint: Checkpoint, setup: Setup, hardware: Hardware | None) -> HostExecutor:
        geometry, plan = checkpoint.geometry, self.plan
        self.residency = Residency(geometry, plan.slots, self.memory.class_of_layer)
        forms = setup.built.forms
        compute = [
            HostExperts(layout, form, count)
            for layout, form, count in zip(checkpoint.layouts, forms, geometry.experts, strict=True)
        ]
        costs = HardwareCosts(
            hardware or ROUGH, geometry, weight_bits(checkpoint), format_of(checkpoint.layouts[0])
        )
        conductor = Conductor(
            setup.policy, self.residency, self.transfers, costs, Statistics(geometry), setup.watchers
        )
        if setup.watchers:
            self.transfers.span = conductor.span
        return HostExecutor(
            checkpoint=checkpoint,
            memory=self.memory,
            transfers=self.transfers,
            conductor=conductor,
            compute=compute,
            gates=setup.built,
            recorder=setup.recorder,
        )

    @property
    def bytes_read(self) -> int:
        return self.transfers.bytes_read

    def memory_bytes(self) -> dict[str, int]:
        return {"experts": self.memory.expert_bytes, "peak": peak_rss()}

    def drop_cache(self) -> None:
        self.reader.drop_cache()

    def make_room(self) -> bool:
        return False

    def close(self) -> None:
        self.transfers.close()
        self.reader.close()


def weight_bits(checkpoint: Checkpoint) -> float:
    """Bits of one stored weight of the experts, scales included."""
    layout, source = checkpoint.layouts[0], checkpoint.skeleton.experts[0].sources.values()
    weights = sum(math.prod(part.shape) for part in source)
    return 8.0 * layout.stored_bytes / weights


def peak_rss() -> int:
    """The most RAM that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
