"""A device that is the CPU: every copy at once, nothing asynchronous. ``gpu_check.py --dry-run`` walks over
it."""

from __future__ import annotations

import ctypes
import time

import torch

from daop.runtime.cuda.streams import Mark


class Moment:
    """A mark that has always been reached."""

    done = True

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...


class CpuGpu:
    """``streams.Gpu`` without a GPU."""

    device = torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        return 4 << 30, 8 << 30

    def release(self) -> None: ...

    def peak_bytes(self, *, reset: bool = False) -> int | None:
        return None

    def attach_thread(self) -> None: ...

    def synchronize(self) -> None: ...

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    send = bring = copy_in

    def mark_copies(self, *, timed: bool = False) -> Moment:
        return Moment()

    mark_compute = mark_copies

    def copies_wait(self, mark: Mark) -> None: ...

    def compute_waits(self, mark: Mark) -> None: ...

    def seconds(self, first: Mark, last: Mark) -> float:
        if not isinstance(first, Moment) or not isinstance(last, Moment):
            raise TypeError("the marks must be this device's")
        return max(1e-9, last.at - first.at)
