"""Runs the routed experts of every MoE layer on the device ``host``.

The request path, top to bottom: ``__call__`` is what transformers' experts modules call. It groups
the tokens, lets the conductor decide, computes what is resident while the rest is read, computes the
rest as it arrives, and combines once.

Shape legend: T tokens, K experts per token, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from daop.core import Forecast, Step

from .checkpoint import Checkpoint
from .conductor import Conductor, Work
from .executor import Executor, Gates
from .host_compute import Batch, HostExperts
from .recording import Recorder
from .slots import SlotMemory
from .transfers import FileTransfers, Ticket
from .watching import Busy


@dataclass(kw_only=True, eq=False, slots=True)
class _Reads:
    """What a step waits for: ``coming`` goes to slots, ``streams`` (ticket -> buffer) to staging buffers, of
    which some are ``idle``, and ``outside`` has none yet."""

    coming: dict[int, Ticket]
    outside: deque[int]
    idle: list[int]
    streams: dict[Ticket, int] = field(default_factory=dict)


class HostExecutor(Executor):
    """Computes routed experts from a hot set in RAM and files behind it.

    ``compute[l]`` computes layer ``l``'s experts; ``gates`` serve the look-ahead of policies with a
    horizon.
    """

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        memory: SlotMemory,
        transfers: FileTransfers,
        conductor: Conductor,
        compute: Sequence[HostExperts],
        gates: Gates,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(checkpoint, conductor, gates, recorder)
        self._transfers = transfers
        self._compute = compute
        self._class_of_layer = memory.class_of_layer
        self._slots = [list(slab.tensor.unbind(0)) for slab in memory.slabs]
        self._staging = [list(slab.tensor.unbind(0)) for slab in memory.staging]

    def start(self) -> None:
        waiting = {flat: self._transfers.ticket(flat) for flat in self.conductor.start()}
        while waiting:
            for ticket in self._transfers.wait_any(waiting.values()):
                self.conductor.arrived(ticket.flat)
                del waiting[ticket.flat]

    @torch.inference_mode()
    def __call__(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H] in hidden's dtype."""
        clock = time.perf_counter
        statistics = self.conductor.statistics
        compute = self._compute[layer]
        batch = compute.begin(hidden, ids, weights)
        step = self._step(layer, batch)
        if self.recorder is not None:
            self._record(self.recorder, layer, ids, weights)

        began = clock()
        try:
            work = self.conductor.plan(step)
            reads = self._ask(layer, work)  # first, so that the disk works while the next layer is forecast
            planned = clock()
            forecasts = [Forecast(ahead, chance.numpy()) for ahead, chance in self._look_ahead(layer, hidden)]
            forecast = clock()
            self.conductor.look_ahead(step, forecasts)
            self._transfers.kick()
            ready = clock()
            statistics.policy_seconds += planned - began + ready - forecast
            if forecasts:
                statistics.stall_seconds["forecast"] += forecast - planned
            if self.conductor.watchers:
                span, origin = self.conductor.span, self._transfers.origin
                span(Busy("policy", "plan", began - origin, planned - origin, (), layer))
                if forecasts:
                    span(Busy("predictor", "forecast", planned - origin, forecast - origin, (), layer))
                span(Busy("predictor", "look ahead", forecast - origin, ready - origin, (), layer))
            stall = self._run(step, work, reads, compute, batch)
            out = compute.finish(batch)
        except BaseException:
            self._abort(step)
            raise
        ended = clock()
        statistics.compute_seconds += ended - ready - stall
        self.conductor.finish(step, work, stall, ended - ready - stall)
        statistics.policy_seconds += clock() - ended
        return out

    def _ask(self, layer: int, work: Work) -> _Reads:
        """Start to read what a step misses, as far as there are buffers."""
        reads = _Reads(
            coming={flat: self._transfers.ticket(flat) for flat in work.coming},
            outside=deque((*work.stream, *work.host)),
            idle=list(range(len(self._staging[self._class_of_layer[layer]]))),
        )
        while reads.outside and reads.idle:
            self._stream_next(reads)
        self._transfers.kick()
        return reads

    def _run(self, step: Step, work: Work, reads: _Reads, compute: HostExperts, batch: Batch) -> float:
        """Compute every expert of the step, in the order in which they become readable; returns seconds
        stalled."""
        layer = step.layer
        base = self._offsets[layer]
        kind = self._class_of_layer[layer]
        slot_of = self.conductor.residency.slot_of
        slots, staging = self._slots[kind], self._staging[kind]
        coming, streams = reads.coming, reads.streams
        late = set(work.coming[: work.late])
        in_place = set(work.host)

        if work.ready:
            began = time.perf_counter()
            resident = [slots[slot_of[flat]] for flat in work.ready]
            for flat, slot in zip(work.ready, resident, strict=True):
                if not self._checked[flat]:  # brought at the start, or by speculation
                    self._check(layer, flat, slot)
            compute.run(batch, [flat - base for flat in work.ready], resident)
            self._computed(began, work.ready)
        stalled = 0.0
        while coming or streams:
            began = time.perf_counter()
            done = self._transfers.wait_any((*coming.values(), *streams))
            arrived = time.perf_counter()
            waited = arrived - began
            stalled += waited
            self._charge(done, waited, late, in_place)
            experts, bytes_ = [], []
            for ticket in done:
                if ticket in streams:
                    bytes_.append(staging[streams[ticket]])
                else:
                    self.conductor.arrived(ticket.flat)
                    del coming[ticket.flat]
                    bytes_.append(slots[slot_of[ticket.flat]])
                experts.append(ticket.flat - base)
                self._check(layer, ticket.flat, bytes_[-1])
            compute.run(batch, experts, bytes_)
            self._computed(arrived, [ticket.flat for ticket in done])
            for ticket in done:
                if ticket in streams:
                    reads.idle.append(streams.pop(ticket))
            while reads.outside and reads.idle:
                self._stream_next(reads)
        return stalled

    def _computed(self, began: float, flats: Sequence[int]) -> None:
        if self.conductor.watchers:
            origin = self._transfers.origin
            self.conductor.span(
                Busy("device", "compute", began - origin, time.perf_counter() - origin, flats)
            )

    def _abort(self, step: Step) -> None:
        """A run broke off: let every read end before its buffer can be used for something else."""
        self._transfers.wait_idle()
        self.conductor.abort(step)

    def _stream_next(self, reads: _Reads) -> None:
        staging = reads.idle.pop()
        reads.streams[self._transfers.stream(reads.outside.popleft(), staging)] = staging

    def _charge(self, done: Sequence[Ticket], waited: float, late: set[int], in_place: set[int]) -> None:
        """Book a wait under the cause of what ended it."""
        first = done[0].flat
        cause = "late" if first in late else "host" if first in in_place else "demand"
        self.conductor.statistics.stall_seconds[cause] += waited
