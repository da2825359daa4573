"""``optimum``: knows the whole run. Not realisable; a bound to measure the others against.

Source: Belady (1966): the expert used latest in the future leaves, and one that would be used later
still is not admitted. Added: misses end as soon as host and link together allow, and the link brings,
in its idle time, what is needed next and can arrive before it is. It is a strong greedy bound, not a
proof of the best: the joint choice of placement and schedule is not solved exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import Forecast, Geometry, Step

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View
from .lfu import lowest
from .lru_idle import sooner

NEVER = 1 << 40


@POLICIES.register("optimum")
class Optimum(Policy):
    """Decides for nothing: what it knows it could not know."""

    needs_future = True
    plan_us = 0.0

    def foresee(self, steps: Sequence[Sequence[int]]) -> None:
        self._uses: dict[int, list[int]] = {}
        for at in range(len(steps) - 1, -1, -1):
            for flat in steps[at]:
                self._uses.setdefault(flat, []).append(at)  # latest first, so that pop gives the next

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        self._next = np.full(geometry.total, NEVER, dtype=np.int64)
        if not hasattr(self, "_uses"):
            self._uses = {}  # without a future it can only guess: everything is never used again
        for flat, uses in self._uses.items():
            self._next[flat] = uses[-1]
        self._at = -1
        self._layer_seconds = 0.0
        self._last = 0.0
        first: list[int] = np.argsort(self._next, kind="stable")[:slots].tolist()
        return first

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._at += 1
        for flat in step.experts:
            uses = self._uses.get(flat)
            if uses:
                uses.pop()
            self._next[flat] = uses[-1] if uses else NEVER
        took = view.now - self._last
        self._last = view.now
        self._layer_seconds = took if self._at < 2 else 0.95 * self._layer_seconds + 0.05 * took
        if not missing:
            return Plan()
        keep, computed = list(missing), list[int]()
        if self.costs.host_beside:
            keep, computed = sooner(missing, step, self.costs)
        room = view.free_slots(missing[0]) if keep else 0
        worst = int(self._next[view.evictable].max(initial=0)) if keep else 0
        stream = [flat for flat in keep if not room and self._next[flat] >= worst]
        return Plan(keep=[flat for flat in keep if flat not in set(stream)], stream=stream, host=computed)

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        chosen = lowest(-self._next, count, view, incoming)
        if prefetch is not None:
            return [flat for flat in chosen if self._next[flat] > self._next[incoming]]
        return chosen

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        """What is needed soonest among the absent that can still arrive in time."""
        copy = self.costs.copy(step.experts[0])
        queued = max(0.0, view.link_free_at - view.now)
        asked: list[Prefetch] = []
        horizon = max(self._layer_seconds, copy)
        absent = ~(view.resident | view.filling)
        while queued < horizon:
            lead = int((queued + copy) / max(self._layer_seconds, 1e-9))
            soon = np.where(absent & (self._next > self._at + lead), self._next, NEVER)
            flat = int(soon.argmin())
            if soon[flat] == NEVER:
                break
            absent[flat] = False
            asked.append(Prefetch(flat, 1.0, None))
            queued += copy
        return asked
