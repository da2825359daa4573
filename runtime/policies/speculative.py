"""``speculative``: an LRU pool plus a few slots for the experts that the next layer's gate announces.

Source: mixtral-offloading (Eliseev and Mazur, 2023): the next layer's router is applied to this layer's
MoE input, and its top experts are loaded ahead into buffers of their own. A speculative load never
takes a live entry's slot; a speculated expert that is used becomes live, and the pool gives up its
oldest entry in return.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import Forecast, Geometry, Step

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View
from .lru import Recency


@POLICIES.register("speculative")
class Speculative(Policy):
    """``ahead``: how many experts of the next layer are loaded early (None: the model's top-k)."""

    horizon = 1
    plan_us = 5.0
    look_ahead_us = 27.0

    def __init__(self, ahead: int | None = None) -> None:
        self.ahead = ahead

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        ahead = geometry.top_k if self.ahead is None else self.ahead
        self._ahead = min(ahead, max(0, slots // 4))  # a small pool keeps most of its slots live
        self._recency = Recency()
        self._speculated: dict[int, None] = {}  # speculative entries, oldest first
        return ()

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._recency.use(step.experts)
        for flat in step.experts:
            self._speculated.pop(flat, None)  # used: live from now on
        return Plan(keep=missing)

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        same = view.same_slot(incoming)
        if prefetch is None:
            return self._recency.oldest(count, view, same)
        stale = [flat for flat in self._speculated if view.evictable[flat] and (same is None or same[flat])]
        if stale:
            del self._speculated[stale[0]]
            return stale[:1]
        if np.count_nonzero(view.prefetched) < self._ahead:  # the reserve is not full: live entries make room
            return self._recency.oldest(count, view, same)
        return ()

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        if not forecasts or not self._ahead:
            return ()
        scores = forecasts[0].scores
        base = self.geometry.offsets[forecasts[0].layer]
        best = np.argpartition(-scores, self._ahead - 1)[: self._ahead]
        best = best[np.argsort(-scores[best], kind="stable")]
        asked = [base + int(expert) for expert in best]
        wanted = [flat for flat in asked if not (view.resident[flat] or view.filling[flat])]
        held = (flat for flat in self._speculated if view.resident[flat] or view.filling[flat])
        self._speculated = dict.fromkeys((*held, *wanted))
        return [Prefetch(flat, float(scores[flat - base])) for flat in wanted]
