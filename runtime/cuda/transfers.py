"""Moves experts from host memory, or files, into HBM on the stream of copies.

What CUDA has been given cannot be taken back or overtaken, so speculation is handed over in chunks, and never
more than ``depth`` bytes ahead: a demand waits for those at most. A demand whose bytes are pinned is handed
over at once, whole, by the calling thread. The rest goes through feeding threads: chunks of speculation, and
everything whose source is pageable or on disk, which is staged through a ring of small pinned buffers.

A copy into a slot starts after the computation that read the slot last (``used``), and a slot may be read
after the mark behind the expert's last chunk: by the host once it is done (``poll``), by a computation that
waits for it on the device (``join``), without the host waiting."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.transfers import WATCH_SECONDS, Reader

from .arenas import HostWeights
from .slabs import DeviceMemory
from .streams import Gpu, Mark, PinError

CHUNK = 2 << 20
DEPTH = 4 * CHUNK
RING = 8  # pinned buffers of a chunk each, where some experts are not pinned
FEEDERS = 8  # where some experts are on disk; one is enough otherwise
BANDWIDTH = 20e9  # bytes per second until copies have been timed


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
        *("after", "demand", "error", "flat", "mark", "nbytes", "open", "pieces", "pinned", "slotted"),
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
        self.mark: Mark | None = None  # behind the last copy
        self.error: BaseException | None = None


class LinkTransfers:
    """The engine of the device ``cuda`` (see ``conductor.Engine``), and copies into staging slots.

    The methods are called by one thread, but for what the feeding threads do.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        gpu: Gpu,
        memory: DeviceMemory,
        weights: HostWeights,
        reader: Reader,
        *,
        chunk: int = CHUNK,
        depth: int = DEPTH,
    ) -> None:
        self._checkpoint = checkpoint
        self._gpu = gpu
        self._memory = memory
        self._weights = weights
        self._reader = reader
        self.chunk = chunk
        self._depth = depth
        self._layer_of: list[int] = checkpoint.geometry.layer_of.tolist()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._moved = threading.Condition(self._lock)
        self._demand: deque[Ticket] = deque()  # with pieces to be staged
        self._speculation: deque[Ticket] = deque()
        self._new: list[Ticket] = []
        self._slotted: dict[int, Ticket] = {}
        self._sent: deque[Ticket] = deque()  # slotted, handed over whole, in the order of their marks
        self._failed: list[int] = []
        self._ahead: deque[tuple[Mark, int]] = deque()  # speculative chunks that the device has
        self._ahead_bytes = 0
        self._stamps: dict[int, Mark] = {}  # slot's address -> computation that read it last
        self._touched: list[int] = []
        self._origin = time.perf_counter()
        self._closing = False
        self._under_way = 0  # tickets not yet handed over whole
        self._outstanding = 0  # bytes asked for and not known to have arrived
        self.bandwidth = BANDWIDTH
        self.bytes_moved = 0
        self.ring_address = 0
        staged = weights.on_disk or weights.pageable_bytes
        self._ring: NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)
        self._idle: list[int] = []
        self._busy: deque[tuple[Mark, int]] = deque()  # ring buffers being copied from, in order
        if staged:
            self._make_ring()
        self.staged_bytes = 0
        self._threads = [
            threading.Thread(target=self._feed, name=f"daop-feed-{n}", daemon=True)
            for n in range(FEEDERS if weights.on_disk else 2 if staged else 1)
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

    # -- the engine that the conductor drives ----------------------------------------------------

    @property
    def now(self) -> float:
        return time.perf_counter() - self._origin

    @property
    def link_free_at(self) -> float:
        return self.now + self._outstanding / self.bandwidth

    @property
    def host_free_at(self) -> float:
        return self.now  # the host computes in the thread that asks

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        slab = self._memory.slabs[self._memory.class_of_layer[self._layer_of[flat]]]
        self._slotted[flat] = self._submit(flat, slab.address(slot), demand=demand, slotted=True)

    def promote(self, flat: int) -> None:
        self.kick()
        with self._lock:
            ticket = self._slotted.get(flat)
            if ticket is None or ticket.demand:
                return
            ticket.demand = True
            if ticket.pieces:
                self._speculation.remove(ticket)
                self._hand_over(ticket)

    def cancel(self, flat: int) -> bool:
        self.kick()
        with self._lock:
            ticket = self._slotted.get(flat)
            if ticket is None or ticket.demand or ticket.started:
                return False
            self._speculation.remove(ticket)
            self._outstanding -= ticket.nbytes
            self._under_way -= 1
            if ticket.after is not None:  # the next copy into this slot has to heed it still
                self._stamps[ticket.target] = ticket.after
            del self._slotted[flat]
            return True

    def poll(self) -> Sequence[int]:
        arrived: list[int] = []
        sent = self._sent
        while sent:
            mark = sent[0].mark
            if mark is None or not mark.done:
                break
            ticket = sent.popleft()
            if self._slotted.get(ticket.flat) is ticket:
                arrived.append(self._tell(ticket))
        return arrived

    def failed(self) -> Sequence[int]:
        if not self._failed:
            return ()
        with self._lock:
            out, self._failed = self._failed, []
            for flat in out:
                self._outstanding -= self._slotted.pop(flat).nbytes
        return out

    def _tell(self, ticket: Ticket) -> int:
        del self._slotted[ticket.flat]
        with self._lock:
            self._outstanding -= ticket.nbytes
        return ticket.flat

    # -- what the executor needs beside ----------------------------------------------------------

    def kick(self) -> None:
        """Hand over what was asked for since the last call."""
        if not self._new:
            return
        with self._lock:
            for ticket in self._new:
                self._outstanding += ticket.nbytes
                self._under_way += 1
                if ticket.demand:
                    self._hand_over(ticket)
                else:
                    self._speculation.append(ticket)
            self._new.clear()
            self._work.notify()

    def ticket(self, flat: int) -> Ticket:
        """The fetch of an expert that holds a slot and is under way."""
        return self._slotted[flat]

    def stream(self, flat: int, staging: int) -> Ticket:
        """Bring an expert into a staging slot, on demand."""
        slab = self._memory.staging[self._memory.class_of_layer[self._layer_of[flat]]]
        return self._submit(flat, slab.address(staging), demand=True, slotted=False)

    def join(self, ticket: Ticket) -> None:
        """Let the computation wait for an expert, on the device. The host blocks only until the expert's last
        byte was handed over, which is at once where its source is pinned; raises DaopError on a failed
        read."""
        self.kick()
        with self._lock:
            while ticket.open:
                if not any(thread.is_alive() for thread in self._threads):
                    raise DaopError("all feeding threads have died; nothing more can be moved in this run")
                self._moved.wait(WATCH_SECONDS)
            if not ticket.slotted:
                self._outstanding -= ticket.nbytes
        if ticket.mark is None:
            raise self._explain(ticket) from ticket.error
        self._gpu.compute_waits(ticket.mark)
        if ticket.slotted:
            self._tell(ticket)

    def used(self, addresses: Iterable[int]) -> None:
        """The computation launched last reads these slots: the next copy into one of them waits for it."""
        mark = self._gpu.mark_compute()
        for address in addresses:
            self._stamps[address] = mark

    def settled(self) -> None:
        """The host knows that everything computed so far has ended."""
        self._stamps.clear()

    def wait_idle(self) -> None:
        """Block until nothing is queued or under way, whatever its outcome."""
        self.kick()
        with self._lock:
            while self._under_way:
                if not any(thread.is_alive() for thread in self._threads):
                    break
                self._moved.wait(WATCH_SECONDS)
        self._gpu.mark_copies().synchronize()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _explain(self, ticket: Ticket) -> DaopError:
        name = self._checkpoint.describe(ticket.flat)
        return DaopError(
            f"cannot read {name}: {ticket.error}; check the disk and the file, nothing was generated from it"
        )

    # -- handing over ------------------------------------------------------------------------------

    def _submit(self, flat: int, target: int, *, demand: bool, slotted: bool) -> Ticket:
        pinned = self._weights.is_pinned(flat)
        ticket = Ticket(
            flat, target, deque(self._pieces(flat)), pinned=pinned, demand=demand, slotted=slotted
        )
        ticket.after = self._stamps.pop(target, None)
        self._new.append(ticket)
        return ticket

    def _pieces(self, flat: int) -> list[Piece]:
        chunk = self.chunk
        if self._weights.in_ram(flat):
            base = self._weights.address(flat)
            size = self._checkpoint.layouts[self._layer_of[flat]].nbytes
            return [Piece(at, min(chunk, size - at), base + at) for at in range(0, size, chunk)]
        return [
            Piece(
                part.slot_offset + start, min(chunk, part.nbytes - start), 0, part.file, part.offset + start
            )
            for part in self._checkpoint.ranges(flat)
            for start in range(0, part.nbytes, chunk)
        ]

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
        self._gpu.copy_in(ticket.target + piece.at, source, piece.nbytes)
        self.bytes_moved += piece.nbytes
        self._end_piece(ticket)

    def _end_piece(self, ticket: Ticket) -> None:
        """One piece less to be handed over, with the lock held."""
        ticket.open -= 1
        if ticket.open == 0:
            self._under_way -= 1
            if ticket.error is None:
                ticket.mark = self._gpu.mark_copies()
                if ticket.slotted:
                    self._sent.append(ticket)
            elif ticket.slotted:
                self._failed.append(ticket.flat)
            self._moved.notify_all()

    # -- the feeding threads -----------------------------------------------------------------------

    def _feed(self) -> None:
        self._gpu.attach_thread()
        while True:
            with self._lock:
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
            with self._lock:
                ticket.error = ticket.error or error
                if ticket.error is None:
                    self._move(ticket, piece, int(staged.ctypes.data))
                    self._busy.append((self._gpu.mark_copies(), buffer))
                    self.staged_bytes += piece.nbytes
                else:
                    self._end_piece(ticket)
                    self._idle.append(buffer)
                self._work.notify()
