"""Calls of the next layer that the CPU computes before they are due: for approximate policies.

What a policy announces for the next layer (``early.Started``), and is not resident, goes to a thread of its
own once the CPU has the running layer's own share: it is computed while the device ends this layer and runs
the next one's attention. When the layer is due, results that count stand in the place of their pairs, of
which nothing more is computed; whatever did not start is computed with the layer. So this decides when a call
is computed, never which.

All of the CPU's work goes through that thread then, first come, first served, so that two of them never
compete for its cores. A call that will not count is taken off the queue; one that has begun runs to its end.

Shape legend: T tokens, n rows of one call, K experts per token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from daop.runtime.conductor import Conductor
from daop.runtime.early import Decided, Started
from daop.runtime.watching import Busy

from .transfers import LinkTransfers

Compute = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(layer, flat id, its inputs [n, H]) -> outputs [n, H] float32, without router weights."""


@dataclass(eq=False, slots=True)
class Call:
    """One expert, for ``rows`` [n] of the tokens; ``seconds``: what it should take."""

    layer: int
    flat: int
    rows: NDArray[np.intp]
    seconds: float
    result: Future[torch.Tensor] = field(init=False)
    begin: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Taken:
    """Pairs whose outputs are ``call``'s: ``which`` [m] of its rows."""

    call: Call
    which: NDArray[np.intp]
    pairs: NDArray[np.intp]


class Served:
    """What of a layer was computed early, and counts."""

    def __init__(self, taken: Sequence[Taken], pairs: int) -> None:
        self.taken = taken
        self._done = np.zeros(pairs, dtype=np.bool_)
        for one in taken:
            self._done[one.pairs] = True

    def left(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of an expert's pairs that are still to be computed."""
        return pairs[~self._done[pairs]] if self.taken else pairs

    def add_to(self, total: torch.Tensor, weights: torch.Tensor, top_k: int) -> None:
        """Wait for the results and add them to ``total`` [T, H] float32, weighted by ``weights`` [T * K]."""
        for one in self.taken:
            pairs = torch.from_numpy(one.pairs)
            out = one.call.result.result()[torch.from_numpy(one.which)]
            total.index_add_(0, pairs // top_k, out * weights[pairs][:, None])


NOTHING = Served((), 0)


class EarlyCalls:
    """The thread, and what was given to it. All methods are called by the thread that runs the model."""

    def __init__(self, conductor: Conductor, transfers: LinkTransfers, compute: Compute) -> None:
        self._conductor = conductor
        self._transfers = transfers
        self._compute = compute
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="daop-host")
        self._announced: Started | None = None
        self._early_at: int | None = None  # the first of the rows with early calls
        self._due: list[Call] = []  # of the layer that runs next, or runs
        self._coming: list[Call] = []  # of the one behind it

    def expect(self, layer: int, decided: Decided, started: Started | None) -> None:
        """``decided`` runs next as layer ``layer``; then what was ``started`` may start."""
        for call in self._due:  # the layer before did without
            self._forget(call)
        self._due, self._coming = self._coming, []
        if any(call.layer != layer for call in self._due):  # of a run that broke off
            self.drop()
        self._early_at = decided.rows if decided.early is not None else None
        self._announced = started

    @property
    def input(self) -> torch.Tensor | None:
        """[T, H] what ``start`` needs on the host; None: nothing will start."""
        return None if self._announced is None else self._announced.input

    def submit(self, work: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """Work of the running layer, behind what was started before."""
        return self._pool.submit(torch.inference_mode()(work))

    def collect(self, ids: NDArray[np.int64]) -> Served:
        """The running layer's choices ``ids`` [T, K] are known: what of them is done, or under way. Safe to
        call again for the same layer."""
        taken = []
        for call in self._due:
            found = self._taken(call, ids)
            if found is None:
                self._forget(call)
            else:
                taken.append(found)
        self._due = [one.call for one in taken]
        left = sum(call.seconds for call in self._due if not call.result.done())
        self._transfers.host_until = self._transfers.now + left
        return Served(taken, ids.size)

    def _taken(self, call: Call, ids: NDArray[np.int64]) -> Taken | None:
        if self._early_at is None:
            return None
        rows = self._early_at + call.rows
        expert = call.flat - self._conductor.residency.geometry.offsets[call.layer]
        which, rank = np.nonzero(ids[rows] == expert)
        return Taken(call, which, rows[which] * ids.shape[1] + rank) if len(which) else None

    def start(self, hidden: torch.Tensor | None, able: Callable[[int], bool]) -> None:
        """Give the announced calls to the thread, on the announced input ``hidden`` [T, H], heaviest first;
        those of experts that are resident, or that the host is not ``able`` to compute, are left."""
        started, self._announced = self._announced, None
        if started is None or hidden is None:
            return
        residency, costs, free = (
            self._conductor.residency,
            self._conductor.costs,
            self._transfers.host_free_at,
        )
        base = residency.geometry.offsets[started.layer]
        for expert, rows in _by_expert(started):
            flat = base + expert
            if residency.is_resident(flat) or not able(flat):
                continue
            call = Call(started.layer, flat, rows, costs.host(flat, len(rows)))
            free += call.seconds
            call.result = self._pool.submit(self._run, call, hidden[torch.from_numpy(rows)])
            self._coming.append(call)
        self._transfers.host_until = free

    def _run(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        call.begin = self._transfers.now
        try:
            with torch.inference_mode():
                return self._compute(call.layer, call.flat, x)
        finally:
            call.end = self._transfers.now

    def finish(self, served: Served) -> None:
        """The layer has all that was served."""
        self._due = []
        if self._conductor.watchers:
            for one in served.taken:
                call = one.call
                self._conductor.span(Busy("host", "pre-calculation", call.begin, call.end, (call.flat,)))

    def _forget(self, call: Call) -> None:
        """It will not be used (any more)."""
        if not call.result.cancel() and self._conductor.watchers:
            call.result.add_done_callback(
                lambda _: self._conductor.span(
                    Busy("host", "pre-calculation, unused", call.begin, call.end, (call.flat,))
                )
            )

    def drop(self) -> None:
        """Nothing that was started will be used."""
        for call in (*self._due, *self._coming):
            self._forget(call)
        self._due, self._coming, self._announced = [], [], None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _by_expert(started: Started) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Experts and the rows whose calls of them start, those of the heaviest calls first."""
    rows, ranks = np.nonzero(started.calls)
    experts = started.routing.ids[rows, ranks]
    order = np.argsort(-started.routing.weights[rows, ranks], kind="stable")
    for expert in dict.fromkeys(experts[order].tolist()):
        yield expert, rows[experts == expert]
