"""A GPU made of memory on the host, as unkind as CUDA allows.

Copies wait in their stream until something forces them: a computation that waits for a mark, a host that
does, or the ``random`` source, which lets some through whenever it is asked. What is computed is computed at
once, so a computation that did not wait for its experts reads what was in the slot before. Three faults are
looked for that would not show in the result:
    a copy into a slot that a computation, as far as the streams are ordered, may not have read yet a source
    in pinned memory that is changed before its copy is known to have ended a buffer that is read by the host
    before what was brought into it is known to have arrived (it is poisoned)
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable
from random import Random

import torch

from daop.runtime.cuda.streams import Mark, PinError


class Point:
    """A mark; ``reads``: computations before it, ``ended``: whether what is before it has been carried
    out."""

    def __init__(self, gpu: StandIn, *, copies: bool, reads: int, brings: int) -> None:
        self.gpu = gpu
        self.copies = copies
        self.reads = reads
        self.brings = brings
        self.ended = not copies
        self.at = time.perf_counter()

    @property
    def done(self) -> bool:
        with self.gpu.lock:
            self.gpu.drift()
            if self.ended and not self.copies:
                if self.gpu.random is None or self.gpu.random.random() < 0.5:
                    return False  # an event may always be late
                self.gpu.learn(self)
            return self.ended

    def synchronize(self) -> None:
        with self.gpu.lock:
            if self.copies:
                self.gpu.carry_out(self)
            else:
                self.gpu.learn(self)


class StandIn:
    """See above. ``random`` None: nothing happens before it must. ``pin_limit``: bytes that may be locked."""

    def __init__(
        self, random: Random | None = None, *, pin_limit: int = 1 << 62, free: int = 1 << 30
    ) -> None:
        self.device = torch.device("cpu")
        self.random = random
        self.lock = threading.RLock()
        self.pin_limit = pin_limit
        self.free = free
        self.locked: dict[int, int] = {}
        self.queue: deque[tuple[int, int, int] | Point] = deque()
        self.brings: deque[tuple[int, int, int]] = deque()  # to the host, not yet carried out
        self.brought = 0  # how many have been
        self.sends: list[tuple[int, bytes]] = []  # sources whose copies nobody knows to have ended
        self.read_of: dict[tuple[int, int], int] = {}  # bytes (begin, end) -> number of the last reading
        self.reads = 0  # computations that read slots
        self.ordered = 0  # readings that the stream of copies waits for
        self.known = 0  # readings that the host knows to have ended
        self.copied_bytes = 0
        self.largest_copy = 0
        self.faults: list[str] = []  # the test asserts that there are none

    # -- what the tests say and ask --------------------------------------------------------------

    def note_reads(self, places: Iterable[tuple[int, int]]) -> None:
        """A computation is about to read these (address, nbytes)."""
        with self.lock:
            self.reads += 1
            for address, nbytes in places:
                self.read_of[address, address + nbytes] = self.reads

    def drift(self) -> None:
        if self.random is not None:
            for _ in range(self.random.choice((0, 0, 1, 3))):
                self._step()

    def learn(self, point: Point) -> None:
        """The host has seen that a point of the computation was reached."""
        self.known = max(self.known, point.reads)
        while self.brought < point.brings:
            target, source, nbytes = self.brings.popleft()
            ctypes.memmove(target, source, nbytes)
            self.brought += 1
        for address, content in self.sends:
            if ctypes.string_at(address, len(content)) != content:
                self.faults.append("a source was changed before its copy had ended")
        self.sends.clear()

    def carry_out(self, point: Point) -> None:
        while not point.ended:
            self._step()

    def _step(self) -> None:
        if not self.queue:
            return
        what = self.queue.popleft()
        if isinstance(what, Point):
            what.ended = True
            what.at = time.perf_counter()
        else:
            ctypes.memmove(*what)

    # -- Gpu -----------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        return self.free, 2 * self.free

    def release(self) -> None: ...

    def peak_bytes(self, *, reset: bool = False) -> int | None:
        return None

    def attach_thread(self) -> None: ...

    def synchronize(self) -> None:
        self.mark_copies().synchronize()
        self.mark_compute().synchronize()

    def pin(self, address: int, nbytes: int) -> None:
        assert address % 4096 == 0, "only whole pages can be locked"
        if sum(self.locked.values()) + nbytes > self.pin_limit:
            raise PinError("out of the memory that may be locked")
        self.locked[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.locked[address]

    def pinned(self, nbytes: int) -> torch.Tensor:
        buffer = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        return buffer

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        with self.lock:
            for (begin, end), number in self.read_of.items():
                unread = number > max(self.ordered, self.known)
                if unread and begin < target + nbytes and target < end:
                    self.faults.append("a slot is overwritten that may be being read")
            self.queue.append((target, source, nbytes))
            self.copied_bytes += nbytes
            self.largest_copy = max(self.largest_copy, nbytes)
            self.drift()

    def mark_copies(self, *, timed: bool = False) -> Point:
        with self.lock:
            point = Point(self, copies=True, reads=0, brings=0)
            self.queue.append(point)
            return point

    def copies_wait(self, mark: Mark) -> None:
        assert isinstance(mark, Point)
        assert not mark.copies
        self.ordered = max(self.ordered, mark.reads)

    def send(self, target: int, source: int, nbytes: int) -> None:
        with self.lock:
            ctypes.memmove(target, source, nbytes)
            self.sends.append((source, ctypes.string_at(source, nbytes)))

    def bring(self, target: int, source: int, nbytes: int) -> None:
        with self.lock:
            ctypes.memset(target, 0xFF, nbytes)
            self.brings.append((target, source, nbytes))

    def mark_compute(self, *, timed: bool = False) -> Point:
        with self.lock:
            return Point(self, copies=False, reads=self.reads, brings=self.brought + len(self.brings))

    def compute_waits(self, mark: Mark) -> None:
        assert isinstance(mark, Point)
        with self.lock:
            self.carry_out(mark)

    def seconds(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, Point)
        assert isinstance(last, Point)
        return max(0.0, last.at - first.at)
