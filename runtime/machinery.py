"""What of a loaded model depends on the device: memory, transfers, executor.

``Machinery`` is what the front door needs of them; ``HostMachinery`` is the device ``host``, a hot set in RAM
with files behind it.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Protocol

from .checkpoint import Checkpoint
from .conductor import Conductor
from .executor import Executor, HostExecutor
from .files import FileReader
from .host_compute import HostExperts
from .memory import MemoryPlan
from .model import BuiltModel
from .policies.base import Policy
from .recording import Recorder
from .residency import Residency
from .rough_costs import RoughCosts
from .slots import SlotMemory
from .statistics import Statistics
from .transfers import CHUNK, FileTransfers
from .watching import Watcher

READ_THREADS = 8
"""Reads in flight. An SSD needs several to reach its bandwidth; they sleep, so cores do not limit them."""

STAGING = 4
"""Experts that are computed and dropped pass through so many buffers: one computed, the rest being read."""


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

    def close(self) -> None:
        """End threads, free memory, close files. Safe to call twice."""


class HostMachinery:
    """The device ``host``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: MemoryPlan,
        policy: Policy,
        built: BuiltModel,
        *,
        direct_io: bool,
        recorder: Recorder | None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.plan = plan
        self.memory = SlotMemory(checkpoint.layouts, plan.slots, STAGING)
        self.reader = FileReader(checkpoint.files, direct_io=direct_io, largest=CHUNK)
        self.transfers = FileTransfers(checkpoint, self.memory, self.reader, threads=READ_THREADS)
        geometry = checkpoint.geometry
        self.residency = Residency(geometry, plan.slots, self.memory.class_of_layer)
        compute = [
            HostExperts(layout, form, count)
            for layout, form, count in zip(checkpoint.layouts, built.forms, geometry.experts, strict=True)
        ]
        conductor = Conductor(
            policy, self.residency, self.transfers, RoughCosts(geometry), Statistics(geometry), watchers
        )
        if watchers:
            self.transfers.span = conductor.span
        self.executor = HostExecutor(
            checkpoint=checkpoint,
            memory=self.memory,
            transfers=self.transfers,
            conductor=conductor,
            compute=compute,
            gates=built,
            recorder=recorder,
        )

    @property
    def bytes_read(self) -> int:
        return self.transfers.bytes_read

    def memory_bytes(self) -> dict[str, int]:
        return {"experts": self.memory.expert_bytes, "peak": peak_rss()}

    def drop_cache(self) -> None:
        self.reader.drop_cache()

    def close(self) -> None:
        self.transfers.close()
        self.reader.close()


def peak_rss() -> int:
    """The most RAM that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
