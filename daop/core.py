"""The nouns every room shares: geometry, phase, step, forecast, registry, errors.

Nothing here imports torch, transformers, LightGBM or CuPy: ``import daop`` stays light.

Shape legend used across the project:
    T tokens, L MoE layers, E experts of a layer, K experts chosen per token, H hidden size.
An expert has two names: the pair ``(layer, expert)``, both counted from 0, and its *flat id*
``geometry.offsets[layer] + expert``. Residency and policies speak of flat ids, since layers may
differ in their number of experts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class DaopError(Exception):
    """Something a person can mend: the message names the file, tensor or flag and the remedy."""


class Phase(StrEnum):
    """What a forward pass is doing. A trace stores the value."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Which experts a model has and how many bytes each takes as stored.

    ``experts[l]`` is the number of routed experts in MoE layer ``l``; ``expert_bytes[l]`` the bytes of
    one of them (0: not known); ``layer_to_model_layer[l]`` the model's own number of that layer.
    ``fingerprint`` identifies the model ('' if unknown).
    """

    experts: tuple[int, ...]
    top_k: int
    expert_bytes: tuple[int, ...]
    layer_to_model_layer: tuple[int, ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if not self.experts or min(self.experts) < 1:
            raise DaopError("a geometry needs at least one MoE layer, each with at least one expert")
        if not 1 <= self.top_k <= min(self.experts):
            raise DaopError(f"top_k is {self.top_k}, but must lie in 1..{min(self.experts)}")
        if len(self.expert_bytes) != self.layers or len(self.layer_to_model_layer) != self.layers:
            raise DaopError("expert_bytes and layer_to_model_layer need one entry per MoE layer")
        if min(self.expert_bytes) < 0:
            raise DaopError("expert_bytes must not be negative")

    @classmethod
    def uniform(
        cls, layers: int, experts: int, top_k: int, expert_bytes: int = 0, fingerprint: str = ""
    ) -> Geometry:
        """The common case: every layer alike, MoE layers numbered as the model's."""
        return cls(
            experts=(experts,) * layers,
            top_k=top_k,
            expert_bytes=(expert_bytes,) * layers,
            layer_to_model_layer=tuple(range(layers)),
            fingerprint=fingerprint,
        )

    @property
    def layers(self) -> int:
        return len(self.experts)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """``offsets[l]`` is the flat id of layer ``l``'s expert 0; the last entry is the total."""
        total, out = 0, [0]
        for count in self.experts:
            total += count
            out.append(total)
        return tuple(out)

    @property
    def total(self) -> int:
        """All routed experts of the model."""
        return self.offsets[-1]

    @cached_property
    def layer_of(self) -> IntArray:
        """[total] MoE layer of each flat id."""
        return np.repeat(np.arange(self.layers, dtype=np.int32), self.experts)

    @cached_property
    def bytes_of(self) -> NDArray[np.int64]:
        """[total] bytes of each flat id as stored."""
        return np.repeat(np.asarray(self.expert_bytes, dtype=np.int64), self.experts)

    def flat(self, layer: int, expert: int) -> int:
        """Flat id of an expert."""
        return self.offsets[layer] + expert

    def pair(self, flat: int) -> tuple[int, int]:
        """``(layer, expert)`` of a flat id."""
        layer = int(self.layer_of[flat])
        return layer, flat - self.offsets[layer]

    def check_same_shape(self, other: Geometry, mine: str, theirs: str) -> None:
        """Raise if the two differ in what a policy or predictor depends on, naming the number."""
        pairs: tuple[tuple[str, object, object], ...] = (
            ("MoE layers", self.layers, other.layers),
            ("experts per layer", _compact(self.experts), _compact(other.experts)),
            ("experts per token (top-k)", self.top_k, other.top_k),
        )
        for name, a, b in pairs:
            if a != b:
                raise DaopError(f"{mine} has {a} {name}, {theirs} has {b}")


def _compact(counts: tuple[int, ...]) -> int | tuple[int, ...]:
    return counts[0] if len(set(counts)) == 1 else counts


@dataclass(
    slots=True, eq=False
)  # not frozen: one is made for every layer, and that would take thrice as long
class Step:
    """One MoE layer of one forward pass, its router known.

    ``experts``: flat ids of the distinct chosen experts, ascending.
    ``tokens``: how many of the forward's tokens chose each.
    ``weights``: sum over those tokens of the router weight, or None if unknown.
    ``forward`` counts forward passes from 0; ``rows`` is the number of tokens in this one.
    Plain lists, since a decode step holds a handful and a list of a handful is faster than an array.
    """

    layer: int
    phase: Phase
    forward: int
    rows: int
    experts: Sequence[int]
    tokens: Sequence[int]
    weights: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What a predictor expects of a coming layer.

    ``scores[e]`` estimates the probability that expert ``e`` of MoE layer ``layer`` is chosen by at
    least one token of the forward pass that reaches it next, float32 [E].
    """

    layer: int
    scores: FloatArray


T = TypeVar("T")


class Registry(Generic[T]):
    """Names to classes, filled by decorators and read by the CLI, tests and benchmarks.

    ``get`` also accepts ``module:Name`` for a person's own class in any importable module; it must be a
    subclass of ``base``, if there is one.
    """

    def __init__(self, kind: str, package: str, base: type | None = None) -> None:
        self.kind = kind
        self._package = package
        self._base = base
        self._items: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def _load(self) -> None:
        """Import every module of the package, so that one new file is one new entry."""
        if not self._loaded:
            import pkgutil

            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._loaded = True

    def names(self) -> list[str]:
        self._load()
        return sorted(self._items)

    def items(self) -> Iterator[tuple[str, T]]:
        self._load()
        return iter(sorted(self._items.items()))

    def get(self, name: str) -> T:
        """The class of that name; raises DaopError that lists the known ones."""
        if ":" in name:
            return self._import(name)
        self._load()
        if name not in self._items:
            known = ", ".join(self.names())
            raise DaopError(f"unknown {self.kind} {name!r}; known: {known}; or module:Class for your own")
        return self._items[name]

    def _import(self, name: str) -> T:
        module, _, attribute = name.partition(":")
        try:
            item: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last two: no such names
            raise DaopError(
                f"cannot import {self.kind} {name!r}: {error}; is the module on PYTHONPATH?"
            ) from error
        except SyntaxError as error:
            raise DaopError(f"cannot import {self.kind} {name!r}: {error}") from error
        if self._base is not None and not (isinstance(item, type) and issubclass(item, self._base)):
            raise DaopError(
                f"{self.kind} {name!r} is not a class derived from {self._base.__module__}."
                f"{self._base.__name__}: name one that is"
            )
        return item
