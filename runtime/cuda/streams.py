"""The few things that daop asks of a GPU beyond tensors: two streams, marks in them, copies, pinned memory.

``Gpu`` is the seam: everything above it is plain Python and torch, and runs in the tests on a stand-in whose
copies end as late and in as inconvenient an order as CUDA allows. ``CupyGpu`` is the real one.

Two streams, each in order, unordered to each other but where one waits for a mark of the other:
    compute   torch's current stream; also the small copies that belong to a computation
    copies    experts on their way into HBM
Addresses are plain integers; who passes one keeps its memory alive until a mark behind the copy is done.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class PinError(Exception):
    """The system refuses to pin memory: a limit of the container, ``ulimit -l``, WSL."""


class Mark(Protocol):
    """A point in a stream (a CUDA event)."""

    @property
    def done(self) -> bool:
        """Whether everything before it has ended; does not wait."""

    def synchronize(self) -> None:
        """Block until everything before it has ended."""


class Gpu(Protocol):
    """One device and its two streams."""

    @property
    def device(self) -> torch.device: ...

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total) of the device's memory, other processes counted."""

    def release(self) -> None:
        """Give memory that torch keeps for later back to the device."""

    def peak_bytes(self, *, reset: bool = False) -> int | None:
        """The most bytes that tensors took since the last reset; None where nobody counts."""

    def attach_thread(self) -> None:
        """Called first in every thread that uses this object."""

    def synchronize(self) -> None:
        """Block until both streams are empty."""

    # -- pinned memory -----------------------------------------------------------------------------

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock memory that starts at a page; raises PinError."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """A small page-locked buffer, uint8 on the CPU; raises PinError."""

    # -- the stream of copies ----------------------------------------------------------------------

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Host to device."""

    def mark_copies(self, *, timed: bool = False) -> Mark: ...

    def copies_wait(self, mark: Mark) -> None:
        """What is copied from now on begins after the mark."""

    # -- the stream of computation -----------------------------------------------------------------

    def send(self, target: int, source: int, nbytes: int) -> None:
        """Host to device, in order with the computation."""

    def bring(self, target: int, source: int, nbytes: int) -> None:
        """Device to host, in order with the computation."""

    def mark_compute(self, *, timed: bool = False) -> Mark: ...

    def compute_waits(self, mark: Mark) -> None:
        """What is computed from now on begins after the mark."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between two timed marks, both done."""


class CupyMark:
    """A CUDA event."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.done)

    def synchronize(self) -> None:
        self.event.synchronize()


class CupyGpu:
    """CuPy's streams, events and asynchronous copies beside torch's tensors; ``index`` as CUDA counts."""

    def __init__(self, index: int = 0) -> None:
        import cupy

        self.device = torch.device("cuda", index)
        self._cuda: Any = cupy.cuda
        self._runtime: Any = cupy.cuda.runtime
        self._index = index
        self.attach_thread()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._copies: Any = self._cuda.Stream(non_blocking=True)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._index)
        return int(free), int(total)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def peak_bytes(self, *, reset: bool = False) -> int | None:
        peak = int(torch.cuda.max_memory_allocated(self._index))
        if reset:
            torch.cuda.reset_peak_memory_stats(self._index)
        return peak

    def attach_thread(self) -> None:
        self._runtime.setDevice(self._index)  # CUDA's current device is each thread's own

    def synchronize(self) -> None:
        self._copies.synchronize()
        torch.cuda.synchronize(self._index)

    def pin(self, address: int, nbytes: int) -> None:
        try:
            self._runtime.hostRegister(address, nbytes, 0)
        except self._runtime.CUDARuntimeError as error:
            raise PinError(str(error)) from error

    def unpin(self, address: int) -> None:
        self._runtime.hostUnregister(address)

    def pinned(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise PinError(str(error)) from error

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyHostToDevice, self._copies.ptr)

    def mark_copies(self, *, timed: bool = False) -> CupyMark:
        return self._mark(self._copies.ptr, timed, sleeps=True)

    def copies_wait(self, mark: Mark) -> None:
        self._wait(self._copies.ptr, mark)

    def send(self, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(
            target, source, nbytes, self._runtime.memcpyHostToDevice, self._compute_stream()
        )

    def bring(self, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(
            target, source, nbytes, self._runtime.memcpyDeviceToHost, self._compute_stream()
        )

    def mark_compute(self, *, timed: bool = False) -> CupyMark:
        return self._mark(self._compute_stream(), timed, sleeps=False)

    def compute_waits(self, mark: Mark) -> None:
        self._wait(self._compute_stream(), mark)

    def seconds(self, first: Mark, last: Mark) -> float:
        if not isinstance(first, CupyMark) or not isinstance(last, CupyMark):
            raise TypeError("both marks must be this GPU's")
        return float(self._cuda.get_elapsed_time(first.event, last.event)) * 1e-3

    def _compute_stream(self) -> int:
        """torch's current stream, which a caller may change."""
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def _mark(self, stream: int, timed: bool, *, sleeps: bool) -> CupyMark:
        """``sleeps``: who waits for it gives its core away, and wakes up a little later."""
        event = self._cuda.Event(block=sleeps, disable_timing=not timed)
        self._runtime.eventRecord(event.ptr, stream)
        return CupyMark(event)

    def _wait(self, stream: int, mark: Mark) -> None:
        if not isinstance(mark, CupyMark):
            raise TypeError("the mark must be this GPU's")
        self._runtime.streamWaitEvent(stream, mark.event.ptr)
