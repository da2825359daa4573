"""``deferral``: low-weight experts behind the link are added one layer late, so that their time is hidden.

Source: KTransformers' expert deferral (SOSP 2025). Placement is static, by frequency. In decode, of a token's
experts that lie behind the link the ``deferred`` of least router weight run on the true input, but their
output is added to the next layer's instead of this one's; at least ``immediate`` of its experts are added in
time. The last layer defers nothing, and nothing is dropped.

**The output is approximate**: the next layer's attention and router do not see what was deferred.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import FloatArray, Phase, Step

from .approximate import Routing, Settled, Static, check_count
from .base import POLICIES, Plan, View
from .fiddler import cheaper_side


@POLICIES.register("deferral")
class Deferral(Static):
    """``deferred``: experts of a token and layer at most; ``immediate``: not deferred at least."""

    exact = False
    plan_us = 10.0
    look_ahead_us = 0.0
    needs = ("weights",)

    def __init__(self, *, deferred: int = 2, immediate: int = 1) -> None:
        self.deferred = check_count("deferred", deferred)
        self.immediate = check_count("immediate", immediate)

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        if step.phase is Phase.DECODE:
            return Plan(host=missing)
        stream, host = cheaper_side(missing, step, self.costs)
        return Plan(stream=stream, host=host)

    def settle(
        self, layer: int, sequences: Sequence[int], routing: Routing, distances: FloatArray | None
    ) -> Settled:
        rows, k = routing.ids.shape
        most = min(self.deferred, k - self.immediate)
        if layer == self.geometry.layers - 1 or most <= 0:
            return Settled(routing)
        host = self.book.calls_behind(layer, sequences, routing.ids)
        light = np.argsort(np.where(host, routing.weights, np.inf), axis=1, kind="stable")[:, :most]
        late = np.zeros((rows, k), dtype=np.bool_)
        np.put_along_axis(late, light, True, axis=1)
        return Settled(routing, late=late & host)
