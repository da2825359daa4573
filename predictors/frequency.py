"""Frequency: an expert that is used every n-th token is expected in n tokens. LFU as a forecast."""

from __future__ import annotations

from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, Reuse, State
from .history import HALF_LIVES, Context, Past


@PREDICTORS.register("frequency")
class Frequency(Reuse):
    """Inverse of the share of recent tokens (half-life ``half_life``) that used the expert, mixed with its
    share in training as if that were ``prior`` further tokens."""

    def __init__(self, *, half_life: int = 32, prior: float = 4.0) -> None:
        self.half_life = half_life
        self.prior = prior

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = data.geometry
        self.share_ = d.popularity(data)
        return self

    def fit_counts(self, data: d.Counts) -> Self:
        self.geometry_ = data.geometry
        self.share_ = d.popularity(data)
        return self

    def wait(self, context: Context, after: Past) -> FloatArray:
        window = HALF_LIVES.index(self.half_life)
        recent = after.frequency[:, window]
        mass = np.minimum(after.length, self.half_life * 1.44)[:, None]
        share = (recent * mass + self.prior * self.share_) / (mass + self.prior)
        return np.asarray(1.0 / np.maximum(share, 1e-3), dtype=np.float32)

    def state(self) -> State:
        return State(arrays={"share": self.share_})

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.share_ = state.arrays["share"].reshape(geometry.total)
        if self.half_life not in HALF_LIVES:
            raise ValueError(f"half_life must be one of {HALF_LIVES}")
        return self
