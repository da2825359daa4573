"""What ``frequency`` and ``popularity`` share: the share of training tokens that chose each expert."""

from __future__ import annotations

from typing import Self

from daop.core import FloatArray, Geometry

from .base import Predictor, State
from .data import Counts, Routing, popularity


class SharePredictor(Predictor):
    """``share_`` [total]; counts per sequence are enough to fit it."""

    share_: FloatArray

    def fit(self, data: Routing) -> Self:
        self.check_needs(data)
        return self.fit_counts(data)

    def fit_counts(self, data: Counts | Routing) -> Self:
        self.geometry_ = data.geometry
        self.share_ = popularity(data)
        return self

    def state(self) -> State:
        return State(arrays={"share": self.share_})

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.share_ = state.arrays["share"].reshape(geometry.total)
        return self
