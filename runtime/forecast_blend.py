"""Makes one chance of two forecasts of a coming layer, by which has been right lately.

A gate look-ahead (``Forecast``) ranks well, but its figures are no probabilities, and how far it is to be
believed differs by model and depth; the routing so far (``ContextModel``) says something else. A logistic
regression over both learns while the run goes on, so that a forecast that is always wrong loses its say:

    logit p[e] = w . (1, logit of the routing's chance, e is among the forecast's first K, log of its score)

Pure numbers. E experts of a layer, K experts per token.
"""

from __future__ import annotations

import numpy as np

from daop.core import FloatArray, Forecast, Geometry, Step

FLOOR = 1e-3
START = (-0.9, 0.3, 3.0, 0.6)  # a gate whose first K are right four times in five
RATE = 0.15  # AdaGrad: a wrong sign is unlearnt within some twenty tokens


class ForecastBlend:
    """``lead`` layers ahead; ask ``chance`` once per layer, then tell what came with ``learn``."""

    def __init__(self, geometry: Geometry) -> None:
        self._offsets = geometry.offsets
        self._top_k = geometry.top_k
        self._asked: list[tuple[FloatArray, FloatArray] | None] = [None] * geometry.layers
        self._weights = np.asarray(START, dtype=np.float32)
        self._squares = np.ones(len(START), dtype=np.float32)

    def chance(self, forecast: Forecast, by_routing: FloatArray) -> FloatArray:
        """[E] chance that the layer's next visit uses each expert; ``by_routing`` [E]: the other opinion."""
        scores = forecast.scores
        inputs = np.zeros((len(START), len(scores)), dtype=np.float32)
        inputs[0] = 1.0
        usual = np.clip(by_routing, FLOOR, 1.0 - FLOOR)
        inputs[1] = np.log(usual / (1.0 - usual))
        first = min(self._top_k, len(scores))
        inputs[2, np.argpartition(-scores, first - 1)[:first]] = 1.0
        inputs[3] = np.log(np.clip(scores, FLOOR, 1.0))
        out: FloatArray = 1.0 / (1.0 + np.exp(-(self._weights @ inputs)))
        self._asked[forecast.layer] = inputs, out
        return out

    def learn(self, step: Step) -> None:
        """What the layer used; nothing happens if no forecast of it was asked."""
        asked, self._asked[step.layer] = self._asked[step.layer], None
        if asked is None:
            return
        inputs, expected = asked
        error = expected.copy()
        begin = self._offsets[step.layer]
        error[[flat - begin for flat in step.experts]] -= 1.0
        slope = inputs @ error
        self._squares += slope * slope
        self._weights -= RATE * slope / np.sqrt(self._squares)
