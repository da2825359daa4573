"""What ``logistic`` and ``lightgbm`` are shown of each expert of a coming layer: the cheap predictors'
scores.

Transition counts from the last three layers, as conditional chances and as log-odds against popularity;
decayed frequencies and recency in this sequence; what the previous token chose; popularity; router weights.
Shapes: T tokens, E experts of the target layer, F features.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry

from . import data as d
from .base import State
from .history import HALF_LIVES, Context, contexts
from .transition import conditional, pair_counts

LOOK_BACK = 3
NAMES = (
    *(f"transition_{i}" for i in range(LOOK_BACK)),
    *(f"log_odds_{i}" for i in range(LOOK_BACK)),
    "first_choice",
    "weighted",
    *(f"frequency_{h}" for h in HALF_LIVES),
    "since",
    "previous",
    "popularity",
    "agreement",
    "layer",
    "length",
)


class StackFeatures:
    """Tables learned from routing, and the features made of them. ``horizons`` layers ahead."""

    def __init__(self, horizons: int, smoothing: float = 8.0) -> None:
        self.horizons = horizons
        self.smoothing = smoothing

    def fit(self, data: d.Routing) -> StackFeatures:
        self.geometry = data.geometry
        self.popularity = d.popularity(data)
        farthest = min(self.horizons + LOOK_BACK - 1, data.geometry.layers - 1)
        self.tables = {
            distance: conditional(pair_counts(data, distance), data, distance, self.smoothing)
            for distance in range(1, farthest + 1)
        }
        self._derive()
        return self

    def _derive(self) -> None:
        odds = np.log(self.popularity / (1 - np.minimum(self.popularity, 0.999)))
        offsets = self.geometry.offsets
        self._log_odds = {
            distance: [
                np.log(t / (1 - np.minimum(t, 0.999)))
                - odds[offsets[i + distance] : offsets[i + distance + 1]]
                for i, t in enumerate(tables)
            ]
            for distance, tables in self.tables.items()
        }

    def build(self, context: Context, horizon: int) -> FloatArray:
        """[T, E, F] for the experts of layer ``context.layer + horizon``."""
        geometry, target = self.geometry, context.layer + horizon
        span = slice(geometry.offsets[target], geometry.offsets[target + 1])
        n, experts, past = len(context.chosen), geometry.experts[target], context.past
        x = np.zeros((n, experts, len(NAMES)), dtype=np.float32)
        for back in range(LOOK_BACK):
            source, distance = context.layer - back, horizon + back
            if source < 0:
                x[:, :, back] = self.popularity[span]
                continue
            local = context.chosen[:, source] - geometry.offsets[source]
            known = (local >= 0)[:, :, None]
            rows = np.maximum(local, 0)
            chances = self.tables[distance][source][rows] * known  # [T, K, E]
            x[:, :, back] = chances.sum(axis=1) / geometry.top_k
            x[:, :, LOOK_BACK + back] = (self._log_odds[distance][source][rows] * known).sum(axis=1)
            if back == 0:
                x[:, :, 2 * LOOK_BACK] = chances[:, 0]
                x[:, :, 2 * LOOK_BACK + 1] = self._weighted(context, chances)
        column = 2 * LOOK_BACK + 2
        x[:, :, column : column + len(HALF_LIVES)] = past.frequency[:, :, span].transpose(0, 2, 1)
        column += len(HALF_LIVES)
        x[:, :, column] = np.minimum(past.since[:, span], 128)
        x[:, :, column + 1] = past.since[:, span] == 0
        x[:, :, column + 2] = self.popularity[span]
        x[:, :, column + 3] = self._agreement(context)[:, None]
        x[:, :, column + 4] = target
        x[:, :, column + 5] = np.minimum(past.length, 256)[:, None]
        return x

    def _weighted(self, context: Context, chances: FloatArray) -> FloatArray:
        """[T, E] the layer's transition chances by router weight; by rank where weights are not known."""
        weights = np.linspace(1.3, 0.7, self.geometry.top_k, dtype=np.float32)[None]
        if context.weights is not None:
            weights = np.asarray(context.weights[:, context.layer], dtype=np.float32)
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-6) * self.geometry.top_k
        return np.asarray((chances * weights[:, :, None]).sum(axis=1) / self.geometry.top_k, dtype=np.float32)

    def _agreement(self, context: Context) -> FloatArray:
        """[T] share of the choices so far that the previous token made too."""
        chosen = context.chosen[:, : context.layer + 1].reshape(len(context.chosen), -1)
        since = np.take_along_axis(context.past.since, np.maximum(chosen, 0), axis=1)
        return np.asarray(((since == 0) & (chosen >= 0)).mean(axis=1), dtype=np.float32)

    def sample(
        self, data: d.Routing, horizon: int, pairs: int, seed: int
    ) -> tuple[FloatArray, NDArray[np.float32]]:
        """About ``pairs`` (token, expert) pairs over all layers: features [n, F], chosen or not [n]."""
        geometry, rng = self.geometry, np.random.default_rng(seed)
        per_token = sum(geometry.experts[horizon:])
        share = min(1.0, pairs / max(1, len(data) * per_token))
        xs, ys = [], []
        for rows, context in contexts(data, 128):
            flat = data.flat[rows]
            for layer in range(geometry.layers - horizon):
                picked = np.flatnonzero(rng.random(len(flat)) < share)  # a token's experts stay together
                if not len(picked):
                    continue
                target, experts = layer + horizon, geometry.experts[layer + horizon]
                part = Context(
                    geometry=geometry,
                    layer=layer,
                    chosen=context.chosen[picked],
                    past=context.past.rows(picked),
                    weights=None if context.weights is None else context.weights[picked],
                )
                local = flat[picked, target] - geometry.offsets[target]
                xs.append(self.build(part, horizon).reshape(-1, len(NAMES)))
                ys.append((local[:, :, None] == np.arange(experts)).any(axis=1).astype(np.float32).ravel())
        if not xs:
            return np.zeros((0, len(NAMES)), np.float32), np.zeros(0, np.float32)
        return np.concatenate(xs), np.concatenate(ys)

    def state(self) -> State:
        arrays = {f"{k}.{i}": t for k, tables in self.tables.items() for i, t in enumerate(tables)}
        return State(arrays={"popularity": self.popularity, **arrays})

    def restore(self, state: State, geometry: Geometry) -> StackFeatures:
        self.geometry = geometry
        self.popularity = state.arrays["popularity"].reshape(geometry.total)
        farthest = min(self.horizons + LOOK_BACK - 1, geometry.layers - 1)
        self.tables = {
            distance: [
                state.arrays[f"{distance}.{i}"].reshape(geometry.experts[i], geometry.experts[i + distance])
                for i in range(geometry.layers - distance)
            ]
            for distance in range(1, farthest + 1)
        }
        self._derive()
        return self
