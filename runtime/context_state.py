"""The running side of ``ContextModel``: what was used lately, and what that says about what comes.

``chance`` [L, E]: probability that the next visit of the layer uses the expert, kept up to date.
``rate`` [L, E]: how often it is used per visit in the longer run.
Both blend a sharp forecast with the plain frequency, by how well either has done lately.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, Step

from .context_model import DECAYS, FLOOR, LAGS, ContextModel, padded
from .native_context import NativeContext, load_context

PRIOR = 200.0  # tokens that a profile's frequency counts for
MEMORY = 0.98  # of the running log losses
SHARPNESS = 160.0  # how fast a better log loss wins the blend
CERTAIN = 0.999  # trust from which the frequency has no say
CHECK_EVERY = 7  # steps between two comparisons of the forecasts
HALF = len(DECAYS)


class ContextState:
    """Holds the model's inputs; ``absorb`` is called once per layer and forward pass.

    ``targets[l]`` [R]: the layers whose ``chance`` the step of layer ``l`` renews, ``leads`` [R] layers on.
    ``native`` does the arithmetic where the compiled library is there; else it is numpy's.
    """

    def __init__(
        self,
        model: ContextModel,
        geometry: Geometry,
        frequency: FloatArray | None,
        *,
        use_native: bool = True,
    ) -> None:
        usual = padded(geometry, frequency)
        weight = 8.0 if frequency is None else PRIOR
        self.layers, self.experts = layers, experts = usual.shape
        self._offsets = geometry.offsets
        self._counts = usual * np.float32(weight)
        self._seen = np.full(layers, weight, dtype=np.float64)
        self.usual = usual.copy()
        self.chance = usual.copy()
        self.rate = usual.copy()
        self.trust = 0.5 if model.table.any() else 0.0
        self._losses = [0.0, 0.0]  # running log loss of the sharp forecast and of the frequency
        self._age = 0
        self._lay_out(model)
        self._hot = np.zeros((layers, experts), dtype=np.float32)
        self._chosen: list[list[int]] = [[] for _ in range(layers)]
        self._features = np.empty((layers, 2 * HALF, experts), dtype=np.float32)
        self._averages, self._logarithms = list(self._features[:, :HALF]), list(self._features[:, HALF:])
        self._features[:, :HALF] = usual[:, None]
        self._features[:, HALF:] = np.log(np.maximum(self._features[:, :HALF], FLOOR))
        self._decay = np.asarray(DECAYS, dtype=np.float32)[:, None]
        self._fresh = 1 - self._decay
        self._expected = self.chance.copy()  # the sharp forecast for each layer's next visit
        self.native = self._make_native() if use_native else None

    def _lay_out(self, model: ContextModel) -> None:
        """The model by source layer, so that one product serves all leads of a step."""
        layers = np.arange(self.layers)[:, None]
        targets = (layers + np.asarray(model.leads)) % self.layers  # [L, R]
        which = np.arange(len(model.leads))
        self._each = which[:, None]
        self._targets = np.ascontiguousarray(targets, dtype=np.int64)
        self.targets = list(self._targets)
        self.leads = np.asarray(model.leads)
        table, bias = model.table[which, targets], model.bias[which, targets]
        self._table = -np.concatenate([table, bias[:, :, None]], axis=2)  # [L, R, X + 1, E], for exp(-z)
        self._gain = -np.ascontiguousarray(model.gain[which, targets])[:, :, None]  # [L, R, 1, F]

    def _make_native(self) -> NativeContext | None:
        library = load_context()
        if library is None:
            return None
        arrays = {
            "targets": self._targets,
            "table": self._table,
            "gain": self._gain,
            "decay": self._decay,
            "features": self._features,
            "seen": self._seen,
            "counts": self._counts,
            "usual": self.usual,
            "rate": self.rate,
            "chance": self.chance,
            "expected": self._expected,
            "hot": self._hot,
        }
        sizes = (self.layers, self.experts, len(self.leads), LAGS, HALF)
        return NativeContext(library, sizes, arrays)

    def absorb(self, step: Step) -> None:
        """Take in a step's routing."""
        layer = step.layer
        begin = self._offsets[layer]
        chosen = [flat - begin for flat in step.experts]
        self._age += 1
        if self._age % CHECK_EVERY == 0 and step.rows == 1:
            self._judge(layer, chosen)
        if self.native is not None:
            shares = None if step.rows == 1 else _shares(step)
            self.native.absorb(layer, chosen, shares, step.rows, self.trust)
            return
        self._learn(layer, chosen, step)
        self._forecast(layer, step.rows)

    def glance(self, step: Step) -> None:
        """Take in a step's routing without forecasting anew: a third of numpy's cost of ``absorb``."""
        layer = step.layer
        begin = self._offsets[layer]
        self._learn(layer, [flat - begin for flat in step.experts], step)
        averages = self._averages[layer]
        np.add(
            averages[0], averages[1], out=self.chance[layer]
        )  # what a whole turn's forecast would say, roughly
        self.chance[layer] *= 0.5

    def _learn(self, layer: int, chosen: list[int], step: Step) -> None:
        hot, counts = self._hot[layer], self._counts[layer]
        hot.fill(0.0)
        self._chosen[layer] = chosen
        if step.rows == 1:
            hot[chosen] = 1.0
        else:
            hot[chosen] = _shares(step)
        averages, logarithms = self._averages[layer], self._logarithms[layer]
        averages *= self._decay
        averages += self._fresh * hot
        np.maximum(averages, FLOOR, out=logarithms)
        np.log(logarithms, out=logarithms)
        counts += hot
        self._seen[layer] += 1.0
        usual, rate = self.usual[layer], self.rate[layer]
        np.multiply(counts, 1.0 / self._seen[layer], out=usual)
        np.add(averages[2], averages[3], out=rate)
        rate *= 0.5 * self.trust
        if self.trust < CERTAIN:
            rate += (1.0 - self.trust) * usual

    def _forecast(self, layer: int, rows: int) -> None:
        targets = self.targets[layer]
        sharp: FloatArray = np.matmul(self._gain[layer], self._features[targets])[:, 0]  # [R, E], minus z
        sharp += self._looked_up(layer, targets) if rows == 1 else self._multiplied(layer, targets)
        np.exp(sharp, out=sharp)
        sharp += 1.0
        np.reciprocal(sharp, out=sharp)
        self._expected[targets] = sharp
        if self.trust < CERTAIN:
            sharp *= self.trust
            sharp += (1 - self.trust) * self.usual[targets]
        if rows > 1:
            sharp = 1.0 - (1.0 - sharp) ** rows
        self.chance[targets] = sharp

    def _looked_up(self, layer: int, targets: NDArray[Any]) -> FloatArray:
        """[R, E] table rows of the experts that were chosen, summed: a single token's case."""
        experts, chosen = self.experts, self._chosen
        recent = [*chosen[layer]]
        for lag in range(1, LAGS):
            recent += [lag * experts + c for c in chosen[(layer - lag) % self.layers]]
        recent.append((LAGS + 1) * experts)  # the row of the bias
        rows = [[*recent, *[LAGS * experts + c for c in chosen[target]]] for target in targets.tolist()]
        width = len(rows[0])
        if any(len(row) != width for row in rows):  # the last pass had several tokens
            return self._multiplied(layer, targets)
        found: FloatArray = self._table[layer][self._each, rows].sum(axis=1)
        return found

    def _multiplied(self, layer: int, targets: NDArray[Any]) -> FloatArray:
        """[R, E] the same as a product with the shares of tokens that chose each expert."""
        recent = np.concatenate([self._hot[(layer - lag) % self.layers] for lag in range(LAGS)])
        inputs = np.concatenate([np.tile(recent, (len(targets), 1)), self._hot[targets]], axis=1)
        table = self._table[layer]
        product: FloatArray = np.matmul(inputs[:, None], table[:, :-1])[:, 0] + table[:, -1]
        return product

    def _judge(self, layer: int, chosen: list[int]) -> None:
        """Compare what was expected of this layer with what came, by log loss per expert."""
        for which, guess in enumerate((self._expected[layer], self.usual[layer])):
            loss = self.native.loss(guess, chosen) if self.native is not None else _log_loss(guess, chosen)
            self._losses[which] += (1 - MEMORY) * (loss - self._losses[which])
        better = min(1.0, max(-1.0, self._losses[1] - self._losses[0]))
        self.trust = 1.0 / (1.0 + math.exp(-SHARPNESS * better))


def _shares(step: Step) -> FloatArray:
    """Of the rows, how many chose each of the step's experts."""
    shares: FloatArray = np.asarray(step.tokens, dtype=np.float32) / np.float32(step.rows)
    return shares


def _log_loss(guess: FloatArray, chosen: list[int]) -> float:
    """Mean over the experts of the log loss of ``guess`` [E]."""
    clipped = np.clip(guess, FLOOR, 1 - FLOOR)
    absent = np.log1p(-clipped)
    return float(absent[chosen].sum() - absent.sum() - np.log(clipped[chosen]).sum()) / len(guess)
