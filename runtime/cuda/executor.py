"""Runs the routed experts of every MoE layer on the device ``cuda``, with the CPU beside it.

The request path of a layer, top to bottom: what the router chose, and what the next routers would choose,
come to the host in one copy, the only thing that the host waits for. The conductor decides; copies start;
resident experts are launched, those on their way behind marks that the device waits for; the CPU computes its
share meanwhile from host memory; one sum in float32 joins both.

Where every expert of the model is resident there is nothing to decide, and the host does not wait at all.

Shape legend: T tokens, K experts per token, H hidden size, E experts of the layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from daop.core import Forecast, Step
from daop.runtime.batch import group
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.conductor import Conductor, Work
from daop.runtime.early import Decided, Started
from daop.runtime.executor import Executor, Gates
from daop.runtime.host_compute import HostExperts
from daop.runtime.recording import Recorder
from daop.runtime.watching import Busy

from .arenas import HostWeights
from .calm import CalmLayers
from .compute import DeviceBatch, DeviceExperts, Group, Sent, make_group
from .cores import CoreBinding
from .host_share import HostShare, Seen
from .launches import Launch, from_slots, from_staging
from .mailbox import Inbox, Outbox
from .slabs import DeviceMemory
from .spans import DeviceSpans
from .streams import Gpu
from .transfers import LinkTransfers
from .waits import Waits

BESIDE_BYTES = 1 << 20  # hidden states of so many bytes come along with the router's choice


class CudaExecutor(Executor):
    """Computes routed experts from slots in HBM and host memory behind them.

    ``device_compute[l]`` and ``host_compute[l]`` compute layer ``l``'s experts; ``shrink`` gives up a part of
    the slots when the device's memory is used up, or raises DaopError."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        gpu: Gpu,
        memory: DeviceMemory,
        weights: HostWeights,
        transfers: LinkTransfers,
        conductor: Conductor,
        device_compute: Sequence[DeviceExperts],
        host_compute: Sequence[HostExperts],
        gates: Gates,
        shrink: Callable[[], None],
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(checkpoint, conductor, gates, recorder)
        self._gpu = gpu
        self._memory = memory
        self._weights = weights
        self._transfers = transfers
        self._device = device_compute
        self._host = HostShare(
            conductor, transfers, weights, host_compute, CoreBinding(enabled=gpu.device.type == "cuda")
        )
        self._shrink = shrink
        self._outbox = Outbox(gpu)
        self._inbox = Inbox(gpu)
        self._waits = Waits(gpu, conductor)
        self._calm = CalmLayers(device_compute, memory, conductor, self._outbox)
        self._spans = DeviceSpans(gpu, conductor.span, lambda: transfers.now) if conductor.watchers else None
        if self._spans is not None:
            transfers.watch(self._spans)
        # The host looks at every choice, even where all experts are resident: there is somebody to be told.
        self.watchful = self._spans is not None

    def close(self) -> None:
        """End the thread that computes early calls."""
        self._host.close()

    def expect(self, layer: int, decided: Decided, started: Started | None) -> None:
        self._host.expect(layer, decided, started)

    def start(self) -> None:
        self._await(self.conductor.start())
        residency = self.conductor.residency
        if (
            residency.capacity == residency.geometry.total
        ):  # whatever the policy: all of them, then it may rest
            absent = residency.missing(range(residency.capacity))
            self.refill(absent)
            self.conductor.statistics.bytes.start += int(residency.geometry.bytes_of[absent].sum())

    def refill(self, flats: Sequence[int]) -> None:
        """Bring these back into slots, as many as there are free ones."""
        residency = self.conductor.residency
        chosen = []
        for flat in flats:
            if residency.free_slots(flat):
                self._transfers.fetch(flat, residency.reserve(flat, speculative=False), demand=True)
                chosen.append(flat)
        self._await(chosen)

    def _await(self, flats: Sequence[int]) -> None:
        for flat in flats:
            self._transfers.join(self._transfers.ticket(flat))
            self.conductor.arrived(flat)
        self._gpu.synchronize()
        self._calm.look()

    @torch.inference_mode()
    def __call__(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H] in hidden's dtype."""
        while True:
            try:
                if (
                    self._calm.on
                    and not self.watchful
                    and not self._host.owes
                    and self.recorder is None
                    and hidden.dtype == torch.bfloat16
                ):
                    return self._calm.run(self._phase, layer, hidden, ids, weights)
                return self._run_layer(layer, hidden, ids, weights)
            except torch.OutOfMemoryError:
                self._calm.on = False
            self.shrink()

    def shrink(self) -> None:
        """Give up a part of the slots; raises DaopError if there is none left."""
        self._calm.forget()
        self._waits.clear()
        self._shrink()
        self._calm.look()

    @torch.inference_mode()
    def settle(self) -> None:
        self._gpu.synchronize()
        self._calm.settle()
        self._waits.read_off()
        if self._spans is not None:
            self._spans.tell(wait=True)

    # -- the usual way -----------------------------------------------------------------------------

    def _run_layer(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        clock = time.perf_counter
        statistics = self.conductor.statistics
        hidden = hidden.contiguous()
        seen = self._bring(layer, hidden, ids, weights)
        step = self._step(layer, seen.batch)
        began = clock()
        try:
            work = self.conductor.plan(step)
            planned = clock()
            self.conductor.look_ahead(step, seen.forecasts)
            self._transfers.kick()
            ready = clock()
            statistics.policy_seconds += ready - began
            if self.conductor.watchers:
                origin = ready - self._transfers.now
                self.conductor.span(Busy("policy", "plan", began - origin, planned - origin, (), layer))
                self.conductor.span(
                    Busy("predictor", "look ahead", planned - origin, ready - origin, (), layer)
                )
            stall = self._waits.read_off()
            out, computed = self._run(step, work, seen, hidden, weights)
        except BaseException:
            self._abort(step)
            raise
        ended = clock()
        statistics.compute_seconds += computed
        self.conductor.finish(step, work, stall, computed)
        if not self._calm.on and self.conductor.residency.used_slots == self.checkpoint.geometry.total:
            self._calm.look()
        statistics.policy_seconds += clock() - ended
        return out

    def _bring(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Seen:
        """The router's choice, the forecasts, what starts early, and hidden if it is small, on the host: one
        copy, one wait."""
        ahead = self._look_ahead(layer, hidden)
        guess = self._host.announced
        small = hidden.numel() * hidden.element_size() <= BESIDE_BYTES
        beside = [tensor for tensor in (guess, hidden if small else None) if tensor is not None]
        seen = self._outbox.bring([ids, weights.float(), *(chance for _, chance in ahead), *beside])
        self._inbox.reset()
        self._transfers.settled()
        if self._spans is not None:
            self._spans.tell()
            self._spans.anchor()
        forecasts = [
            Forecast(coming, chance.numpy().copy())
            for (coming, _), chance in zip(ahead, seen[2:], strict=False)
        ]
        if self.recorder is not None:
            self._record(self.recorder, layer, seen[0], seen[1])
        nothing = torch.empty(len(ids), 0)  # the rows stay on the device
        return Seen(
            base=self._offsets[layer],
            batch=group(nothing, seen[0], seen[1].clone(), self.checkpoint.geometry.experts[layer]),
            hidden=seen[-1] if small else None,
            forecasts=forecasts,
            announced=None if guess is None else seen[2 + len(ahead)].clone(),
            served=self._host.collect(seen[0].numpy()),
        )

    def _run(
        self, step: Step, work: Work, seen: Seen, hidden: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Launch what the device computes, compute the host's share, join them. Returns the result, and the
        seconds in which this thread launched and computed."""
        began = time.perf_counter()
        work = seen.rest(work)
        away = [flat for flat in work.host if not self._weights.in_ram(flat)]
        here = [flat for flat in work.host if self._weights.in_ram(flat)]
        staging = self._memory.staging[self._memory.class_of_layer[step.layer]].count
        streams = from_staging([*work.stream, *away], staging, self._transfers, self._weights)
        slot_of = self.conductor.residency.slot_of
        launches = [*from_slots(work, slot_of, self._transfers), *streams]
        compute = self._device[step.layer]
        on_device = compute.begin(hidden, weights)
        groups = [make_group(launch.slots, seen.pairs(launch.flats)) for launch in launches]
        todo = list(zip(launches, groups, self._send(groups), strict=True))
        if self._host.at_once(step) and here and seen.hidden is None:
            seen.hidden = self._outbox.bring_large(hidden)
        share = self._host.give(step, here, seen)
        slow = [item for item in todo if not item[0].prompt]
        for item in todo:
            if item[0].prompt:
                self._launch(step, compute, on_device, *item)
        beside = None
        if here or seen.served.taken or self._host.owes:
            ready = self._gpu.mark_compute(timed=True)
            if here and seen.hidden is None:
                seen.hidden = self._outbox.bring_large(hidden)
            beside = self._inbox.send_large(self._host.total(share, seen, len(hidden)))
            self._waits.add("host", ready)
        for item in slow:
            self._launch(step, compute, on_device, *item)
        return compute.finish(on_device, beside), time.perf_counter() - began

    def _launch(
        self,
        step: Step,
        compute: DeviceExperts,
        batch: DeviceBatch,
        launch: Launch,
        what: Group,
        sent: Sent,
    ) -> None:
        """Launch one group behind what it waits for."""
        kind = self._memory.class_of_layer[step.layer]
        slab = self._memory.staging[kind] if launch.staged else self._memory.slabs[kind]
        if launch.tickets:
            before = self._gpu.mark_compute(timed=True)
            for ticket in launch.tickets:
                self._transfers.join(ticket)
                if ticket.slotted:
                    self.conductor.arrived(ticket.flat)
            self._waits.add(launch.cause, before)
        spans = self._spans
        begun = None if spans is None else spans.begin(self._gpu.mark_compute(timed=True))
        compute.run(batch, slab, what, sent)
        if spans is not None and begun is not None:
            spans.end("device", "compute", begun, self._gpu.mark_compute(timed=True), launch.flats)
        self._transfers.used([slab.address(slot) for slot in launch.slots])
        if launch.next is not None:
            launch.next.tickets.append(self._transfers.stream(launch.next.flats[0], launch.slots[0]))
            self._transfers.kick()

    def _send(self, groups: Sequence[Group]) -> list[Sent]:
        """All groups' tables in one copy."""
        arrays = [what.arrays() for what in groups]
        flat = self._inbox.send([array for some in arrays for array in some])
        out, at = [], 0
        for some in arrays:
            pairs, slots, *ends = flat[at : at + len(some)]
            out.append(Sent(pairs, slots, ends))
            at += len(some)
        return out

    def _abort(self, step: Step) -> None:
        """A run broke off: let every copy end before its slot can be used for something else."""
        self._transfers.wait_idle()
        self._gpu.synchronize()
        self._waits.clear()
        self.conductor.abort(step)
