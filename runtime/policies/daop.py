"""``daop``: as published. In decode the forecast *is* the routing, and CPU experts run on a stale input.

Source: Zhang, Aggarwal and Mitra, DAOP (DATE 2025, arXiv 2501.10375), steps 1 to 7. Placement and prefill are
those of ``prompt_swap``. In decode, layers 0 to ``first`` are exact. From layer ``first`` on, the router of
the next layer is asked about this layer's input; its answer is the next layer's routing, and those of its
experts that lie behind the link are computed at once, on this layer's input. If all of them do, and the layer
has a resident expert, only the first stays there: the others are replaced by the resident experts with the
highest forecast, and the weights are scaled to their old sum. Experts in fast memory get the true input. The
true router's answer is never used.

**The output is approximate**: in its routing, in the input of pre-calculated experts, by substitution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import FloatArray

from .approximate import Routing, Settled, check_count
from .base import POLICIES
from .prompt_swap import PromptSwap


@POLICIES.register("daop")
class Daop(PromptSwap):
    """``first``: the first layer (from 0) that forecasts its successor; the paper's is 4 of 32."""

    exact = False
    plan_us = 10.0
    look_ahead_us = 40.0

    def __init__(self, *, first: int = 4) -> None:
        self.first = check_count("first", first)
        self._next: tuple[int, Settled] | None = None

    def asks(self, layer: int) -> bool:
        return self.first <= layer < self.geometry.layers - 1

    def announce(
        self, layer: int, sequences: Sequence[int], forecast: Routing, scores: FloatArray | None
    ) -> Settled:
        target = layer + 1
        behind = self.book.behind(target, sequences)  # [T, E]
        host = np.take_along_axis(behind, forecast.ids, axis=1)
        rows = np.flatnonzero(host.all(axis=1) & ~behind.all(axis=1))
        if len(rows):
            forecast = self._degrade(forecast, rows, behind, scores)
            host = np.take_along_axis(behind, forecast.ids, axis=1)
        settled = Settled(forecast, early=host, changed=True)
        self._next = (target, settled)
        return settled

    def _degrade(
        self, forecast: Routing, rows: np.ndarray, behind: np.ndarray, scores: FloatArray | None
    ) -> Routing:
        """All of a row's experts lie behind the link: keep the first there, replace the others."""
        ids, weights = forecast.ids.copy(), forecast.weights.copy()
        for row in rows.tolist():
            order = np.argsort(-weights[row], kind="stable")
            resident = np.flatnonzero(~behind[row])
            if scores is not None:
                resident = resident[np.argsort(-scores[row, resident], kind="stable")]
            places, chosen = order[1:][: len(resident)], resident[: len(order) - 1]
            old = weights[row].sum()
            if scores is not None:  # relative to the first, as the router would weigh them
                first = float(scores[row, ids[row, order[0]]])
                weights[row, places] = weights[row, order[0]] * scores[row, chosen] / max(first, 1e-12)
            ids[row, places] = chosen
            weights[row] *= old / max(float(weights[row].sum()), 1e-12)
        return Routing(ids, weights)

    def settle(
        self, layer: int, sequences: Sequence[int], routing: Routing, distances: FloatArray | None
    ) -> Settled:
        known, self._next = self._next, None
        return known[1] if known is not None and known[0] == layer else Settled(routing)
