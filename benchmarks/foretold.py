"""``adaptive`` told the routing of the coming token: what is left to forecasting, and what to rules.

Not a policy to run: it needs the future. All but the chance of a use at each layer's next visit, which is
true here, is ``adaptive``'s own: its values, victims, schedule, and what its decisions cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import Geometry, Step
from daop.runtime.policies.adaptive import Adaptive
from daop.runtime.policies.base import POLICIES, Costs, View
from daop.runtime.running_forecast import RunningForecast
from daop.runtime.worth import WorthTable

NAME = "foretold"


class ForetoldWorth(WorthTable):
    """The worth of every expert, given which ones each layer's next visit uses."""

    def __init__(self, state: RunningForecast, geometry: Geometry, future: Sequence[Sequence[int]]) -> None:
        super().__init__(state, geometry)
        self._geometry = geometry
        self._future = future

    def absorb(self, step: Step) -> None:
        super().absorb(step)
        geometry = self._geometry
        following = step.forward * geometry.layers + step.layer + 1
        for ahead, used in enumerate(self._future[following : following + geometry.layers]):
            layer = (step.layer + 1 + ahead) % geometry.layers
            chance = np.zeros(geometry.experts[layer], dtype=np.float32)
            chance[[flat - geometry.offsets[layer] for flat in used]] = 1.0
            self.foretell(step.layer, layer, chance)


class Foretold(Adaptive):
    """See the module's docstring."""

    needs_future = True

    def foresee(self, steps: Sequence[Sequence[int]]) -> None:
        self._future = [list(used) for used in steps]

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        first = super().start(geometry, slots, costs, view)
        self._table = ForetoldWorth(self._state, geometry, self._future)
        return first


def register() -> str:
    """Put it among the policies of this process; returns its name."""
    if NAME not in POLICIES.names():
        POLICIES.register(NAME)(Foretold)
    return NAME
