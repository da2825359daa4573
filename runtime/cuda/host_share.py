"""The CPU's share of a layer: experts computed from where they lie in host memory, now or early.

With an exact policy the calling thread computes it, once the device has its work. With an approximate one it
goes to the thread that computes early calls (``early_calls``), so that there is one set of workers, and the
calling thread launches meanwhile.

Shape legend: T tokens, K experts per token, n rows of one call, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import Forecast, Phase, Step
from daop.runtime.batch import Batch
from daop.runtime.conductor import Conductor, Work
from daop.runtime.early import Decided, Started
from daop.runtime.host_compute import HostExperts
from daop.runtime.watching import Busy

from .arenas import HostWeights
from .cores import CoreBinding
from .early_calls import NOTHING, EarlyCalls, Served
from .transfers import LinkTransfers


@dataclass(kw_only=True, eq=False, slots=True)
class Seen:
    """What the host knows of a layer: its choices, ``hidden`` [T, H] (None: large, and not asked for yet),
    what is announced of the next layer's input, and what of this one was computed early. ``base``: flat id of
    the layer's first expert."""

    base: int
    batch: Batch
    hidden: torch.Tensor | None
    forecasts: list[Forecast]
    announced: torch.Tensor | None
    served: Served

    def pairs(self, flats: Sequence[int]) -> list[NDArray[np.int64]]:
        """What is left to be computed of each."""
        batch = self.batch
        positions = [batch.positions[flat - self.base] for flat in flats]
        return [self.served.left(batch.pairs[batch.starts[at] : batch.starts[at + 1]]) for at in positions]

    def rest(self, work: Work) -> Work:
        """``work`` without those experts of which nothing is left to be computed. What is on its way into a
        slot is waited for all the same."""
        if not self.served.taken:
            return work

        def left(flats: Sequence[int]) -> list[int]:
            return [flat for flat, pairs in zip(flats, self.pairs(flats), strict=True) if len(pairs)]

        return replace(work, ready=left(work.ready), stream=left(work.stream), host=left(work.host))


class HostShare:
    """``compute[l]`` computes layer ``l``'s experts; ``cores`` keeps its workers in their places."""

    def __init__(
        self,
        conductor: Conductor,
        transfers: LinkTransfers,
        weights: HostWeights,
        compute: Sequence[HostExperts],
        cores: CoreBinding,
    ) -> None:
        self._conductor = conductor
        self._transfers = transfers
        self._weights = weights
        self._compute = compute
        self._cores = cores
        self._bytes_of: dict[int, torch.Tensor] = {}
        self._early: EarlyCalls | None = None  # with an approximate policy
        self._late_at: int | None = None  # the first of the rows whose calls are added a layer late
        self._late: Future[torch.Tensor] | None = None  # [T, H], the running layer's
        self._owed: Future[torch.Tensor] | None = None  # the layer's before, to be added to this one's

    def close(self) -> None:
        if self._early is not None:
            self._early.close()

    def expect(self, layer: int, decided: Decided, started: Started | None) -> None:
        """See ``Executor.expect``."""
        if self._early is None:
            self._early = EarlyCalls(self._conductor, self._transfers, self.compute_call)
        self._early.expect(layer, decided, started)
        self._late_at = decided.late_at
        self._owed, self._late = (self._late if layer else None), None

    @property
    def owes(self) -> bool:
        """Whether the layer before has left something to be added to this one's output."""
        return self._owed is not None

    @property
    def announced(self) -> torch.Tensor | None:
        """[T, H] on the device: what early calls need on the host; None: there are none."""
        return None if self._early is None else self._early.input

    def collect(self, ids: NDArray[np.int64]) -> Served:
        """What of the choices ``ids`` [T, K] of the layer that runs was computed early."""
        return NOTHING if self._early is None else self._early.collect(ids)

    def at_once(self, step: Step) -> bool:
        """Whether ``give`` starts the share, and so needs the hidden states."""
        return self._early is not None and step.phase is not Phase.PREFILL

    def give(self, step: Step, flats: Sequence[int], seen: Seen) -> Callable[[], torch.Tensor] | None:
        """What the CPU has to do: its share of this layer, then what starts early. Gives how to have the
        share, [T, H] float32; None: there is none."""

        def work() -> torch.Tensor:
            assert seen.hidden is not None
            return self._run(step, flats, seen, seen.hidden[: self._late_at], 0)

        early = self._early
        if early is None:
            return work if flats else None  # in this thread, when it is asked for
        if not self.at_once(step):  # nothing starts early
            return (lambda: early.submit(work).result()) if flats else None
        share = early.submit(work) if flats else None
        if self._late_at is not None and flats and seen.hidden is not None:
            late, at = seen.hidden[self._late_at :].clone(), self._late_at  # its memory is used again
            self._late = early.submit(lambda: self._run(step, flats, seen, late, at, "deferred"))
        early.start(seen.announced, self._weights.in_ram)
        return None if share is None else share.result

    def total(self, share: Callable[[], torch.Tensor] | None, seen: Seen, rows: int) -> torch.Tensor:
        """[T, H] float32: what the CPU computed, now, early, and of the layer before."""
        done = None if share is None else share()
        if done is not None and len(done) == rows:
            total = done
        else:
            total = torch.zeros(rows, self._compute[0].form.hidden)
            if done is not None:
                total[: len(done)] = done
        if self._owed is not None:
            owed = self._owed.result()
            total[: len(owed)] += owed
        if seen.served.taken and self._early is not None:
            seen.served.add_to(total, seen.batch.weights, seen.batch.top_k)
            self._early.finish(seen.served)
        return total

    def _run(
        self,
        step: Step,
        flats: Sequence[int],
        seen: Seen,
        hidden: torch.Tensor,
        at: int,
        what: str = "compute",
    ) -> torch.Tensor:
        """[n, H] float32: of the rows ``hidden`` [n, H], which begin at row ``at``, the sum over the experts
        of the share."""
        batch, compute = seen.batch, self._compute[step.layer]
        rows = slice(at, at + len(hidden))
        ids = torch.full((step.rows * batch.top_k,), compute.count)  # padding, but for the share
        for flat, pairs in zip(flats, seen.pairs(flats), strict=True):
            ids[torch.from_numpy(pairs)] = flat - seen.base
        self._cores.bind()
        weights = batch.weights.view(step.rows, batch.top_k)
        began = self._transfers.now
        share = compute.begin(hidden, ids.view(step.rows, batch.top_k)[rows], weights[rows])
        compute.run(share, share.experts, [self._bytes(seen.base + expert) for expert in share.experts])
        total = compute.total(share)
        if self._conductor.watchers and share.experts:
            chosen = [seen.base + expert for expert in share.experts]
            self._conductor.span(Busy("host", what, began, self._transfers.now, chosen))
        return total

    def compute_call(self, layer: int, flat: int, x: torch.Tensor) -> torch.Tensor:
        """x [n, H] -> what one expert makes of it, [n, H] float32."""
        self._cores.bind()
        compute = self._compute[layer]
        expert = flat - self._conductor.residency.geometry.offsets[layer]
        share = compute.begin(x, torch.full((len(x), 1), expert), torch.ones(len(x), 1))
        compute.run(share, [expert], [self._bytes(flat)])
        return compute.total(share)

    def _bytes(self, flat: int) -> torch.Tensor:
        """An expert's bytes in host memory."""
        known = self._bytes_of.get(flat)
        if known is None:
            known = self._bytes_of[flat] = torch.from_numpy(self._weights.array(flat))
        return known
