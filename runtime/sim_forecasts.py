"""Next-layer forecasts for simulated policies that ask for them.

A trace holds no hidden states, so the gate look-ahead that a real run uses cannot be replayed. The
running forecast, which sees only the routing so far, stands in: on recorded gpt-oss-20b traffic it finds
three quarters and more of the next layer's experts, in the range that papers report for gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from daop.core import Forecast, Geometry, Step

from .forecast_source import running_forecast
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
    """A ``Forecaster`` over the forecast that ``adaptive`` runs on."""

    def __init__(self, geometry: Geometry, profile: Profile | None) -> None:
        self._experts = geometry.experts
        self._state = running_forecast(geometry, profile)
        # Measured of the context model; without the compiled library a gate on the device is assumed instead.
        native = self._state.native is not None
        self.seconds = 8e-6 + 0.25e-6 * max(geometry.experts) if native else 30e-6

    def forward(self, forward: Forward) -> None:
        """It sees each step when its router is known."""
        if forward.starts:
            self._state.begin_sequences(len(forward.starts))

    def after(self, step: Step, horizon: int) -> Sequence[Forecast]:
        state = self._state
        state.absorb(step)
        last = min(step.layer + horizon, state.layers - 1)
        return [
            Forecast(layer, state.chance[layer, : self._experts[layer]])
            for layer in range(step.layer + 1, last + 1)
        ]
