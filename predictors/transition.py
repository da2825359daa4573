"""Transition: cross-layer conditional counts, smoothed. P(expert of layer l + h | expert chosen at layer
l)."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, NextLayer, State
from .history import Context


def pair_counts(data: d.Routing, distance: int) -> list[NDArray[np.float64]]:
    """For each target layer m >= distance: [E of m - distance, E of m] tokens that chose both."""
    geometry, out = data.geometry, []
    for target in range(distance, geometry.layers):
        source = target - distance
        rows, columns = geometry.experts[source], geometry.experts[target]
        a = data.flat[:, source] - geometry.offsets[source]  # [N, K]
        b = data.flat[:, target] - geometry.offsets[target]
        known = (data.flat[:, source, 0] >= 0) & (data.flat[:, target, 0] >= 0)
        pairs = a[known][:, :, None] * columns + b[known][:, None, :]
        counts = np.bincount(pairs.ravel(), minlength=rows * columns).astype(np.float64)
        out.append(counts.reshape(rows, columns))
    return out


def conditional(
    counts: list[NDArray[np.float64]], data: d.Routing, distance: int, smoothing: float
) -> list[FloatArray]:
    """P(target chosen | source chosen), drawn towards the target's popularity by ``smoothing`` tokens."""
    geometry, popular, out = data.geometry, d.popularity(data), []
    for i, table in enumerate(counts):
        target = i + distance
        base = popular[geometry.offsets[target] : geometry.offsets[target + 1]]
        seen = table.sum(axis=1, keepdims=True) / geometry.top_k
        out.append(((table + smoothing * base) / (seen + smoothing)).astype(np.float32))
    return out


@PREDICTORS.register("transition")
class Transition(NextLayer):
    """Mean of P(e | c) over the experts c that the token chose at the layer at hand."""

    def __init__(self, *, smoothing: float = 8.0, horizons: int = 4) -> None:
        self.smoothing = smoothing
        self.horizons = horizons

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = data.geometry
        self.tables_ = {
            h: conditional(pair_counts(data, h), data, h, self.smoothing)
            for h in range(1, min(self.horizons, data.geometry.layers - 1) + 1)
        }
        return self

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        table = self.tables_[horizon][context.layer]
        chosen = context.chosen[:, context.layer] - self.geometry_.offsets[context.layer]
        known = chosen >= 0
        if known.all():
            return np.asarray(table[chosen].mean(axis=1), dtype=np.float32)
        picked = table[np.maximum(chosen, 0)] * known[:, :, None]
        return np.asarray(picked.sum(axis=1) / np.maximum(known.sum(axis=1), 1)[:, None], dtype=np.float32)

    def state(self) -> State:
        return State(
            arrays={f"{h}.{i}": t for h, tables in self.tables_.items() for i, t in enumerate(tables)}
        )

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.tables_ = {
            h: [
                state.arrays[f"{h}.{i}"].reshape(geometry.experts[i], geometry.experts[i + h])
                for i in range(geometry.layers - h)
            ]
            for h in range(1, min(self.horizons, geometry.layers - 1) + 1)
        }
        return self
