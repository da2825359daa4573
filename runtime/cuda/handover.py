"""Hands copies over to the device: at once, or chunk by chunk from feeding threads.

A demand whose bytes are pinned is handed over whole by the calling thread. Speculation goes in chunks, never
more than ``depth`` bytes ahead of the device. What is pageable or on disk is staged, chunk by chunk, through
a ring of small pinned buffers; several threads read from disk at once. Nothing here knows of slots or of
policies."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError
from daop.runtime.transfers import WATCH_SECONDS, Reader

from .spans import Begun, DeviceSpans
from .streams import Gpu, Mark, PinError

CHUNK = 2 << 20
DEPTH = 4 * CHUNK
RING = 8  # pinned buffers of a chunk each, where some experts are not pinned
FEEDERS = 8  # where some experts are on disk


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` that belong at ``at`` of the slot, from an address or from a file."""

    at: int
    nbytes: int
    address: int  # 0: from the file
    file: int = -1
    offset: int = 0


class Ticket:
    """One expert on its way into one slot."""

    __slots__ = (
        *(
            "after",
            "begun",
            "demand",
            "error",
            "flat",
            "mark",
            "nbytes",
            "open",
            "pieces",
            "pinned",
            "slotted",
        ),
        *("started", "target"),
    )

    def __init__(
        self, flat: int, target: int, pieces: deque[Piece], *, pinned: bool, demand: bool, slotted: bool
    ) -> None:
        self.flat = flat
        self.target = target
        self.pieces = pieces  # not yet begun
        self.open = len(pieces)  # not yet handed to the device
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.pinned = pinned
        self.demand = demand
        self.slotted = slotted  # reported through poll / failed
        self.started = False
        self.after: Mark | None = None  # copies may begin behind it
        self.begun: Begun | None = None  # before the first copy, in a run that is watched
        self.mark: Mark | None = None  # behind the last copy
        self.error: BaseException | None = None


class Handover:
    """The queues between who asks for copies and the stream that makes them. ``staged`` and ``on_disk``:
    whether any expert is not pinned, or not in RAM. Methods are called by one thread, beside the feeding
    threads."""

    def __init__(
        self, gpu: Gpu, reader: Reader, *, staged: bool, on_disk: bool, chunk: int = CHUNK, depth: int = DEPTH
    ) -> None:
        self._gpu = gpu
        self._reader = reader
        self.chunk = chunk
        self._depth = depth
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._moved = threading.Condition(self.lock)
        self._demand: deque[Ticket] = deque()  # with pieces to be staged
        self._speculation: deque[Ticket] = deque()
        self.sent: deque[Ticket] = deque()  # slotted, handed over whole, in the order of their marks
        self.failed: deque[Ticket] = deque()  # slotted, of which nothing more comes
        self._ahead: deque[tuple[Mark, int]] = deque()  # speculative chunks that the device has
        self._ahead_bytes = 0
        self._closing = False
        self._under_way = 0  # tickets not yet handed over whole
        self.spans: DeviceSpans | None = None  # in a run that is watched
        self.bytes_moved = 0
        self.staged_bytes = 0
        self.ring_address = 0
        self._ring: NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)
        self._idle: list[int] = []
        self._busy: deque[tuple[Mark, int]] = deque()  # ring buffers being copied from, in order
        if staged or on_disk:
            self._make_ring()
        self._threads = [
            threading.Thread(target=self._feed, name=f"daop-feed-{n}", daemon=True)
            for n in range(FEEDERS if on_disk else 2 if staged else 1)
        ]
        for thread in self._threads:
            thread.start()

    def _make_ring(self) -> None:
        try:
            self._ring_memory = self._gpu.pinned(RING * self.chunk)
        except PinError as error:
            raise DaopError(
                f"CUDA cannot lock even {RING * self.chunk >> 20} MiB of host memory ({error}): raise the "
                "limit of locked memory (ulimit -l; in a container --ulimit memlock=-1), or use --device host"
            ) from error
        self.ring_address = self._ring_memory.data_ptr()
        self._ring = self._ring_memory.numpy().reshape(RING, self.chunk)
        self._idle = list(range(RING))

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Take these on, in this order."""
        with self.lock:
            for ticket in tickets:
                self._under_way += 1
                if ticket.demand:
                    self._hand_over(ticket)
                else:
                    self._speculation.append(ticket)
            self._work.notify()

    def promote(self, ticket: Ticket) -> None:
        """A speculation that was taken on has become a demand."""
        with self.lock:
            if ticket.demand:
                return
            ticket.demand = True
            if ticket.pieces:
                self._speculation.remove(ticket)
                self._hand_over(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        """Drop a speculation of which nothing was moved; False if something was."""
        with self.lock:
            if ticket.demand or ticket.started:
                return False
            self._speculation.remove(ticket)
            self._under_way -= 1
            return True

    def wait(self, ticket: Ticket) -> None:
        """Block until all of it was handed over, or will not be."""
        with self.lock:
            while ticket.open:
                if not self._alive():
                    raise DaopError("all feeding threads have died; nothing more can be moved in this run")
                self._moved.wait(WATCH_SECONDS)

    def wait_idle(self) -> None:
        """Block until nothing is queued or under way, whatever its outcome."""
        with self.lock:
            while self._under_way and self._alive():
                self._moved.wait(WATCH_SECONDS)
        self._gpu.mark_copies().synchronize()

    def _alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        with self.lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _hand_over(self, ticket: Ticket) -> None:
        """A demand, with the lock held: at once if it is pinned, else to the feeding threads."""
        if not ticket.pinned:
            self._demand.append(ticket)
            self._work.notify()
            return
        first, last = ticket.pieces[0], ticket.pieces[-1]
        whole = Piece(first.at, last.at + last.nbytes - first.at, first.address)
        ticket.open -= len(ticket.pieces) - 1
        ticket.pieces.clear()
        self._copy(ticket, whole, whole.address)

    def _copy(self, ticket: Ticket, piece: Piece, source: int) -> None:
        """Enqueue one copy, with the lock held."""
        if ticket.after is not None:
            self._gpu.copies_wait(ticket.after)
            ticket.after = None
        ticket.started = True
        if self.spans is not None and ticket.begun is None:
            ticket.begun = self.spans.begin(self._gpu.mark_copies(timed=True))
        self._gpu.copy_in(ticket.target + piece.at, source, piece.nbytes)
        self.bytes_moved += piece.nbytes
        self._end_piece(ticket)

    def _end_piece(self, ticket: Ticket) -> None:
        """One piece less to be handed over, with the lock held."""
        ticket.open -= 1
        if ticket.open == 0:
            self._under_way -= 1
            if ticket.error is None:
                ticket.mark = self._gpu.mark_copies(timed=self.spans is not None)
                if ticket.slotted:
                    self.sent.append(ticket)
            elif ticket.slotted:
                self.failed.append(ticket)
            self._moved.notify_all()

    # -- the feeding threads -----------------------------------------------------------------------

    def _feed(self) -> None:
        self._gpu.attach_thread()
        while True:
            with self.lock:
                if self._closing:
                    return
                ticket = self._next()
                mark = self._blocking() if ticket is None else None
                if ticket is None and mark is None:
                    self._work.wait()
                    continue
                if ticket is not None:
                    piece = ticket.pieces.popleft()
                    ticket.started = True
                    if ticket.pinned:
                        self._move(ticket, piece, piece.address)
                        continue
                    buffer = self._idle.pop()
            if ticket is None:
                assert mark is not None
                mark.synchronize()
            else:
                self._stage(ticket, piece, buffer)

    def _next(self) -> Ticket | None:
        """The ticket whose next piece can be moved now, demand first, taken from its queue if that piece is
        its last; with the lock held."""
        while self._ahead and self._ahead[0][0].done:
            self._ahead_bytes -= self._ahead.popleft()[1]
        while self._busy and self._busy[0][0].done:
            self._idle.append(self._busy.popleft()[1])
        queue = self._demand if self._demand and self._idle else self._speculation
        if not queue:
            return None
        ticket = queue[0]
        full = self._ahead_bytes >= self._depth or not (ticket.pinned or self._idle)
        if queue is self._speculation and full:
            return None
        if len(ticket.pieces) == 1:
            queue.popleft()
        return ticket

    def _blocking(self) -> Mark | None:
        """What the next piece waits for on the device, or None if there is none; with the lock held."""
        if (self._demand or self._speculation) and not self._idle and self._busy:
            return self._busy[0][0]
        if self._speculation and self._ahead:
            return self._ahead[0][0]
        return None

    def _move(self, ticket: Ticket, piece: Piece, source: int) -> None:
        """Hand one chunk over, with the lock held."""
        speculative = not ticket.demand
        self._copy(ticket, piece, source)
        if speculative:
            self._ahead.append((self._gpu.mark_copies(), piece.nbytes))
            self._ahead_bytes += piece.nbytes

    def _stage(self, ticket: Ticket, piece: Piece, buffer: int) -> None:
        """Bring one chunk through a buffer of the ring."""
        staged = self._ring[buffer][: piece.nbytes]
        error: BaseException | None = None
        try:
            if ticket.error is None:
                if piece.address:
                    ctypes.memmove(staged.ctypes.data, piece.address, piece.nbytes)
                else:
                    self._reader.read(piece.file, piece.offset, staged)
        except OSError as failure:
            error = failure
        except BaseException as failure:
            error = failure
            raise
        finally:
            with self.lock:
                ticket.error = ticket.error or error
                if ticket.error is None:
                    self._move(ticket, piece, int(staged.ctypes.data))
                    self._busy.append((self._gpu.mark_copies(), buffer))
                    self.staged_bytes += piece.nbytes
                else:
                    self._end_piece(ticket)
                    self._idle.append(buffer)
                self._work.notify()
