"""``activation_matrix``: keep and bring early what the most similar earlier sequence used.

Source: MoE-Infinity (Xue et al., 2024): the experts that a sequence has used so far, counted per layer,
are compared (cosine) with stored matrices of earlier sequences; the nearest one's ratios, weighed by how
near a layer is, order the prefetches, and the least of ratio times layer weight is the victim.
The store starts with the profile's matrices and takes up finished sequences, oldest first out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import FloatArray, Forecast, Geometry, Phase, Step
from daop.runtime.profile import MATRICES

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View
from .lfu import lowest

AHEAD = 2  # prefetches asked for at one layer; more would only queue


@POLICIES.register("activation_matrix")
class ActivationMatrix(Policy):
    """Batch 1 is what it was made for; a batch is treated as one sequence."""

    plan_us = 22.0
    look_ahead_us = 5.0

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        self._layers = geometry.layer_of
        self._so_far = np.zeros(geometry.total, dtype=np.float32)
        self._likely = np.zeros(geometry.total, dtype=np.float32)
        stored = None if self.profile is None else self.profile.matrices
        self._store: list[FloatArray] = [] if stored is None else list(stored[:MATRICES])
        self._pack()
        # Early layers come round first and nothing foretells them: they are kept longest.
        self._keep_weight = (1.0 - self._layers / geometry.layers).astype(np.float32)
        self._worth = self._likely
        return ()

    def _pack(self) -> None:
        self._matrix = np.asarray(self._store, dtype=np.float32).reshape(
            len(self._store), self.geometry.total
        )
        self._norms = np.linalg.norm(self._matrix, axis=1) + 1e-9

    def begin_sequences(self, count: int) -> None:
        if self._so_far.any():
            self._store.append(self._so_far / max(1.0, float(self._so_far[: self.geometry.experts[0]].sum())))
            del self._store[:-MATRICES]
            self._pack()
        self._so_far = np.zeros_like(self._so_far)

    def begin(self, phase: Phase, rows: int) -> None:
        if len(self._store) and self._so_far.any():
            nearest = int((self._matrix @ self._so_far / self._norms).argmax())
            self._likely = self._matrix[nearest]
        else:
            self._likely = self._so_far
        self._worth = (self._likely + 1e-6) * self._keep_weight

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._so_far[step.experts] += step.tokens
        return Plan(keep=missing)

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        chosen = lowest(self._worth, count, view, incoming)
        if prefetch is not None:
            return [flat for flat in chosen if self._worth[flat] < self._worth[incoming]]
        return chosen

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        if view.link_free_at > view.now + self.costs.copy(step.experts[0]):
            return ()
        begin = self.geometry.offsets[step.layer + 1]
        if begin == self.geometry.total:
            return ()
        distance = self._layers[begin:] - step.layer
        priority = self._likely[begin:] * (1.0 - distance / self.geometry.layers)
        priority[view.resident[begin:] | view.filling[begin:]] = 0.0
        best = np.argpartition(-priority, min(AHEAD, len(priority) - 1))[:AHEAD]
        return [
            Prefetch(begin + int(i), float(priority[i]), int(distance[i])) for i in best if priority[i] > 0.0
        ]
