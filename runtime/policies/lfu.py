"""``lfu``: least frequently used leaves; a missed expert is always admitted.

Source: the frequency variant of the per-expert caches of mixtral-offloading and FreeToken. Counts are
kept for the whole run and never aged; ties go to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import Geometry, Step
from daop.runtime.lowest import lowest_of

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View


def lowest(worth: NDArray[Any], count: int, view: View, incoming: int) -> list[int]:
    """Up to ``count`` evictable experts of least worth that could make room for ``incoming``."""
    same = view.same_slot(incoming)
    allowed = view.evictable if same is None else view.evictable & same
    return lowest_of(worth, allowed, count)


@POLICIES.register("lfu")
class Lfu(Policy):
    """One pool for all layers."""

    plan_us = 18.0

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        self._uses = np.zeros(geometry.total, dtype=np.int64)
        return ()

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._uses[step.experts] += step.tokens
        return Plan(keep=missing)

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        return lowest(self._uses, count, view, incoming)
