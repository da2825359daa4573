"""``bounded``: an expert behind the link may start early; its result counts if the input was close enough.

The routing is always the true router's. While a layer runs, the next layer's router is asked about the input
as it can be told by then (the stale one, corrected by what is learnt of the difference). Of the experts that
it names behind the link, at most ``calls`` per token start at once: more would not have begun anyway by the
time the true input is there. Then an early result is used, weighted by the true router, if

    the true router chose that expert,
    the announced input's distance from the true one is below ``tolerance`` of the true one's norm, and
    the expert's share of the token's router weight is at most ``light``.

Else the expert runs again on the true input. ``tolerance`` 0 is exact. Placement and prefill are those of
``daop``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import BoolArray, DaopError, FloatArray

from .approximate import Routing, Settled, check_count, check_share
from .base import POLICIES
from .prompt_swap import PromptSwap


@POLICIES.register("bounded")
class Bounded(PromptSwap):
    """``tolerance``: relative distance of inputs; ``calls`` a token and layer; ``light``: share of the
    weight; ``first``: the first layer that announces for its successor."""

    exact = False
    plan_us = 10.0
    look_ahead_us = 40.0
    corrects = True
    weighs = True
    needs = ("distances", "forecast_ids", "forecast_weights")

    def __init__(self, *, tolerance: float = 0.2, calls: int = 1, light: float = 1.0, first: int = 0) -> None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise DaopError(
                f"--tolerance is {tolerance!r}, but must be a relative distance of 0 (exact) or more"
            )
        self.tolerance = float(tolerance)
        self.calls = check_count("calls", calls)
        self.light = check_share("light", light)
        self.first = check_count("first", first)
        self._announced: tuple[int, Routing, BoolArray] | None = None

    def asks(self, layer: int) -> bool:
        enough = self.tolerance > 0 and self.calls > 0
        return enough and self.first <= layer < self.geometry.layers - 1

    def announce(
        self, layer: int, sequences: Sequence[int], forecast: Routing, scores: FloatArray | None
    ) -> Settled:
        """The surest of the light ones: the higher the forecast weight, the surer is the choice."""
        rows, k = forecast.ids.shape
        able = self.placement.calls_behind(layer + 1, sequences, forecast.ids)
        able &= forecast.shares() <= self.light
        first = np.argsort(np.where(able, -forecast.weights, np.inf), axis=1, kind="stable")
        early = np.zeros((rows, k), dtype=np.bool_)
        np.put_along_axis(early, first[:, : self.calls], True, axis=1)
        early &= able
        self._announced = (layer + 1, forecast, early)
        return Settled(forecast, early=early)

    def settle(
        self, layer: int, sequences: Sequence[int], routing: Routing, distances: FloatArray | None
    ) -> Settled:
        known, self._announced = self._announced, None
        if known is None or known[0] != layer or distances is None:
            return Settled(routing)
        _, forecast, early = known
        started = np.where(early, forecast.ids, -1)
        named = (routing.ids[:, :, None] == started[:, None, :]).any(axis=2)
        close = distances < self.tolerance  # nothing is closer than 0
        return Settled(routing, early=named & close[:, None] & (routing.shares() <= self.light))
