"""Brings experts from the safetensors files into memory with a pool of reading threads.

Every expert is cut into chunks. A free thread always takes the next chunk of the oldest demand, and
of a speculation only if there is no demand: so a demand overtakes a speculation in its middle. The
pool never touches residency: it fills memory and reports what has ended.
"""

from __future__ import annotations

import errno
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError

from .checkpoint import Checkpoint
from .slots import SlotMemory
from .watching import Busy, Span

CHUNK = 1 << 20
AHEAD = 0.4  # of the threads may speculate at once: a demand waits for what they have begun
WATCH_SECONDS = 0.5  # how often a waiting caller looks whether the pool still lives


class Reader(Protocol):
    """``files.FileReader``, or a faulty one in tests."""

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None: ...


class Ticket:
    """One expert on its way into one buffer."""

    __slots__ = (
        *("began", "chunks", "demand", "error", "flat", "nbytes", "open", "out", "slotted", "started"),
        "unread",
    )

    def __init__(
        self,
        flat: int,
        chunks: deque[tuple[int, int, NDArray[np.uint8]]],
        nbytes: int,
        demand: bool,
        slotted: bool,
        out: NDArray[np.uint8],
    ) -> None:
        self.flat = flat
        self.out = out  # the slot
        self.unread = len(chunks)  # those whose bytes have not come: see _verify
        self.chunks = chunks  # (file, offset, destination) not yet begun
        self.open = len(chunks)  # chunks not yet ended
        self.nbytes = nbytes
        self.demand = demand
        self.slotted = slotted  # reported through poll / failed
        self.started = False
        self.began = 0.0  # when its first chunk was taken
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.open == 0


class FileTransfers:
    """The engine of the device ``host`` (see ``engine.Engine``), and reads into staging slots."""

    def __init__(
        self, checkpoint: Checkpoint, memory: SlotMemory, reader: Reader, *, threads: int, chunk: int = CHUNK
    ) -> None:
        self._checkpoint = checkpoint
        self._memory = memory
        self._reader = reader
        self._chunk = chunk
        self._verified = bytearray(checkpoint.geometry.total)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._demand: deque[Ticket] = deque()
        self._speculation: deque[Ticket] = deque()
        self._new: list[Ticket] = []  # asked for, not yet handed to the pool
        self._slotted: dict[int, Ticket] = {}
        self._arrived: deque[int] = deque()
        self._failed: deque[int] = deque()
        self._closing = False
        self.origin = time.perf_counter()
        self._queued_bytes = 0
        self._reading = 0  # chunks being read now
        self._bandwidth = 1e9  # bytes per second of the whole pool, learned as reads end
        self.bytes_read = 0
        self.span: Span | None = None
        self._ahead = 0  # chunks being read that were begun as speculation
        self._most_ahead = max(1, int(threads * AHEAD))
        self._threads = [
            threading.Thread(target=self._serve, name=f"daop-read-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine that the conductor drives ----------------------------------------------------

    @property
    def now(self) -> float:
        return time.perf_counter() - self.origin

    @property
    def link_free_at(self) -> float:
        return self.now + self._queued_bytes / self._bandwidth

    @property
    def host_free_at(self) -> float:
        return self.now  # one processor: what computes is what asks

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        layer = int(self._checkpoint.geometry.layer_of[flat])
        slab = self._memory.slabs[self._memory.class_of_layer[layer]]
        self._slotted[flat] = self._submit(flat, slab.array[slot], demand=demand, slotted=True)

    def promote(self, flat: int) -> None:
        self.kick()
        with self._lock:
            ticket = self._slotted.get(flat)
            if ticket is None or ticket.demand:
                return
            ticket.demand = True
            if ticket.chunks:
                self._speculation.remove(ticket)
                self._demand.append(ticket)
                self._work.notify()  # threads that sleep since enough of them speculate

    def cancel(self, flat: int) -> bool:
        self.kick()
        with self._lock:
            ticket = self._slotted.get(flat)
            if ticket is None or ticket.demand or ticket.started:
                return False
            self._speculation.remove(ticket)
            self._queued_bytes -= ticket.nbytes
            del self._slotted[flat]
            return True

    def poll(self) -> Sequence[int]:
        return self._drain(self._arrived)

    def failed(self) -> Sequence[int]:
        return self._drain(self._failed)

    def _drain(self, queue: deque[int]) -> Sequence[int]:
        if not queue:
            return ()
        with self._lock:
            out = list(queue)
            queue.clear()
            for flat in out:
                self._slotted.pop(flat, None)
        return out

    # -- what the executor needs beside ----------------------------------------------------------

    def kick(self) -> None:
        """Hand the fetches asked for since the last call to the pool, all at once: one lock, one wake-up."""
        if not self._new:
            return
        with self._lock:
            for ticket in self._new:
                (self._demand if ticket.demand else self._speculation).append(ticket)
                self._queued_bytes += ticket.nbytes
            self._new.clear()
            self._work.notify()  # each thread that finds more work wakes the next: see _serve

    def ticket(self, flat: int) -> Ticket:
        """The fetch of an expert that holds a slot and is under way."""
        return self._slotted[flat]

    def stream(self, flat: int, staging: int) -> Ticket:
        """Read an expert into a staging slot, on demand."""
        layer = int(self._checkpoint.geometry.layer_of[flat])
        slab = self._memory.staging[self._memory.class_of_layer[layer]]
        return self._submit(flat, slab.array[staging], demand=True, slotted=False)

    def wait_any(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Block until at least one has ended, and return all that have; raises DaopError on a failed read."""
        self.kick()
        waited = list(tickets)
        with self._lock:
            while not (done := [ticket for ticket in waited if ticket.open == 0]):
                if not any(thread.is_alive() for thread in self._threads):
                    raise DaopError("all reading threads have died; nothing more can be read in this run")
                self._ended.wait(WATCH_SECONDS)
            for ticket in done:
                if ticket.slotted and ticket.error is None:  # told here, so not again by poll
                    self._arrived.remove(ticket.flat)
                    del self._slotted[ticket.flat]
        for ticket in done:
            if ticket.error is not None:
                raise self._explain(ticket) from ticket.error
        return done

    def wait_idle(self) -> None:
        """Block until nothing is queued or being read, whatever its outcome."""
        self.kick()
        with self._lock:
            while self._queued_bytes and any(thread.is_alive() for thread in self._threads):
                self._ended.wait(WATCH_SECONDS)

    def _explain(self, ticket: Ticket) -> DaopError:
        layer, expert = self._checkpoint.geometry.pair(ticket.flat)
        place = self._checkpoint.ranges(ticket.flat)[0]
        return DaopError(
            f"cannot read expert {expert} of MoE layer {layer} from {self._checkpoint.files[place.file]}: "
            f"{ticket.error}; check the disk and the file, nothing was generated from it"
        )

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the pool --------------------------------------------------------------------------------

    def _submit(self, flat: int, out: NDArray[np.uint8], *, demand: bool, slotted: bool) -> Ticket:
        chunks: deque[tuple[int, int, NDArray[np.uint8]]] = deque()
        total = 0
        for part in self._checkpoint.ranges(flat):
            for start in range(0, part.nbytes, self._chunk):
                size = min(self._chunk, part.nbytes - start)
                at = part.slot_offset + start
                chunks.append((part.file, part.offset + start, out[at : at + size]))
            total += part.nbytes
        ticket = Ticket(flat, chunks, total, demand, slotted, out)
        self._new.append(ticket)
        return ticket

    def _serve(self) -> None:
        """One reading thread: take a chunk, read it, report the end of its expert."""
        while True:
            with self._lock:
                while not (taken := self._take()):
                    if self._closing:
                        return
                    self._work.wait()
                if self._demand or (self._speculation and self._ahead < self._most_ahead):
                    self._work.notify()
            ticket, (file, offset, out), ahead = taken
            error: BaseException | None = None
            began = time.perf_counter()
            try:
                if ticket.error is None:
                    self._reader.read(file, offset, out)
                    self._verify(ticket)
            except OSError as failure:
                error = failure
            except BaseException as failure:
                self._end_chunk(ticket, len(out), ahead, failure, began)
                raise
            self._end_chunk(ticket, len(out), ahead, error, began)

    def _verify(self, ticket: Ticket) -> None:
        """Once per expert, when its last chunk has been read, compare the checksum that its file gives;
        raises OSError."""
        wanted = None if self._verified[ticket.flat] else self._checkpoint.checksum(ticket.flat)
        if wanted is None:
            return
        with self._lock:
            ticket.unread -= 1
            if ticket.unread:
                return
        if zlib.crc32(ticket.out[: ticket.nbytes].data) != wanted:
            raise OSError(errno.EIO, "its bytes are not those that were packed: the checksum differs")
        self._verified[ticket.flat] = 1

    def _take(self) -> tuple[Ticket, tuple[int, int, NDArray[np.uint8]], bool] | None:
        """The next chunk, demand first, and whether it is speculation; with the lock held."""
        queue, ahead = self._demand, not self._demand
        if ahead:
            if not self._speculation or self._ahead >= self._most_ahead:
                return None
            queue = self._speculation
            self._ahead += 1
        ticket = queue[0]
        if not ticket.started:
            ticket.started = True
            ticket.began = time.perf_counter()
        self._reading += 1
        chunk = ticket.chunks.popleft()
        if not ticket.chunks:
            queue.popleft()
        return ticket, chunk, ahead

    def _end_chunk(
        self, ticket: Ticket, nbytes: int, ahead: bool, error: BaseException | None, began: float
    ) -> None:
        with self._lock:
            ticket.open -= 1
            self._ahead -= ahead
            rate = self._reading * nbytes / max(time.perf_counter() - began, 1e-9)
            self._bandwidth += 0.05 * (rate - self._bandwidth)
            self._reading -= 1
            self._queued_bytes -= nbytes
            self.bytes_read += nbytes
            if error is not None and ticket.error is None:
                ticket.error = error
            if ticket.open == 0:
                if self.span is not None:
                    began, ended = ticket.began - self.origin, time.perf_counter() - self.origin
                    self.span(
                        Busy("disk", "read" if ticket.slotted else "stream", began, ended, (ticket.flat,))
                    )
                if ticket.slotted:
                    (self._arrived if ticket.error is None else self._failed).append(ticket.flat)
                self._ended.notify_all()
