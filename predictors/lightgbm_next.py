"""LightGBM: boosted trees per horizon that stack the scores of the cheap predictors.

A call of LightGBM costs about a tenth of a millisecond however few rows it gets; see what ``daop evaluate``
prints before putting this one on the critical path.
"""

from __future__ import annotations

import logging
from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, NextLayer, State
from .history import Context
from .stack_features import NAMES, StackFeatures
from .trees import grow, read

log = logging.getLogger(__name__)


@PREDICTORS.register("lightgbm")
class Lightgbm(NextLayer):
    """Binary classifiers over (token, expert) pairs of ``stack_features``."""

    def __init__(
        self,
        *,
        trees: int = 60,
        leaves: int = 31,
        learning_rate: float = 0.15,
        pairs: int = 600_000,
        horizons: int = 4,
        seed: int = 0,
    ) -> None:
        self.trees = trees
        self.leaves = leaves
        self.learning_rate = learning_rate
        self.pairs = pairs
        self.horizons = horizons
        self.seed = seed

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = data.geometry
        self.features_ = StackFeatures(self.horizons).fit(data)
        self.texts_ = {}
        for h in range(1, min(self.horizons, data.geometry.layers - 1) + 1):
            x, y = self.features_.sample(data, h, self.pairs if h == 1 else self.pairs // 2, self.seed)
            log.info("lightgbm: horizon %d, %d trees on %d pairs", h, self.trees, len(x))
            self.texts_[str(h)] = grow(
                x,
                y,
                features=NAMES,
                objective="binary",
                trees=self.trees,
                leaves=self.leaves,
                learning_rate=self.learning_rate,
                least=20,
                seed=self.seed,
            )
        self._load()
        return self

    def _load(self) -> None:
        self._boosters = {int(h): read(text, NAMES) for h, text in self.texts_.items()}

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        x = self.features_.build(context, horizon)
        out = self._boosters[horizon].predict(x.reshape(-1, len(NAMES)), num_threads=1)
        return np.asarray(out, dtype=np.float32).reshape(x.shape[:2])

    def state(self) -> State:
        state = self.features_.state()
        state.texts = {f"horizon_{h}": text for h, text in self.texts_.items()}
        return state

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.features_ = StackFeatures(self.horizons).restore(state, geometry)
        self.texts_ = {name.removeprefix("horizon_"): text for name, text in state.texts.items()}
        self._load()
        return self
