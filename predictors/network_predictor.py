"""What ``mlp``, ``mlp_reuse`` and ``visits`` share: fitting, storing and restoring their network."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from daop.core import Geometry

from .base import Predictor, State
from .data import Routing
from .network import PLAIN, Network, Sight, Weights, shapes

if TYPE_CHECKING:
    from .network_fit import Task


class NetworkPredictor(Predictor):
    """The constructor's arguments are those of ``network_fit.Schedule``.

    ``memo_key`` names the network in memos which several networks share.
    """

    memo_key: ClassVar[str]
    sight: ClassVar[Sight] = PLAIN

    def __init__(
        self,
        *,
        width: int = 128,
        epochs: int = 4,
        batch: int = 256,
        learning_rate: float = 0.003,
        weight_decay: float = 0.05,
        dropout: float = 0.1,
        max_tokens: int = 100_000,
        seed: int = 0,
    ) -> None:
        self.width = width
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.dropout = dropout
        self.max_tokens = max_tokens
        self.seed = seed

    @abstractmethod
    def task(self) -> Task:
        """What the heads are fitted to forecast; torch may be loaded."""

    @property
    @abstractmethod
    def forecasts(self) -> int:
        """How many numbers the heads say of each expert."""

    def fit(self, data: Routing) -> Self:
        return self._fit(data, None)

    def update(self, data: Routing) -> Self:
        self.geometry_.check_same_shape(data.geometry, "the predictor", "the trace")
        return self._fit(data, self.network_.weights)

    def _fit(self, data: Routing, start: Weights | None) -> Self:
        from .network_fit import Schedule, fit

        self.check_needs(data)
        return self._take(fit(data, Schedule.of(self), self.task(), self.sight, start), data.geometry)

    def _take(self, weights: Weights, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.network_ = Network(weights, geometry, self.memo_key, self.sight)
        return self

    def state(self) -> State:
        return State(arrays=dict(self.network_.weights))

    def restore(self, state: State, geometry: Geometry) -> Self:
        expected = shapes(geometry, self.width, self.forecasts, self.sight)
        return self._take({n: state.arrays[n].reshape(shape) for n, shape in expected.items()}, geometry)
