"""The running side of ``ContextModel``: what was used lately, and what that says about what comes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, Step

from .context_model import DECAYS, FLOOR, LAGS, ContextModel
from .native_context import NativeContext, load_context
from .running_forecast import RunningForecast

HALF = len(DECAYS)


class ContextState(RunningForecast):
    """Holds the model's inputs."""

    source = "context model"

    def __init__(
        self,
        model: ContextModel,
        geometry: Geometry,
        frequency: FloatArray | None,
        *,
        use_native: bool = True,
    ) -> None:
        super().__init__(geometry, frequency, model.leads, 0.5 if model.table.any() else 0.0)
        layers, experts = self.layers, self.experts
        self._lay_out(model)
        self._chosen: list[list[int]] = [[] for _ in range(layers)]
        self._features = np.empty((layers, 2 * HALF, experts), dtype=np.float32)
        self._averages, self._logarithms = list(self._features[:, :HALF]), list(self._features[:, HALF:])
        self._features[:, :HALF] = self.usual[:, None]
        self._features[:, HALF:] = np.log(np.maximum(self._features[:, :HALF], FLOOR))
        self._decay = np.asarray(DECAYS, dtype=np.float32)[:, None]
        self._fresh = 1 - self._decay
        self.native = self._make_native() if use_native else None

    def _lay_out(self, model: ContextModel) -> None:
        """The model by source layer, so that one product serves all leads of a step."""
        which = np.arange(len(model.leads))
        self._each = which[:, None]
        table, bias = model.table[which, self._targets], model.bias[which, self._targets]
        self._table = -np.concatenate([table, bias[:, :, None]], axis=2)  # [L, R, X + 1, E], for exp(-z)
        self._gain = -np.ascontiguousarray(model.gain[which, self._targets])[:, :, None]  # [L, R, 1, F]

    def _make_native(self) -> NativeContext | None:
        library = load_context()
        if library is None:
            return None
        arrays = {
            **self._shared(),
            "table": self._table,
            "gain": self._gain,
            "decay": self._decay,
            "features": self._features,
        }
        sizes = (self.layers, self.experts, len(self.leads), LAGS, HALF)
        return NativeContext(library, sizes, arrays)

    def _absorb(self, layer: int, chosen: list[int], step: Step) -> None:
        self._learn(layer, chosen, step)
        self._forecast(layer, step.rows)

    def glance(self, step: Step) -> None:
        """Without forecasting anew: a third of numpy's cost of ``absorb``."""
        layer = step.layer
        begin = self._offsets[layer]
        self._learn(layer, [flat - begin for flat in step.experts], step)
        averages = self._averages[layer]
        np.add(
            averages[0], averages[1], out=self.chance[layer]
        )  # what a whole turn's forecast would say, roughly
        self.chance[layer] *= 0.5

    def _learn(self, layer: int, chosen: list[int], step: Step) -> None:
        self._count(layer, chosen, step)
        self._chosen[layer] = chosen
        averages, logarithms = self._averages[layer], self._logarithms[layer]
        averages *= self._decay
        averages += self._fresh * self._hot[layer]
        np.maximum(averages, FLOOR, out=logarithms)
        np.log(logarithms, out=logarithms)
        rate = self.rate[layer]
        np.add(averages[2], averages[3], out=rate)
        rate *= 0.5 * self.trust
        rate += (1.0 - self.trust) * self.usual[layer]

    def _forecast(self, layer: int, rows: int) -> None:
        targets = self.targets[layer]
        sharp: FloatArray = np.matmul(self._gain[layer], self._features[targets])[:, 0]  # [R, E], minus z
        sharp += self._looked_up(layer, targets) if rows == 1 else self._multiplied(layer, targets)
        np.exp(sharp, out=sharp)
        sharp += 1.0
        np.reciprocal(sharp, out=sharp)
        self._expect(targets, sharp, rows)

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
