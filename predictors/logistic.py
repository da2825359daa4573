"""Logistic: one logistic regression per horizon (scikit-learn) over the scores of the cheap predictors."""

from __future__ import annotations

from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, NextLayer, State
from .history import Context
from .network import sigmoid
from .stack_features import NAMES, StackFeatures


@PREDICTORS.register("logistic")
class Logistic(NextLayer):
    """Linear in ``stack_features``; shared by all layers and experts, so it needs little data."""

    def __init__(
        self, *, pairs: int = 300_000, penalty: float = 1e-3, horizons: int = 4, seed: int = 0
    ) -> None:
        self.pairs = pairs
        self.penalty = penalty
        self.horizons = horizons
        self.seed = seed

    def fit(self, data: d.Routing) -> Self:
        from sklearn.linear_model import LogisticRegression

        self.check_needs(data)
        self.geometry_ = data.geometry
        self.features_ = StackFeatures(self.horizons).fit(data)
        self.weights_ = np.zeros((self.horizons, len(NAMES)), dtype=np.float32)
        self.bias_ = np.zeros(self.horizons, dtype=np.float32)
        for h in range(1, min(self.horizons, data.geometry.layers - 1) + 1):
            x, y = self.features_.sample(data, h, self.pairs, self.seed)
            if y.min() == y.max():  # every expert is always chosen: k equals E
                self.bias_[h - 1] = 20.0 if y[0] else -20.0
                continue
            mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-6)
            model = LogisticRegression(C=1 / self.penalty / len(x), max_iter=200).fit((x - mean) / scale, y)
            self.weights_[h - 1] = model.coef_[0] / scale
            self.bias_[h - 1] = model.intercept_[0] - float(mean @ self.weights_[h - 1])
        return self

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        x = self.features_.build(context, horizon)
        return sigmoid(x @ self.weights_[horizon - 1] + self.bias_[horizon - 1])

    def state(self) -> State:
        state = self.features_.state()
        state.arrays |= {"weights": self.weights_, "bias": self.bias_}
        return state

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.features_ = StackFeatures(self.horizons).restore(state, geometry)
        self.weights_ = state.arrays["weights"].reshape(self.horizons, len(NAMES))
        self.bias_ = state.arrays["bias"].reshape(self.horizons)
        return self
