"""Visits: one small network for everything that ``adaptive`` wants to know of an expert.

The network of ``network.py``, asked at every layer who is used at the next visit of the three layers ahead,
at the next visit of the layer itself (by the next token), and how often after that. Routing history only, and
without the order of the choices, so that it can run beside a model; ``runtime/visit_state.py`` runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daop.core import FloatArray

from .base import PREDICTORS, NextLayer
from .history import HALF_LIVES, Context
from .network import Sight, sigmoid
from .network_predictor import NetworkPredictor
from .visit_task import AHEAD, FORECASTS, LATER, TURN

if TYPE_CHECKING:
    from .network_fit import Task


@PREDICTORS.register("visits")
class Visits(NetworkPredictor, NextLayer):
    """``max_tokens`` bounds what is fitted on (whole sequences are drawn)."""

    memo_key = "visits"
    sight = Sight(windows=tuple(range(len(HALF_LIVES))), logs=True)
    horizons = AHEAD
    leads = tuple(range(1, AHEAD + 1))  # layers ahead of which the first heads tell
    turn, later = TURN, LATER  # the heads about the layer itself: its next visit, and those after it

    @property
    def forecasts(self) -> int:
        return FORECASTS

    def task(self) -> Task:
        from .visit_task import VisitTask

        return VisitTask()

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        target, offsets = context.layer + horizon, self.geometry_.offsets
        last = context.past.since[:, offsets[target] : offsets[target + 1]] == 0
        return sigmoid(self.network_.logits(context, horizon - 1, target, last))
