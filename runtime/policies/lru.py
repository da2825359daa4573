"""``lru``: least recently used leaves. One pool for all layers, or one per layer.

Source: FreeToken's and llama.cpp's single pool; mixtral-offloading's cache per layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from daop.core import BoolArray, Geometry, Step

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View


class Recency:
    """Experts in order of last use, with lazy removal: an entry that lost its slot is dropped when met.

    The running step's own experts are the newest, so a walk from the oldest stops at the first of them.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest use first
        self._current: frozenset[int] = frozenset()

    def use(self, experts: Sequence[int]) -> None:
        order = self._order
        for flat in experts:
            order[flat] = None
            order.move_to_end(flat)
        self._current = frozenset(experts)

    def add(self, flat: int) -> None:
        """An expert is admitted outside its step: the newest, unless it is known."""
        self._order.setdefault(flat)

    def oldest(self, count: int, view: View, same: BoolArray | None = None) -> list[int]:
        """Up to ``count`` evictable experts, oldest use first, of the slots that ``same`` admits."""
        chosen: list[int] = []
        gone: list[int] = []
        evictable, resident, filling = view.evictable, view.resident, view.filling
        for flat in self._order:
            if flat in self._current:
                break
            if evictable[flat]:
                if same is None or same[flat]:
                    chosen.append(flat)
                    if len(chosen) == count:
                        break
            elif not (resident[flat] or filling[flat]):
                gone.append(flat)
        for flat in (*gone, *chosen):
            del self._order[flat]
        return chosen


@POLICIES.register("lru")
class Lru(Policy):
    """One pool: a missed expert takes the slot of the one used longest ago, in whatever layer."""

    plan_us = 6.0

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        self._recency = Recency()
        return ()

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._recency.use(step.experts)
        return Plan(keep=missing)

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        return self._recency.oldest(count, view, view.same_slot(incoming))


@POLICIES.register("lru_per_layer")
class LruPerLayer(Policy):
    """An equal share of the slots for every layer, each kept by recency of its own.

    A layer whose share is smaller than what one forward needs streams the rest.
    """

    plan_us = 7.0

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        share, rest = divmod(slots, geometry.layers)
        self._share = [share + (layer < rest) for layer in range(geometry.layers)]
        self._recency = [Recency() for _ in range(geometry.layers)]
        return ()

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        layer = step.layer
        recency = self._recency[layer]
        recency.use(step.experts)
        spare = max(0, self._share[layer] - view.held[layer])
        leaving = recency.oldest(len(missing) - spare, view) if len(missing) > spare else []
        room = spare + len(leaving)
        return Plan(keep=missing[:room], stream=missing[room:], evict=leaving)
