"""MLP reuse: the small network of ``network.py``, its heads asking how soon an expert is wanted again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daop.core import FloatArray

from .base import PREDICTORS, Reuse
from .data import one_hot
from .history import Context, Past
from .network import sigmoid
from .network_predictor import NetworkPredictor

if TYPE_CHECKING:
    from .network_fit import Task

# The heads forecast the chance of a use within so many tokens.
WITHIN = (1, 2, 4, 12)
# Expected waits are those of min(wait, CAP): what lies farther off is given up all the same, and would only
# add noise to the mean. A short cut helps small pools most.
CAP = 6


def expected_wait(within: FloatArray) -> FloatArray:
    """[..., F] chances of a use within ``WITHIN`` tokens to the expected wait, cut at ``CAP``.

    The mean of a wait is the sum of the chances to wait longer than 0, 1, 2 ... tokens; chances between two
    forecasts are interpolated, those after the last stay as it.
    """
    chances = np.maximum.accumulate(within, axis=-1)
    return np.asarray(CAP - chances @ _interpolation(), dtype=np.float32)


def _interpolation() -> FloatArray:
    """[F] how many of the waits 0 .. CAP - 1 each forecast stands for; past the last it stays as it is."""
    known = (0, *WITHIN, 1 << 30)
    share = np.zeros(len(known))
    for wait in range(CAP):
        upper = int(np.searchsorted(known, wait, side="right"))
        lower = upper - 1
        right = (wait - known[lower]) / (known[upper] - known[lower])
        share[lower] += 1 - right
        share[upper] += right
    share[-2] += share[-1]
    return share[1:-1].astype(np.float32)


@PREDICTORS.register("mlp_reuse")
class MlpReuse(NetworkPredictor, Reuse):
    """Needs routing history only; cheap enough to ask after every layer."""

    memo_key = "mlp_reuse"

    def __init__(
        self,
        *,
        width: int = 96,
        epochs: int = 4,
        batch: int = 256,
        learning_rate: float = 0.003,
        weight_decay: float = 0.05,
        dropout: float = 0.1,
        max_tokens: int = 80_000,
        seed: int = 0,
    ) -> None:
        self.width = width
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.dropout = dropout
        self.max_tokens = max_tokens
        self.seed = seed

    @property
    def forecasts(self) -> int:
        return len(WITHIN)

    def task(self) -> Task:
        from .network_fit import ReuseTask

        return ReuseTask(WITHIN)

    def chances(self, context: Context) -> FloatArray:
        """[T, E of ``context.layer``, F] chance of a use within ``WITHIN`` tokens."""
        just = one_hot(context.chosen[:, context.layer], self.geometry_.total)
        span = slice(*self.geometry_.offsets[context.layer : context.layer + 2])
        return sigmoid(self.network_.logits_of_own(context, just[:, span]).transpose(0, 2, 1))

    def all_chances(self, context: Context) -> FloatArray:
        """[T, total, F] the same for every layer."""
        offsets = self.geometry_.offsets
        just = one_hot(context.chosen, self.geometry_.total)  # [T, total]
        logits = np.empty((len(just), len(WITHIN), self.geometry_.total), dtype=np.float32)
        for layer in range(self.geometry_.layers):
            context.layer = layer
            span = slice(offsets[layer], offsets[layer + 1])
            logits[:, :, span] = self.network_.logits_of_own(context, just[:, span])
        return sigmoid(logits).transpose(0, 2, 1)

    def wait(self, context: Context, after: Past) -> FloatArray:
        return expected_wait(self.all_chances(context))
