"""Popularity: every token wants what most tokens wanted. The floor under every other predictor."""

from __future__ import annotations

import numpy as np

from daop.core import FloatArray

from .base import PREDICTORS, NextLayer
from .history import Context
from .share_predictor import SharePredictor


@PREDICTORS.register("popularity")
class Popularity(SharePredictor, NextLayer):
    """Share of training tokens that chose each expert."""

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        offsets, target = self.geometry_.offsets, context.layer + horizon
        share = self.share_[offsets[target] : offsets[target + 1]]
        return np.broadcast_to(share, (len(context.chosen), len(share)))
