"""Token table: what the same input token chose before, drawn towards popularity while it is rare."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, IntArray

from . import data as d
from .base import PREDICTORS, Needs, NextLayer, State
from .history import Context


@PREDICTORS.register("token_table")
class TokenTable(NextLayer):
    """P(expert | input token). Needs token ids; tokens seen fewer than ``min_count`` times share a row."""

    needs = Needs(token_ids=True)

    def __init__(self, *, smoothing: float = 2.0, min_count: int = 2, max_tokens: int = 50_000) -> None:
        self.smoothing = smoothing
        self.min_count = min_count
        self.max_tokens = max_tokens

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        assert data.token_ids is not None
        total = data.geometry.total
        kinds, counts = np.unique(data.token_ids, return_counts=True)
        common = np.argsort(-counts, kind="stable")[: self.max_tokens]
        kinds = np.sort(kinds[common[counts[common] >= self.min_count]])
        row = _rows(kinds, data.token_ids)
        chosen = np.zeros((len(kinds) + 1) * total, dtype=np.float64)
        cells = row[:, None, None] * total + data.flat
        chosen = np.bincount(cells[data.flat >= 0].ravel(), minlength=len(chosen)).astype(np.float64)
        seen = np.bincount(row, minlength=len(kinds) + 1)[:, None]
        base = d.popularity(data)
        table = (chosen.reshape(len(kinds) + 1, total) + self.smoothing * base) / (seen + self.smoothing)
        table[-1] = base
        self.geometry_ = data.geometry
        self.kinds_ = kinds.astype(np.int32)
        self.table_ = table.astype(np.float16)
        return self

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        offsets, target = self.geometry_.offsets, context.layer + horizon
        tokens = context.token_ids
        unknown = np.full(len(context.chosen), len(self.kinds_))
        row = unknown if tokens is None else _rows(self.kinds_, tokens)
        return np.asarray(self.table_[row, offsets[target] : offsets[target + 1]], dtype=np.float32)

    def state(self) -> State:
        return State(arrays={"kinds": self.kinds_, "table": self.table_})

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.kinds_ = state.arrays["kinds"]
        self.table_ = state.arrays["table"].reshape(len(self.kinds_) + 1, geometry.total)
        return self


def _rows(kinds: IntArray, tokens: IntArray) -> NDArray[np.intp]:
    """The table row of each token; the last row for tokens it does not know."""
    at = np.searchsorted(kinds, tokens)
    inside = np.minimum(at, max(len(kinds) - 1, 0))
    known = (at < len(kinds)) & (kinds[inside] == tokens) if len(kinds) else np.zeros(len(tokens), bool)
    return np.where(known, at, len(kinds))
