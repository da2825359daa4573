"""What every expert is worth in fast memory, kept up to date at each layer: expected uses saved.

    worth[l, e] = chance[l, e] * nearness(l) + STAY * rate[l, e]

``chance`` (of a use at the layer's next visit) and ``rate`` (of uses per visit in the longer run) are
``RunningForecast``'s; ``nearness`` falls with the layers that lie between now and that visit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, FloatArray, Geometry, Step

from .running_forecast import RunningForecast

STAY = 0.7
FAR = 0.7
REFRESH = 3  # layers between two renewals of every layer's nearness


class WorthTable:
    """``flat`` [total] is the worth of every expert now; the array stays the same one."""

    def __init__(self, state: RunningForecast, geometry: Geometry) -> None:
        self.state = state
        layers = np.arange(geometry.layers)
        self._near_targets = (1.0 - FAR * (state.leads - 1) / geometry.layers).astype(np.float32)  # [R]
        distance = (layers - layers[:, None] - 1) % geometry.layers
        self._near_all = (1.0 - FAR * distance / geometry.layers).astype(np.float32)  # [L, L]
        self._offsets: NDArray[np.int64] = np.asarray(geometry.offsets, dtype=np.int64)
        self._worth: FloatArray = state.chance * np.float32(1.0 - FAR) + np.float32(STAY) * state.rate
        self._place = None  # of each flat id in the padded arrays, where layers differ
        self.flat: FloatArray = self._worth.reshape(-1)
        if len(set(geometry.experts)) > 1:
            widest = max(geometry.experts)
            rows = [range(m * widest, m * widest + n) for m, n in enumerate(geometry.experts)]
            self._place = np.concatenate([np.asarray(row) for row in rows])
            self.flat = self.flat[self._place]

    def absorb(self, step: Step) -> None:
        """Learn from the step's routing and value its layer and the next ones anew."""
        state, layer = self.state, step.layer
        state.absorb(step)
        everywhere = layer % REFRESH == 0  # the distances of all layers have changed by so much
        near = self._near_all[layer] if everywhere else self._near_targets
        if state.native is not None:
            state.native.worth(layer, near, STAY, everywhere, self._worth)
        else:
            which = slice(None) if everywhere else state.targets[layer]
            stay = np.float32(STAY) * state.rate[which]
            self._worth[which] = state.chance[which] * near[:, None] + stay
        self._flatten()

    def glance(self, step: Step) -> None:
        """Where a forecast would hold the device up: learn, forecast nothing."""
        state, layer = self.state, step.layer
        state.glance(step)
        near = self._near_targets[-1]
        self._worth[layer] = state.chance[layer] * near + np.float32(STAY) * state.rate[layer]
        self._flatten()

    def foretell(self, now: int, layer: int, chance: FloatArray) -> None:
        """Someone knows better: ``chance`` [E] of a use at the layer's next visit, the running layer being
        ``now``."""
        state, count = self.state, len(chance)
        state.chance[layer, :count] = chance
        self._worth[layer] = state.chance[layer] * self._near_all[now, layer] + STAY * state.rate[layer]
        if self._place is not None:
            self.flat[self._offsets[layer] : self._offsets[layer + 1]] = self._worth[layer, :count]

    def _flatten(self) -> None:
        if self._place is not None:
            np.take(self._worth.reshape(-1), self._place, out=self.flat)

    def best(
        self, resident: BoolArray, filling: BoolArray, late: Sequence[int], taken: Sequence[int]
    ) -> tuple[int, float]:
        """The absent expert of most worth, not among ``taken``, and its worth; (-1, 0.0) if none has any.

        A copy begun now misses the next visit of the ``late`` layers, whose experts count without the
        chance of that visit.
        """
        if self.state.native is not None:
            return self.state.native.best(self.flat, self._offsets, resident, filling, late, taken)
        gain = np.where(resident | filling, np.float32(0.0), self.flat)
        for layer in late:
            part = gain[self._offsets[layer] : self._offsets[layer + 1]]
            np.subtract(part, self.state.chance[layer, : len(part)], out=part, where=part > 0)
        gain[list(taken)] = 0.0
        best = int(gain.argmax())
        return (best, float(gain[best])) if gain[best] > 0 else (-1, 0.0)
