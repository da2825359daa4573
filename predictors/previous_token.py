"""Previous token: a token wants what the one before it wanted, and then what the recent ones wanted."""

from __future__ import annotations

from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry, IntArray

from . import data as d
from .base import PREDICTORS, NextLayer, State
from .history import HALF_LIVES, Context, contexts

_RECENT = HALF_LIVES.index(8)
_BINS = 16


@PREDICTORS.register("previous_token")
class PreviousToken(NextLayer):
    """Chance of a choice, by whether the previous token made it and how frequent it lately was.

    The two are crossed in a table of 2 x 16 cells per layer, so the scores are calibrated.
    """

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = geometry = data.geometry
        hits = np.zeros((geometry.layers, 2 * _BINS))
        seen = np.zeros((geometry.layers, 2 * _BINS))
        for rows, context in contexts(data):
            cells = self._cells(context)  # [n, total]
            chosen = d.one_hot(data.flat[rows], geometry.total)
            for layer in range(geometry.layers):
                a, b = geometry.offsets[layer], geometry.offsets[layer + 1]
                flat = cells[:, a:b].ravel()
                seen[layer] += np.bincount(flat, minlength=2 * _BINS)
                hits[layer] += np.bincount(flat, weights=chosen[:, a:b].ravel(), minlength=2 * _BINS)
        prior = np.asarray([geometry.top_k / e for e in geometry.experts])[:, None]
        self.table_ = ((hits + prior) / (seen + 1.0)).astype(np.float32)
        return self

    def _cells(self, context: Context, span: slice = slice(None)) -> IntArray:
        """[n, span] table cell of each expert."""
        since, frequency = context.past.since[:, span], context.past.frequency[:, _RECENT, span]
        # finer towards 0, where most experts are
        level = np.minimum((np.sqrt(frequency) * _BINS).astype(np.int32), _BINS - 1)
        return np.asarray(level + _BINS * (since == 0), dtype=np.int32)

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        target, offsets = context.layer + horizon, self.geometry_.offsets
        span = slice(offsets[target], offsets[target + 1])
        # the fraction keeps experts of one cell in order of frequency without leaving the cell's value
        nudge = 1e-4 * context.past.frequency[:, _RECENT, span]
        chance = self.table_[target][self._cells(context, span)]
        return np.asarray(np.minimum(chance + nudge, 1.0), dtype=np.float32)

    def state(self) -> State:
        return State(arrays={"table": self.table_})

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.table_ = state.arrays["table"].reshape(geometry.layers, 2 * _BINS)
        return self
