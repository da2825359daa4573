"""``lru_idle``: LRU that admits a missed expert in the link's idle time, after the host computed it.

Source: the idle-link admission that expert caches on top of host compute use (no single paper). Each
miss runs where it ends sooner, given what the step's other misses were given; those that ran on the
host are copied afterwards, one at a time, and only while the link has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from daop.core import Forecast, Geometry, Step

from .base import POLICIES, Costs, Plan, Prefetch, View
from .lru import Lru


def sooner(missing: Sequence[int], step: Step, costs: Costs) -> tuple[list[int], list[int]]:
    """One miss after the other to the end that is sooner: (to copy, to compute on the host)."""
    tokens = dict(zip(step.experts, step.tokens, strict=True))
    link = host = 0.0
    copied: list[int] = []
    computed: list[int] = []
    for flat in missing:
        by_host = host + costs.host(flat, tokens[flat])
        by_link = link + costs.copy(flat)
        if by_host <= by_link + costs.device(flat, tokens[flat]):
            host = by_host
            computed.append(flat)
        else:
            link = by_link
            copied.append(flat)
    return copied, computed


@POLICIES.register("lru_idle")
class LruIdle(Lru):
    """Admission waits for the idle link; what could not be admitted within a token is forgotten."""

    plan_us = 8.0
    look_ahead_us = 5.0

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        self._wanted: dict[int, int] = {}  # missed and not admitted -> step in which it was missed
        self._step = 0
        return super().start(geometry, slots, costs, view)

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._step += 1
        self._recency.use(step.experts)
        if not missing:
            return Plan()
        if not self.costs.host_beside:
            return Plan(keep=missing)
        copied, computed = sooner(missing, step, self.costs)
        self._wanted.update(dict.fromkeys(computed, self._step))
        return Plan(keep=copied, host=computed)

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        if not self._wanted or view.link_free_at > view.now:
            return ()
        oldest = self._step - self.geometry.layers
        for flat in list(reversed(self._wanted)):  # the latest miss first
            missed = self._wanted.pop(flat)
            if missed > oldest and not (view.resident[flat] or view.filling[flat]):
                self._recency.add(flat)
                return [Prefetch(flat, self.costs.host(flat, 1), None)]
        return ()
