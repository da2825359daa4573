"""LightGBM reuse: the wait for every expert's next use, from recency, frequencies, router weight, layer and
position.

One regression over (token, expert) pairs, its target the wait cut at ``CAP`` tokens, so that the mean it
learns is an expected wait. Beside what the expert's own past says, it is shown the chances of a use within
a few tokens that the small network of ``mlp_reuse`` reads from the whole routing; that network is fitted on
other sequences than the trees, or they would trust it too much.
"""

from __future__ import annotations

import logging
from typing import Any, Self

import numpy as np

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, Reuse, State
from .history import HALF_LIVES, Context, Past, walk
from .mlp_reuse import CAP, WITHIN, MlpReuse
from .trees import grow, read

log = logging.getLogger(__name__)

FEATURES = (
    "since",
    *(f"frequency_{h}" for h in HALF_LIVES),
    "weight",
    "popularity",
    "layer",
    "length",
    *(f"within_{w}" for w in WITHIN),
)


@PREDICTORS.register("lightgbm_reuse")
class LightgbmReuse(Reuse):
    """See the module's docstring. ``trees`` x ``leaves`` is what a forecast costs."""

    def __init__(
        self,
        *,
        trees: int = 48,
        leaves: int = 31,
        learning_rate: float = 0.12,
        pairs: int = 2_500_000,
        network: dict[str, Any] | None = None,
        network_share: float = 0.75,
        seed: int = 0,
    ) -> None:
        self.trees = trees
        self.leaves = leaves
        self.learning_rate = learning_rate
        self.pairs = pairs
        self.network = network
        self.network_share = network_share
        self.seed = seed

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = data.geometry
        self.popularity_ = d.popularity(data)
        order = np.random.default_rng(self.seed).permutation(data.sequences)
        cut = max(1, round(self.network_share * data.sequences))
        rest = order[cut:] if cut < data.sequences else order  # a single sequence serves both
        self.network_ = MlpReuse(**{"seed": self.seed, **(self.network or {})}).fit(data.select(order[:cut]))
        self._grow(data.select(rest))
        return self

    def update(self, data: d.Routing) -> Self:
        self.network_.update(data)
        self._grow(data)
        return self

    def _grow(self, data: d.Routing) -> None:
        x, y = self._pairs(data)
        log.info("lightgbm_reuse: %d trees on %d pairs", self.trees, len(x))
        self.text_ = grow(
            x,
            y,
            features=FEATURES,
            objective="regression",
            trees=self.trees,
            leaves=self.leaves,
            learning_rate=self.learning_rate,
            least=50,
            seed=self.seed,
        )
        self._load()

    def _load(self) -> None:
        self._booster = read(self.text_, FEATURES)

    def _pairs(self, data: d.Routing) -> tuple[FloatArray, FloatArray]:
        """A random sample of (token, expert) pairs whose wait is known."""
        total, rng = data.geometry.total, np.random.default_rng(self.seed)
        waits = d.next_use(data, CAP)
        share = min(1.0, self.pairs / max(1, len(data) * total))
        rows_x, rows_y = [], []
        for rows, before, after in walk(data):
            context = Context(
                geometry=data.geometry, layer=0, chosen=data.flat[rows], past=before, weights=None
            )
            wait = waits[rows]
            picked = (wait > 0) & (rng.random(wait.shape, dtype=np.float32) < share)
            rows_x.append(self._features(context, after)[picked])
            rows_y.append(wait[picked].astype(np.float32))
        return np.concatenate(rows_x), np.concatenate(rows_y)

    def _features(self, context: Context, after: Past) -> FloatArray:
        """[T, total, features] float32."""
        n, total = after.since.shape
        x = np.empty((n, total, len(FEATURES)), dtype=np.float32)
        windows = len(HALF_LIVES)
        x[:, :, 0] = after.since
        x[:, :, 1 : 1 + windows] = after.frequency.transpose(0, 2, 1)
        x[:, :, 1 + windows] = after.weight
        x[:, :, 2 + windows] = self.popularity_
        x[:, :, 3 + windows] = self.geometry_.layer_of
        x[:, :, 4 + windows] = after.length[:, None]
        x[:, :, 5 + windows :] = self.network_.all_chances(context)
        return x

    def wait(self, context: Context, after: Past) -> FloatArray:
        x = self._features(context, after)
        flat = x.reshape(-1, len(FEATURES))
        out = self._booster.predict(flat, num_threads=1).reshape(x.shape[:2])
        return np.asarray(np.maximum(out, 1.0), dtype=np.float32)

    def state(self) -> State:
        inner = self.network_.state().arrays
        return State(
            arrays={"popularity": self.popularity_, **{f"network.{k}": v for k, v in inner.items()}},
            values={"network": self.network_.parameters()},
            texts={"wait": self.text_},
        )

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.popularity_ = state.arrays["popularity"].reshape(geometry.total)
        arrays = {k.removeprefix("network."): v for k, v in state.arrays.items() if k.startswith("network.")}
        self.network_ = MlpReuse(**state.values["network"]).restore(State(arrays=arrays), geometry)
        self.text_ = state.texts["wait"]
        self._load()
        return self
