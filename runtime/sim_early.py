"""Approximate policies on a virtual clock: what ``runtime.early`` does, without numbers.

Every decision is the policy's own, on the recorded routing, weights, forecasts and distances, so at batch 1 a
simulated run approximates the very calls that the recorded run would have. A policy whose forecast *is* the
routing (``daop``) takes the recorded routing as that forecast.

The host computes, first come, first served:

    the running layer's misses      from when its router is known
    late calls of this layer        then; the next layer's end waits for them
    early calls of the next layer   then, in order of their weight, from when they are announced

When the next router is known, early calls that will not be used and have not begun are taken off the queue;
one that has begun runs to its end. Of resident experts nothing starts early: they are computed when due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, DaopError, FloatArray, Geometry, Phase, Step

from .costs import HardwareCosts
from .policies.approximate import Approximate, Routing, count_calls
from .residency import Residency
from .sim_engine import VirtualEngine
from .sim_traffic import Forward, Traffic
from .statistics import Statistics
from .watching import Busy

REMEDY = {
    "weights": "record one that has router weights",
    "distances": "record it with `daop trace capture --distances`",
    "forecast_ids": "record it with `daop trace capture --distances`",
    "forecast_weights": "record it with `daop trace capture --distances`",
}


@dataclass(slots=True)
class Queued:
    """An early call's work on the host: begun if ``begin`` lies behind the clock."""

    flat: int
    seconds: float
    begin: float
    end: float


class SimulatedEarly:
    """The state between layers of one simulated run."""

    def __init__(
        self,
        policy: Approximate,
        traffic: Traffic,
        costs: HardwareCosts,
        engine: VirtualEngine,
        residency: Residency,
        statistics: Statistics,
    ) -> None:
        missing = [name for name in policy.needs if getattr(traffic, name) is None]
        if missing:
            raise DaopError(
                f"policy {type(policy).__name__.lower()} cannot be simulated from this trace: it has no "
                f"{missing[0]}; {REMEDY[missing[0]]}"
            )
        self.policy = policy
        self.busy_seconds = 0.0  # of the host, with work of early and late calls
        self.due = 0.0  # the running layer's output waits until then
        self.apart: dict[int, int] = {}  # expert -> tokens that the running layer need not compute
        self._geometry: Geometry = traffic.geometry
        self._traffic = traffic
        self._costs = costs
        self._engine = engine
        self._residency = residency
        self._statistics = statistics
        self._queue: list[Queued] = []
        self._before_queue = 0.0  # the host is busy with other things until then
        self._late_until = 0.0
        self._late: dict[int, int] = {}
        self._announced = False
        self._running: set[int] = set()

    def begin(self, forward: Forward) -> None:
        """A forward pass starts."""
        self._tokens = np.asarray(forward.token_ids)
        self._sequences: NDArray[np.int64] = self._traffic.sequence[self._tokens].astype(np.int64)
        self._announced = False
        self._late_until = 0.0
        running = set(self._sequences.tolist())
        if forward.phase is Phase.DECODE:  # of every sequence that has begun and not ended
            self.policy.close(sorted(self._running - running))
            self._running.clear()
        self._running |= running

    def enter(self, step: Step) -> Step:
        """The router of ``step`` is known; returns the step that runs."""
        self.apart, self._late, self.due = {}, {}, self._late_until
        self._late_until = 0.0
        ids = self._traffic.ids[self._tokens, step.layer]
        if step.phase is Phase.PREFILL:
            self.policy.placement.prompt(step.layer, ids, self._sequences)
            return step
        announced, self._announced = self._announced, False
        if (ids < 0).any():  # the trace does not say everything of this layer
            self._collect(set())
            return step
        true = self._routing(step.layer, self._traffic.ids, self._traffic.weights)
        away: FloatArray | None = None
        if announced:
            recorded = self._traffic.distances
            away = np.zeros(len(ids), np.float32) if recorded is None else recorded[self._tokens, step.layer]
        settled = self.policy.settle(step.layer, self._sequences.tolist(), true, away)
        count_calls(true, settled, self._statistics)
        counted = self._rows_of(step.layer, settled.routing, settled.early)
        self._collect(set(counted))
        queued = {entry.flat for entry in self._queue}
        self.apart = {flat: rows for flat, rows in counted.items() if flat in queued}
        for flat, rows in self._rows_of(step.layer, settled.routing, settled.late).items():
            if self._costs.host_beside and not self._residency.is_resident(flat):
                self._late[flat] = rows
                self.apart[flat] = self.apart.get(flat, 0) + rows
        self._queue = []
        return self._step(step, settled.routing) if settled.changed else step

    def look_ahead(self, step: Step, now: float) -> float:
        """After the host was given the layer's own work; returns seconds that the main thread took."""
        if step.phase is Phase.PREFILL:
            return 0.0
        engine = self._engine
        for flat, rows in self._late.items():
            seconds = self._costs.host(flat, rows)
            self._work(seconds)
            self._late_until = engine.host_free_at
            if engine.span is not None:
                engine.span(
                    Busy("host", "deferred", engine.host_free_at - seconds, engine.host_free_at, (flat,))
                )
        if not self.policy.asks(step.layer):
            return 0.0
        asked = self._costs.forecast_seconds
        self._announce(step.layer + 1, now + asked)
        return asked

    def _announce(self, target: int, now: float) -> None:
        traffic = self._traffic
        ids, weights = traffic.forecast_ids, traffic.forecast_weights
        if ids is None or weights is None or "forecast_ids" not in self.policy.needs:
            ids, weights = traffic.ids, traffic.weights
        if (ids[self._tokens, target] < 0).any():
            return
        self._announced = True
        settled = self.policy.announce(
            target - 1, self._sequences.tolist(), self._routing(target, ids, weights), None
        )
        if not self._costs.host_beside:
            return
        free = self._before_queue = max(self._engine.host_free_at, now)
        for flat, rows in self._rows_of(target, settled.routing, settled.early).items():
            if not self._residency.is_resident(flat):
                seconds = self._costs.host(flat, rows)
                self._queue.append(Queued(flat, seconds, free, free + seconds))
                free += seconds
        self._engine.host_free_at = free

    def _collect(self, used: set[int]) -> None:
        """Take what will not be used off the queue, and say when what will be is there."""
        if not self._queue:
            return
        engine, free, kept = self._engine, self._before_queue, []
        for entry in self._queue:
            if entry.begin < engine.now:
                free = entry.end
            elif entry.flat in used:
                free = max(free, engine.now) + entry.seconds
            else:
                continue
            self.busy_seconds += entry.seconds
            if engine.span is not None:
                what = "pre-calculation" if entry.flat in used else "pre-calculation, unused"
                engine.span(Busy("host", what, free - entry.seconds, free, (entry.flat,)))
            if entry.flat in used:
                kept.append(entry)
                self.due = max(self.due, free)
        self._queue = kept
        engine.host_free_at = free

    def _work(self, seconds: float) -> None:
        engine = self._engine
        engine.host_free_at = max(engine.host_free_at, engine.now) + seconds
        self.busy_seconds += seconds

    def _routing(self, layer: int, ids: NDArray[np.int32], weights: NDArray[np.float16] | None) -> Routing:
        chosen = ids[self._tokens, layer].astype(np.int32)
        if weights is None:  # only for policies that do not need them: in the order that the trace has
            shares = np.broadcast_to(np.linspace(1.0, 0.5, chosen.shape[1], dtype=np.float32), chosen.shape)
        else:
            shares = weights[self._tokens, layer].astype(np.float32)
        return Routing(chosen, shares)

    def _rows_of(self, layer: int, routing: Routing, mask: BoolArray | None) -> dict[int, int]:
        """How many rows of each expert (flat id) the mask names, heaviest first."""
        if mask is None or not mask.any():
            return {}
        base, found = self._geometry.offsets[layer], routing.ids[mask]
        out: dict[int, int] = {}
        for expert in found[np.argsort(-routing.weights[mask], kind="stable")].tolist():
            out[base + expert] = out.get(base + expert, 0) + 1
        return out

    def _step(self, step: Step, routing: Routing) -> Step:
        """The same step with another routing."""
        experts, tokens = np.unique(routing.ids, return_counts=True)
        base = self._geometry.offsets[step.layer]
        flats: Sequence[int] = (experts + base).tolist()
        return replace(step, experts=flats, tokens=tokens.tolist(), weights=None)
