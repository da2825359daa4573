"""``bounded``: an expert behind the link may start early; its result counts if the input was close enough.

Placement, prefetching and misses are those of ``adaptive``; the routing is always the true router's. While a
layer runs, the next layer's router is asked about the input as it can be told by then (the stale one,
corrected by what is learnt of the difference). Of the experts that it names and that a sequence alone would
not hold (``RecentPlacement``), at most ``calls`` per token start at once: more would not have begun anyway by
the time the true input is there. An early result is used, weighted by the true router, if

    the true router chose that expert,
    the announced input's distance from the true one is below ``tolerance`` of the true one's norm, and
    the expert's share of the token's router weight is at most ``light``.

Else the expert runs again on the true input. Where a sequence's inputs have been off by more than
``tolerance`` of late, nothing starts. ``tolerance`` 0 is exact, and then this is ``adaptive``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import BoolArray, DaopError, FloatArray, Geometry, Phase, Step
from daop.runtime.sequence_placement import RecentPlacement

from .adaptive import Adaptive
from .approximate import Approximate, Routing, Settled, check_count, check_share
from .base import POLICIES, Costs, Plan, View

MEMORY = 0.2  # of a new distance in the running mean of a sequence's


@POLICIES.register("bounded")
class Bounded(Adaptive, Approximate):
    """``tolerance``: relative distance of inputs; ``calls`` a token and layer; ``light``: share of the
    weight; ``first``: the first layer that announces for its successor."""

    exact = False
    corrects = True
    weighs = True
    needs = ("distances", "forecast_ids", "forecast_weights")

    def __init__(self, *, tolerance: float = 0.2, calls: int = 1, light: float = 1.0, first: int = 0) -> None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise DaopError(
                f"--tolerance is {tolerance!r}, but must be a relative distance of 0 (exact) or more"
            )
        self.tolerance = float(tolerance)
        self.calls = check_count("calls", calls)
        self.light = check_share("light", light)
        self.first = check_count("first", first)
        self._announced: tuple[int, Routing, BoolArray] | None = None
        self._served: dict[int, int] = {}  # expert of the running layer -> tokens with an early result

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        chosen = super().start(geometry, slots, costs, view)
        frequency = None if self.profile is None else self.profile.frequency
        self.placement = self.book = RecentPlacement(geometry, slots, frequency)
        self._usual: dict[int, FloatArray] = {}  # sequence -> running mean of distances by layer
        return chosen

    def open(self, sequences: Sequence[int]) -> None:
        super().open(sequences)
        for sequence in sequences:
            self._usual[sequence] = np.zeros(self.geometry.layers, dtype=np.float32)

    def close(self, sequences: Sequence[int]) -> None:
        super().close(sequences)
        for sequence in sequences:
            self._usual.pop(sequence, None)

    # -- which calls -----------------------------------------------------------------------------

    def asks(self, layer: int) -> bool:
        enough = self.tolerance > 0 and self.calls > 0
        return enough and self.first <= layer < self.geometry.layers - 1

    def announce(
        self, layer: int, sequences: Sequence[int], forecast: Routing, scores: FloatArray | None
    ) -> Settled:
        """The surest of the light ones: the higher the forecast weight, the surer is the choice."""
        rows, k = forecast.ids.shape
        able = self.book.calls_behind(layer + 1, sequences, forecast.ids)
        able &= forecast.shares() <= self.light
        able &= (self._means(sequences, layer + 1) < self.tolerance)[:, None]
        first = np.argsort(np.where(able, -forecast.weights, np.inf), axis=1, kind="stable")
        early = np.zeros((rows, k), dtype=np.bool_)
        np.put_along_axis(early, first[:, : self.calls], True, axis=1)
        early &= able
        self._announced = (layer + 1, forecast, early)
        return Settled(forecast, early=early)

    def settle(
        self, layer: int, sequences: Sequence[int], routing: Routing, distances: FloatArray | None
    ) -> Settled:
        known, self._announced = self._announced, None
        self._served = {}
        self.book.prompt(layer, routing.ids, np.asarray(sequences))
        if known is None or known[0] != layer or distances is None:
            return Settled(routing)
        self._learn(sequences, layer, distances)
        _, forecast, early = known
        started = np.where(early, forecast.ids, -1)
        named = (routing.ids[:, :, None] == started[:, None, :]).any(axis=2)
        close = distances < self.tolerance  # nothing is closer than 0
        used = named & close[:, None] & (routing.shares() <= self.light)
        base = self.geometry.offsets[layer]
        for expert in routing.ids[used].tolist():
            self._served[base + expert] = self._served.get(base + expert, 0) + 1
        return Settled(routing, early=used)

    def _means(self, sequences: Sequence[int], layer: int) -> FloatArray:
        zero = np.float32(0.0)
        return np.asarray(
            [self._usual[s][layer] if s in self._usual else zero for s in sequences], dtype=np.float32
        )

    def _learn(self, sequences: Sequence[int], layer: int, distances: FloatArray) -> None:
        for sequence, distance in zip(sequences, distances.tolist(), strict=True):
            usual = self._usual.setdefault(sequence, np.zeros(self.geometry.layers, dtype=np.float32))
            if distance == distance:  # a trace may not know it
                old = usual[layer]
                usual[layer] = distance if old == 0 else old + MEMORY * (distance - old)

    # -- where they run --------------------------------------------------------------------------

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        """As ``adaptive``, but for misses whose every token has its result: they are not fetched."""
        if not self._served or step.phase is Phase.PREFILL or not self.costs.host_beside:
            return super().plan(step, missing, view)
        tokens = dict(zip(step.experts, step.tokens, strict=True))
        absent = {*missing, *(flat for flat in step.experts if view.filling[flat])}
        done = [flat for flat, rows in self._served.items() if flat in absent and rows >= tokens.get(flat, 0)]
        plan = super().plan(step, [flat for flat in missing if flat not in done], view)
        return Plan(
            keep=[flat for flat in plan.keep if flat not in done],
            stream=[flat for flat in plan.stream if flat not in done],
            host=[*(flat for flat in plan.host if flat not in done), *done],
            evict=plan.evict,
        )
