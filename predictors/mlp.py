"""MLP: the small network of ``network.py``, its heads asking which experts the next layers choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daop.core import FloatArray

from .base import PREDICTORS, NextLayer
from .history import Context
from .network import sigmoid
from .network_predictor import NetworkPredictor

if TYPE_CHECKING:
    from .network_fit import Task


@PREDICTORS.register("mlp")
class Mlp(NetworkPredictor, NextLayer):
    """Needs routing history only. ``max_tokens`` bounds what is fitted on (whole sequences are drawn)."""

    memo_key = "mlp"

    def __init__(
        self,
        *,
        width: int = 128,
        epochs: int = 4,
        batch: int = 256,
        learning_rate: float = 0.003,
        weight_decay: float = 0.05,
        dropout: float = 0.1,
        horizons: int = 4,
        max_tokens: int = 100_000,
        seed: int = 0,
    ) -> None:
        self.width = width
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.dropout = dropout
        self.horizons = horizons
        self.max_tokens = max_tokens
        self.seed = seed

    @property
    def forecasts(self) -> int:
        return self.horizons

    def task(self) -> Task:
        from .network_fit import NextTask

        return NextTask(self.horizons)

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        target, offsets = context.layer + horizon, self.geometry_.offsets
        last = context.past.since[:, offsets[target] : offsets[target + 1]] == 0
        return sigmoid(self.network_.logits(context, horizon - 1, target, last))
