"""The two kinds of predictor, and the registry that the command line, tests and benchmarks read.

A predictor has scikit-learn's manners: the constructor only stores parameters, ``fit`` learns and returns
self, learned state ends in ``_``. What is fitted never changes afterwards: a run's memory lives in a
``Session`` (``session.py``), so one predictor may serve many runs. Add one by writing one file here.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from numpy.typing import NDArray

from daop.core import DaopError, FloatArray, Geometry, Registry

from .data import Counts, Routing
from .history import Context, Past


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a predictor asks for beyond the routing history, which every run has."""

    token_ids: bool = False
    hidden: bool = False
    weights: bool = False


@dataclass(kw_only=True)
class State:
    """Learned state in the only three forms that are ever stored."""

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # safetensors
    values: dict[str, Any] = field(default_factory=dict)  # JSON
    texts: dict[str, str] = field(default_factory=dict)  # LightGBM's own text format


class Predictor(ABC):
    """What both kinds share. ``geometry_`` is the geometry it was fitted on."""

    kind: ClassVar[Literal["next", "reuse"]]
    needs: ClassVar[Needs] = Needs()
    geometry_: Geometry

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments as stored."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @abstractmethod
    def fit(self, data: Routing) -> Self:
        """Learn from ``data``; raises DaopError if it lacks what ``needs`` names."""

    def fit_counts(self, data: Counts) -> Self:
        """Learn from counts per sequence, where a predictor can."""
        raise DaopError(
            f"{type(self).__name__} needs the routing of single tokens; a counts-only trace fits popularity "
            "and frequency"
        )

    def update(self, data: Routing) -> Self:
        """Go on learning from new traffic; by default a fresh fit."""
        return self.fit(data)

    @abstractmethod
    def state(self) -> State:
        """Everything ``restore`` needs."""

    @abstractmethod
    def restore(self, state: State, geometry: Geometry) -> Self:
        """Take back what ``state`` gave; raises KeyError or ValueError on a state that does not fit."""

    def check_needs(self, data: Routing) -> None:
        """Raise DaopError if ``data`` lacks a column this predictor needs."""
        for need, column, flag in (
            (self.needs.token_ids, data.token_ids, "token ids (record with --token-ids)"),
            (self.needs.hidden, data.hidden, "hidden states (record with --features)"),
            (self.needs.weights, data.weights, "router weights"),
        ):
            if need and column is None:
                raise DaopError(f"{type(self).__name__} needs {flag}, which this trace does not have")
        if len(data) == 0:
            raise DaopError(f"{type(self).__name__} got no tokens to fit on; the training side is empty")


class NextLayer(Predictor):
    """Forecasts which experts the layers ahead will choose for the tokens of the running forward."""

    kind: ClassVar[Literal["next", "reuse"]] = "next"
    horizons: int = 4

    @abstractmethod
    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        """[T, E] chance that a token chooses each expert of layer ``context.layer + horizon``.

        ``horizon`` is 1 to ``horizons`` and the layer exists. Called with rising ``context.layer``
        within one forward, so ``context.memo`` may carry work over; must not depend on being called
        for every layer.
        """


class Reuse(Predictor):
    """Forecasts how soon every expert is wanted again."""

    kind: ClassVar[Literal["next", "reuse"]] = "reuse"

    @abstractmethod
    def wait(self, context: Context, after: Past) -> FloatArray:
        """[T, total] expected number of forward passes until each expert's next use: 1 is the next token's.

        ``context`` is a forward whose layers are all known, ``context.past`` the past before it and
        ``after`` the past that includes it. Experts of layer l are judged by choices of layers 0 to l only,
        so that their forecast already holds once layer l has passed.
        """


PREDICTORS: Registry[type[Predictor]] = Registry("predictor", "daop.predictors", Predictor)


def names_of(kind: Literal["next", "reuse"]) -> list[str]:
    """The registered predictors of one kind."""
    return [name for name, cls in PREDICTORS.items() if cls.kind == kind]
