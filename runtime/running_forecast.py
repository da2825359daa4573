"""A forecast that runs beside a model: what every expert's next use is like, kept up to date layer by layer.

``chance`` [L, E]: probability that the next visit of the layer uses the expert.
``rate`` [L, E]: how often it is used per visit after that.
Both blend a sharp forecast with the plain frequency, by how well either has done lately: a forecast that is
wrong loses its say within some tokens, and wins it back when it is right.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, Step

from .context_model import FLOOR, padded
from .native_context import NativeForecast

PRIOR = 200.0  # tokens that a profile's frequency counts for
MEMORY = 0.98  # of the running log losses
SHARPNESS = 160.0  # how fast a better log loss wins the blend
CHECK_EVERY = 7  # steps between two comparisons of the forecasts


class RunningForecast(ABC):
    """``absorb`` is called once per layer and forward pass.

    ``targets[l]`` [R]: the layers whose ``chance`` the step of layer ``l`` renews, ``leads`` [R] layers on.
    ``native`` does the arithmetic where the compiled library is there; else it is numpy's.
    """

    source: ClassVar[str]
    native: NativeForecast | None

    def __init__(
        self, geometry: Geometry, frequency: FloatArray | None, leads: tuple[int, ...], trust: float
    ) -> None:
        usual = padded(geometry, frequency)
        weight = 8.0 if frequency is None else PRIOR
        self.layers, self.experts = layers, experts = usual.shape
        self._offsets = geometry.offsets
        self._counts = usual * np.float32(weight)
        self._seen = np.full(layers, weight, dtype=np.float64)
        self.usual = usual.copy()
        self.chance = usual.copy()
        self.rate = usual.copy()
        self.trust = trust
        self.losses = [0.0, 0.0]  # running log loss of the sharp forecast and of the frequency
        self._age = 0
        self.leads = np.asarray(leads)
        self._targets = np.ascontiguousarray((np.arange(layers)[:, None] + self.leads) % layers, np.int64)
        self.targets = list(self._targets)
        self._hot = np.zeros((layers, experts), dtype=np.float32)  # what each layer used last
        self._expected = self.chance.copy()  # the sharp forecast for each layer's next visit

    def _shared(self) -> dict[str, NDArray[Any]]:
        """What the compiled library works on in place, by its name there."""
        return {
            "targets": self._targets,
            "seen": self._seen,
            "counts": self._counts,
            "usual": self.usual,
            "rate": self.rate,
            "chance": self.chance,
            "expected": self._expected,
            "hot": self._hot,
        }

    def absorb(self, step: Step) -> None:
        """Take in a step's routing."""
        layer = step.layer
        begin = self._offsets[layer]
        chosen = [flat - begin for flat in step.experts]
        self._age += 1
        if self._age % CHECK_EVERY == 0 and step.rows == 1:
            self._judge(layer, chosen)
        if self.native is not None:
            self.native.absorb(layer, chosen, None if step.rows == 1 else shares_of(step), step, self.trust)
        else:
            self._absorb(layer, chosen, step)

    @abstractmethod
    def _absorb(self, layer: int, chosen: list[int], step: Step) -> None:
        """The plain version of what ``native`` does."""

    def glance(self, step: Step) -> None:
        """Take in a step's routing where a forecast would hold the device up."""
        self.absorb(step)

    def begin_sequences(self, count: int) -> None:  # noqa: B027 - most have nothing to forget
        """A forward pass begins that is the first of so many new sequences."""

    @property
    def figures(self) -> dict[str, Any]:
        """For reports: mean log loss of an expert's use at a visit, of late, of the sharp forecast and of the
        plain frequency, and how far the sharp one is trusted for that (0: not at all, 1: alone)."""
        return {
            "source": self.source,
            "trust": self.trust,
            "log_loss": self.losses[0],
            "log_loss_of_frequency": self.losses[1],
        }

    def _count(self, layer: int, chosen: list[int], step: Step) -> None:
        """What the layer used now, and how often it used each in all."""
        hot = self._hot[layer]
        hot.fill(0.0)
        hot[chosen] = 1.0 if step.rows == 1 else shares_of(step)
        self._counts[layer] += hot
        self._seen[layer] += 1.0
        np.multiply(self._counts[layer], 1.0 / self._seen[layer], out=self.usual[layer])

    def _expect(self, targets: NDArray[Any], sharp: FloatArray, rows: int) -> None:
        """The sharp forecast [R, E] for the next visits of ``targets``; it may be overwritten."""
        self._expected[targets] = sharp
        sharp *= self.trust
        sharp += (1 - self.trust) * self.usual[targets]
        if rows > 1:
            sharp = 1.0 - (1.0 - sharp) ** rows
        self.chance[targets] = sharp

    def _judge(self, layer: int, chosen: list[int]) -> None:
        """Compare what was expected of this layer with what came, by log loss per expert."""
        for which, guess in enumerate((self._expected[layer], self.usual[layer])):
            loss = self.native.loss(guess, chosen) if self.native is not None else _log_loss(guess, chosen)
            self.losses[which] += (1 - MEMORY) * (loss - self.losses[which])
        better = min(1.0, max(-1.0, self.losses[1] - self.losses[0]))
        self.trust = 1.0 / (1.0 + math.exp(-SHARPNESS * better))


def shares_of(step: Step) -> FloatArray:
    """Of the rows, how many chose each of the step's experts."""
    shares: FloatArray = np.asarray(step.tokens, dtype=np.float32) / np.float32(step.rows)
    return shares


def _log_loss(guess: FloatArray, chosen: list[int]) -> float:
    """Mean over the experts of the log loss of ``guess`` [E]."""
    clipped = np.clip(guess, FLOOR, 1 - FLOOR)
    absent = np.log1p(-clipped)
    return float(absent[chosen].sum() - absent.sum() - np.log(clipped[chosen]).sum()) / len(guess)
