"""``static``: a placement fixed before the run; a miss is computed where it lies.

Source: llama.cpp's ``--n-cpu-moe`` (whole layers), KTransformers' uniform, front-loading and
frequency placements, and Fiddler's placement by frequency.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import FloatArray, Geometry, Step

from .base import POLICIES, Costs, Plan, Policy, View


@POLICIES.register("static")
class Static(Policy):
    """The same number of experts in every layer, lowest ids first (no knowledge of the traffic)."""

    keeps_hot_set = True

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        per_layer = [slots // geometry.layers] * geometry.layers
        for layer in range(slots % geometry.layers):
            per_layer[layer] += 1
        return [
            geometry.flat(layer, expert)
            for layer, count in enumerate(per_layer)
            for expert in range(min(count, geometry.experts[layer]))
        ]

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        return Plan(host=missing)


@POLICIES.register("static_front")
class StaticFront(Static):
    """Whole layers from the first on, as ``--n-cpu-moe`` leaves them in fast memory."""

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        return range(min(slots, geometry.total))


@POLICIES.register("static_frequency")
class StaticFrequency(Static):
    """The experts that a profile saw most often, over all layers.

    ``frequency`` [total]: how often each flat id was chosen on other traffic.
    """

    def __init__(self, frequency: FloatArray | None = None) -> None:
        self.frequency = frequency

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        uniform = super().start(geometry, slots, costs, view)
        if self.frequency is None:
            return uniform
        order = np.argsort(-self.frequency, kind="stable")
        chosen: list[int] = order[:slots].tolist()
        return chosen
