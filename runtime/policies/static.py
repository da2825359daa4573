"""``static``: a placement fixed before the run; a miss is computed where it lies.

Source: llama.cpp's ``--n-cpu-moe`` (whole layers), KTransformers' uniform, front-loading and
frequency placements, and Fiddler's placement by frequency.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import FloatArray, Geometry, Step

from .base import POLICIES, Costs, Plan, Policy, View


def uniform(geometry: Geometry, slots: int) -> list[int]:
    """The same number of experts in every layer, lowest ids first."""
    share, rest = divmod(slots, geometry.layers)
    return [
        geometry.flat(layer, expert)
        for layer in range(geometry.layers)
        for expert in range(min(share + (layer < rest), geometry.experts[layer]))
    ]


def by_frequency(frequency: FloatArray, slots: int) -> list[int]:
    """The most frequent experts of all layers, most frequent first."""
    chosen: list[int] = np.argsort(-frequency, kind="stable")[:slots].tolist()
    return chosen


@POLICIES.register("static")
class Static(Policy):
    """The same number of experts in every layer, lowest ids first (no knowledge of the traffic)."""

    keeps_hot_set = True
    plan_us = 1.5

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        return uniform(geometry, slots)

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
    """The experts that the profile saw most often, over all layers (without a profile: ``static``)."""

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        fallback = super().start(geometry, slots, costs, view)
        return fallback if self.profile is None else by_frequency(self.profile.frequency, slots)
