"""The running side of ``ContextModel``: what was used lately, and what that says about what comes.

``chance`` [L, E]: probability that the next visit of the layer uses the expert, kept up to date.
``rate`` [L, E]: how often it is used per visit in the longer run.
Both blend a sharp forecast with the plain frequency, by how well either has done lately.
"""

from __future__ import annotations

import math

import numpy as np

from daop.core import FloatArray, Geometry, Step

from .context_model import DECAYS, FLOOR, LAGS, ContextModel, padded

PRIOR = 200.0  # tokens that a profile's frequency counts for
MEMORY = 0.98  # of the running log losses
SHARPNESS = 160.0  # how fast a better log loss wins the blend
CHECK_EVERY = 4  # steps between two comparisons of the forecasts
HALF = len(DECAYS)


class ContextState:
    """Holds the model's inputs; ``absorb`` is called once per layer and forward pass."""

    def __init__(self, model: ContextModel, geometry: Geometry, frequency: FloatArray | None) -> None:
        usual = padded(geometry, frequency)
        weight = 8.0 if frequency is None else PRIOR
        self.layers, self.experts = layers, experts = usual.shape
        self._offsets = geometry.offsets
        self._counts = usual * np.float32(weight)
        self._seen = [weight] * layers
        self.usual = usual.copy()
        self.chance = usual.copy()
        self.rate = usual.copy()
        self.trust = 0.5 if model.table.any() else 0.0
        self._losses = [0.0, 0.0]  # running log loss of the sharp forecast and of the frequency
        self._age = 0
        self._lay_out(model)
        self._hot = np.zeros((layers, experts), dtype=np.float32)
        self._inputs = np.zeros((len(model.leads), 1, (LAGS + 1) * experts), dtype=np.float32)
        self._averages = np.repeat(usual[:, None], HALF, axis=1)
        self._features = np.empty((layers, 2 * HALF, experts), dtype=np.float32)
        self._features[:, :HALF] = self._averages
        self._features[:, HALF:] = np.log(np.maximum(self._averages, FLOOR))
        self._decay = np.asarray(DECAYS, dtype=np.float32)[:, None]
        self._fresh = 1 - self._decay
        self._expected = self.chance.copy()  # the sharp forecast for each layer's next visit

    def _lay_out(self, model: ContextModel) -> None:
        """The model by source layer, so that one product serves all leads of a step."""
        layers = np.arange(self.layers)[:, None]
        targets = (layers + np.asarray(model.leads)) % self.layers  # [L, R]
        which = np.arange(len(model.leads))
        self._targets = list(targets)
        self.changed = [sorted({layer, *row}) for layer, row in enumerate(targets.tolist())]
        self._table = np.ascontiguousarray(model.table[which, targets])  # [L, R, X, E]
        self._bias = np.ascontiguousarray(model.bias[which, targets])[:, :, None]  # [L, R, 1, E]
        self._gain = np.ascontiguousarray(model.gain[which, targets])[:, :, None]  # [L, R, 1, F]

    def absorb(self, step: Step) -> None:
        """Take in a step's routing; ``changed[step.layer]`` are the layers whose figures it changes."""
        layer = step.layer
        begin = self._offsets[layer]
        chosen = [flat - begin for flat in step.experts]
        self._age += 1
        if self._age % CHECK_EVERY == 0 and step.rows == 1:
            self._judge(layer, chosen)
        self._learn(layer, chosen, step)
        self._forecast(layer, step.rows)

    def _learn(self, layer: int, chosen: list[int], step: Step) -> None:
        hot, counts = self._hot[layer], self._counts[layer]
        hot.fill(0.0)
        if step.rows == 1:
            hot[chosen] = 1.0
        else:
            hot[chosen] = np.asarray(step.tokens, dtype=np.float32) / np.float32(step.rows)
        averages, features = self._averages[layer], self._features[layer]
        averages *= self._decay
        averages += self._fresh * hot
        features[:HALF] = averages
        np.maximum(averages, FLOOR, out=features[HALF:])
        np.log(features[HALF:], out=features[HALF:])
        counts += hot
        self._seen[layer] += 1.0
        usual, rate = self.usual[layer], self.rate[layer]
        np.multiply(counts, 1.0 / self._seen[layer], out=usual)
        np.multiply(usual, 1.0 - self.trust, out=rate)
        rate += (0.5 * self.trust) * (averages[2] + averages[3])

    def _forecast(self, layer: int, rows: int) -> None:
        inputs, experts, targets = self._inputs, self.experts, self._targets[layer]
        recent = inputs[:, 0]
        recent[:, experts : LAGS * experts] = recent[:, : (LAGS - 1) * experts]
        recent[:, :experts] = self._hot[layer]
        recent[:, LAGS * experts :] = self._hot[targets]
        z = np.matmul(inputs, self._table[layer])
        z += self._bias[layer]
        z += np.matmul(self._gain[layer], self._features[targets])
        sharp: FloatArray = z[:, 0]
        np.negative(sharp, out=sharp)
        np.exp(sharp, out=sharp)
        sharp += 1.0
        np.reciprocal(sharp, out=sharp)
        self._expected[targets] = sharp
        if self.trust < 0.999:
            sharp *= self.trust
            sharp += (1 - self.trust) * self.usual[targets]
        if rows > 1:
            sharp = 1.0 - (1.0 - sharp) ** rows
        self.chance[targets] = sharp

    def _judge(self, layer: int, chosen: list[int]) -> None:
        """Compare what was expected of this layer with what came, by log loss per expert."""
        for which, guess in enumerate((self._expected[layer], self.usual[layer])):
            clipped = np.clip(guess, FLOOR, 1 - FLOOR)
            absent = np.log1p(-clipped)
            loss = float(absent[chosen].sum() - absent.sum() - np.log(clipped[chosen]).sum()) / self.experts
            self._losses[which] += (1 - MEMORY) * (loss - self._losses[which])
        better = min(1.0, max(-1.0, self._losses[1] - self._losses[0]))
        self.trust = 1.0 / (1.0 + math.exp(-SHARPNESS * better))
