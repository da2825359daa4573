"""Moves experts from host memory, or files, into HBM on the stream of copies: what the conductor drives.

What CUDA has been given cannot be taken back or overtaken, so speculation is handed over in chunks, a little
ahead of the device; a demand at once (``handover``).

A copy into a slot starts after the computation that read the slot last (``used``), and a slot may be read
after the mark behind the expert's last chunk: by the host once it is done (``poll``), by a computation that
waits for it on the device (``join``), without the host waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.transfers import Reader

from .arenas import HostWeights
from .handover import CHUNK, DEPTH, Handover, Piece, Ticket
from .slabs import DeviceMemory
from .spans import DeviceSpans
from .streams import Gpu, Mark

__all__ = ["LinkTransfers", "Ticket"]

BANDWIDTH = 20e9  # bytes per second until copies have been timed


class LinkTransfers:
    """The engine of the device ``cuda`` (see ``engine.Engine``), and copies into staging slots. One thread
    calls."""

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
        self._layer_of: list[int] = checkpoint.geometry.layer_of.tolist()
        self._new: list[Ticket] = []
        self._slotted: dict[int, Ticket] = {}
        self._stamps: dict[int, Mark] = {}  # slot's address -> computation that read it last
        self._origin = time.perf_counter()
        self._outstanding = 0  # bytes asked for and not known to have arrived
        self.bandwidth = BANDWIDTH
        self.host_until = 0.0  # the host computes what was started early until then
        self.handover = Handover(
            gpu,
            reader,
            staged=weights.pageable_bytes > 0,
            on_disk=weights.on_disk > 0,
            chunk=chunk,
            depth=depth,
        )

    @property
    def bytes_moved(self) -> int:
        return self.handover.bytes_moved

    # -- the engine that the conductor drives ----------------------------------------------------

    @property
    def now(self) -> float:
        return time.perf_counter() - self._origin

    @property
    def link_free_at(self) -> float:
        return self.now + self._outstanding / self.bandwidth

    @property
    def host_free_at(self) -> float:
        return max(self.now, self.host_until)  # else it computes in the thread that asks

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        slab = self._memory.slabs[self._memory.class_of_layer[self._layer_of[flat]]]
        self._slotted[flat] = self._submit(flat, slab.address(slot), demand=demand, slotted=True)

    def promote(self, flat: int) -> None:
        self.kick()
        ticket = self._slotted.get(flat)
        if ticket is not None:
            self.handover.promote(ticket)

    def cancel(self, flat: int) -> bool:
        self.kick()
        ticket = self._slotted.get(flat)
        if ticket is None or not self.handover.cancel(ticket):
            return False
        self._close(ticket)
        if ticket.after is not None:  # the next copy into this slot has to heed it still
            self._stamps[ticket.target] = ticket.after
        return True

    def poll(self) -> Sequence[int]:
        arrived: list[int] = []
        sent = self.handover.sent
        while sent:
            mark = sent[0].mark
            if mark is None or not mark.done:
                break
            ticket = sent.popleft()
            if self._slotted.get(ticket.flat) is ticket:  # else it was joined
                self._close(ticket)
                arrived.append(ticket.flat)
        return arrived

    def failed(self) -> Sequence[int]:
        out: list[int] = []
        while self.handover.failed:
            ticket = self.handover.failed.popleft()
            self._close(ticket)
            out.append(ticket.flat)
        return out

    def _close(self, ticket: Ticket) -> None:
        """A ticket has ended, one way or the other."""
        spans = self.handover.spans
        if spans is not None and ticket.begun is not None and ticket.mark is not None:
            what = "copy" if ticket.slotted else "stream"
            spans.end("link in", what, ticket.begun, ticket.mark, (ticket.flat,))
        self._outstanding -= ticket.nbytes
        if ticket.slotted:
            del self._slotted[ticket.flat]

    def watch(self, spans: DeviceSpans) -> None:
        """Tell when the link was busy."""
        self.handover.spans = spans

    # -- what the executor needs beside ----------------------------------------------------------

    def kick(self) -> None:
        """Hand over what was asked for since the last call."""
        if self._new:
            self._outstanding += sum(ticket.nbytes for ticket in self._new)
            self.handover.submit(self._new)
            self._new.clear()

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
        self.handover.wait(ticket)
        if ticket.mark is None:
            if not ticket.slotted:  # those are told by ``failed``
                self._close(ticket)
            raise self._explain(ticket) from ticket.error
        self._gpu.compute_waits(ticket.mark)
        self._close(ticket)

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
        self.handover.wait_idle()

    def close(self) -> None:
        self.handover.close()

    def _explain(self, ticket: Ticket) -> DaopError:
        name = self._checkpoint.describe(ticket.flat)
        return DaopError(
            f"cannot read {name}: {ticket.error}; check the disk and the file, nothing was generated from it"
        )

    def _submit(self, flat: int, target: int, *, demand: bool, slotted: bool) -> Ticket:
        pinned = self._weights.is_pinned(flat)
        ticket = Ticket(
            flat, target, deque(self._pieces(flat)), pinned=pinned, demand=demand, slotted=slotted
        )
        ticket.after = self._stamps.pop(target, None)
        self._new.append(ticket)
        return ticket

    def _pieces(self, flat: int) -> list[Piece]:
        chunk = self.handover.chunk
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
