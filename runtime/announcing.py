"""Announced inputs: what a layer will see, guessed while the one before it runs, and its router's answer.

``Announcer`` guesses, ``distances`` says how far a guess was off, and ``ForecastTap`` records both into a
trace, beside a run whose output it does not touch (``daop trace capture --distances``).

Shape legend: T rows, K experts per token, E experts of the layer, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError, FloatArray, Phase

from .experts import ExpertsFn
from .input_correction import InputCorrection
from .policies.approximate import Routing
from .recording import ForecastRecorder


class Routers(Protocol):
    """The model's routers (``model.BuiltModel``)."""

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """[T, H] -> ids [T, K], weights [T, K], probabilities [T, E] of that layer's own router; None if it
        is not known."""

    def router_input(self, layer: int) -> torch.Tensor | None:
        """What the layer's router saw last, [T, H]."""


@dataclass(frozen=True, slots=True, eq=False)
class Announced:
    """What is known of a layer while the one before it runs."""

    layer: int
    input: torch.Tensor  # [T, H]
    routing: Routing
    scores: FloatArray  # [T, E]


class Announcer:
    """Guesses the next layer's input and asks its router; ``correction`` None: the stale input as it is."""

    def __init__(self, routers: Routers, correction: InputCorrection | None, needed_by: str) -> None:
        self._routers = routers
        self._correction = correction
        self._needed_by = needed_by

    def __call__(self, layer: int, hidden: torch.Tensor) -> Announced:
        """``hidden`` [T, H]: the true input of layer ``layer``."""
        seen = self._routers.router_input(layer)
        same = seen is None or seen.data_ptr() == hidden.data_ptr() or torch.equal(seen, hidden)
        guess = self._guess(layer, hidden) if same else hidden  # the correction is learnt on routers' inputs
        asked = guess if seen is None or same else self._guess(layer, seen)
        found = self._routers.route(layer + 1, asked)
        if found is None:
            raise DaopError(
                f"{self._needed_by} must ask this model's routers about other inputs, and the router of MoE "
                f"layer {layer + 1} does not tell ids and weights: use an exact policy, or deferral"
            )
        ids, weights, scores = found
        return Announced(layer + 1, guess, routing_of(ids, weights), scores.float().cpu().numpy())

    def _guess(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return x if self._correction is None else self._correction(layer, x)


def routing_of(ids: torch.Tensor, weights: torch.Tensor) -> Routing:
    return Routing(ids.cpu().numpy().astype(np.int32), weights.float().cpu().numpy())


def distances(true: torch.Tensor, guess: torch.Tensor) -> FloatArray:
    """[T] relative distance of each row."""
    wide = true.float()
    away = (wide - guess.float()).norm(dim=1) / wide.norm(dim=1).clamp_min(1e-12)
    out: FloatArray = away.cpu().numpy()
    return out


class ForecastTap:
    """Runs a layer's experts as ``run`` does, and records, in decode, how good the announcement was."""

    def __init__(self, run: ExpertsFn, announcer: Announcer, layers: int, recorder: ForecastRecorder) -> None:
        self._run = run
        self._announcer = announcer
        self._layers = layers
        self._recorder = recorder
        self._announced: Announced | None = None
        self._decode = False
        self._real: NDArray[np.intp] | None = None

    def begin(self, phase: Phase, real: NDArray[np.intp] | None) -> None:
        """A forward pass starts; ``real``: the rows that the trace has (None: all)."""
        self._decode, self._real = phase is Phase.DECODE, real
        self._announced = None

    def __call__(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        before, self._announced = self._announced, None
        if self._decode and layer + 1 < self._layers:
            self._announced = self._announcer(layer, hidden)
        out = self._run(layer, hidden, ids, weights)
        if before is not None:
            real: Sequence[int] | slice | NDArray[np.intp] = slice(None) if self._real is None else self._real
            away = distances(hidden, before.input)
            self._recorder.record_forecast(
                layer, away[real], before.routing.ids[real], before.routing.weights[real]
            )
        return out
