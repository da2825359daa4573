"""Popularity: every token wants what most tokens wanted. The floor under every other predictor."""

from __future__ import annotations

from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, NextLayer, State
from .history import Context


@PREDICTORS.register("popularity")
class Popularity(NextLayer):
    """Share of training tokens that chose each expert."""

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = data.geometry
        self.share_ = d.popularity(data)
        return self

    def fit_counts(self, data: d.Counts) -> Self:
        self.geometry_ = data.geometry
        self.share_ = d.popularity(data)
        return self

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        offsets, target = self.geometry_.offsets, context.layer + horizon
        share = self.share_[offsets[target] : offsets[target + 1]]
        return np.broadcast_to(share, (len(context.chosen), len(share)))

    def state(self) -> State:
        return State(arrays={"share": self.share_})

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.share_ = state.arrays["share"].reshape(geometry.total)
        return self
