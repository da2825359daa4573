"""MLP: the small network of ``network.py``, its heads asking which experts the next layers choose."""

from __future__ import annotations

from typing import Self

from daop.core import FloatArray, Geometry

from .base import PREDICTORS, NextLayer, State
from .data import Routing
from .history import Context
from .network import Network, Weights, shapes, sigmoid


@PREDICTORS.register("mlp")
class Mlp(NextLayer):
    """Needs routing history only. ``max_tokens`` bounds what is fitted on (whole sequences are drawn)."""

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

    def fit(self, data: Routing) -> Self:
        return self._fit(data, None)

    def update(self, data: Routing) -> Self:
        self.geometry_.check_same_shape(data.geometry, "the predictor", "the trace")
        return self._fit(data, self.network_.weights)

    def _fit(self, data: Routing, start: Weights | None) -> Self:
        from .network_fit import NextTask, Schedule, fit

        self.check_needs(data)
        schedule = Schedule.of(self)
        weights = fit(data, schedule, NextTask(self.horizons), start)
        self.geometry_ = data.geometry
        self.network_ = Network(weights, data.geometry, "mlp")
        return self

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        target, offsets = context.layer + horizon, self.geometry_.offsets
        last = context.past.since[:, offsets[target] : offsets[target + 1]] == 0
        return sigmoid(self.network_.logits(context, horizon - 1, target, last))

    def state(self) -> State:
        return State(arrays=dict(self.network_.weights))

    def restore(self, state: State, geometry: Geometry) -> Self:
        expected = shapes(geometry, self.width, self.horizons)
        weights = {name: state.arrays[name].reshape(shape) for name, shape in expected.items()}
        self.geometry_ = geometry
        self.network_ = Network(weights, geometry, "mlp")
        return self
