"""Next-layer forecasts for simulated policies that ask for them.

A trace holds no hidden states, so the gate look-ahead that a real run uses cannot be replayed. The
context model, which sees only the routing so far, stands in: on recorded gpt-oss-20b traffic it finds
about three quarters of the next layer's experts, in the range that papers report for gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from daop.core import Forecast, Geometry, Step

from .context_model import LEADS, ContextModel, turns
from .context_state import ContextState
from .profile import Profile
from .sim_traffic import Forward


class Forecaster(Protocol):
    """What announces the next layers to the simulated policies that ask for it."""

    def forward(self, forward: Forward) -> None:
        """A forward pass begins. An honest forecaster looks only at what is behind it."""

    def after(self, step: Step, horizon: int) -> Sequence[Forecast]:
        """The router of ``step`` is known: forecasts of the next ``horizon`` layers."""

    @property
    def seconds(self) -> float:
        """What one call of ``after`` costs the main thread."""


class OnlineForecaster:
    """A ``Forecaster`` over a ``ContextState`` that learns as the trace goes on."""

    def __init__(self, geometry: Geometry, profile: Profile | None) -> None:
        frequency = None if profile is None else profile.frequency
        arrays = None if profile is None else profile.arrays
        model = ContextModel.from_arrays(arrays or {}, geometry)
        if model is None:
            model = ContextModel.empty(geometry, turns(LEADS, geometry.layers), frequency)
        self._experts = geometry.experts
        self._state = ContextState(model, geometry, frequency)
        # Measured of ContextState; without the compiled library a gate on the device is assumed instead.
        native = self._state.native is not None
        self.seconds = 8e-6 + 0.25e-6 * max(geometry.experts) if native else 30e-6

    def forward(self, forward: Forward) -> None:
        """Nothing to do: it sees each step when its router is known."""

    def after(self, step: Step, horizon: int) -> Sequence[Forecast]:
        state = self._state
        state.absorb(step)
        last = min(step.layer + horizon, state.layers - 1)
        return [
            Forecast(layer, state.chance[layer, : self._experts[layer]])
            for layer in range(step.layer + 1, last + 1)
        ]
