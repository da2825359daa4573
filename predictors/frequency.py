"""Frequency: an expert that is used every n-th token is expected in n tokens. LFU as a forecast."""

from __future__ import annotations

from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry

from .base import PREDICTORS, Reuse, State
from .history import HALF_LIVES, Context, Past
from .share_predictor import SharePredictor


@PREDICTORS.register("frequency")
class Frequency(SharePredictor, Reuse):
    """Inverse of the share of recent tokens (half-life ``half_life``) that used the expert, mixed with its
    share in training as if that were ``prior`` further tokens."""

    def __init__(self, *, half_life: int = 32, prior: float = 4.0) -> None:
        self.half_life = half_life
        self.prior = prior

    def wait(self, context: Context, after: Past) -> FloatArray:
        window = HALF_LIVES.index(self.half_life)
        recent = after.frequency[:, window]
        mass = np.minimum(after.length, self.half_life * 1.44)[:, None]
        share = (recent * mass + self.prior * self.share_) / (mass + self.prior)
        return np.asarray(1.0 / np.maximum(share, 1e-3), dtype=np.float32)

    def restore(self, state: State, geometry: Geometry) -> Self:
        if self.half_life not in HALF_LIVES:
            raise ValueError(f"half_life must be one of {HALF_LIVES}")
        return super().restore(state, geometry)
