"""The seam for policies that change the output: calls that start early, are replaced, or come a layer late.

A *call* is one expert for one token: a row of the step and one of its K choices. Of each MoE layer in decode:

    settle      the router of the layer is known (and how far off the announced input was): what runs in the
                end, which calls use the result that was computed early, which are added one layer late
    announce    the next layer's router was asked about the input as it is known now: which of the calls that
                it names start now, on that input

Both are asked row by row: an answer for a row may depend on that row, its sequence and what was fixed before
the run, and on nothing else. Above all not on what is resident, for that depends on other people's requests:
which calls count as computed behind the link is decided by ``SequencePlacement``, for each sequence alone. So
a request's output is the same alone and in a batch.

Prefill is exact. ``daop.runtime.early`` carries it out on real numbers, ``daop.runtime.sim_early`` on a
virtual clock.

Shape legend: T rows, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, DaopError, FloatArray, Geometry, IntArray
from daop.runtime.sequence_placement import Book, SequencePlacement
from daop.runtime.statistics import Statistics

from .base import Costs, Policy, View


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of each row, by the layer's own numbers [T, K], and their router weights [T, K]."""

    ids: IntArray
    weights: FloatArray

    def shares(self) -> FloatArray:
        """[T, K] each weight's share of its row's sum."""
        out: FloatArray = self.weights / np.maximum(self.weights.sum(axis=1, keepdims=True), 1e-12)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """``routing`` is what runs. ``early`` [T, K]: on the announced input; ``late`` [T, K]: added to the next
    layer's output (never both). ``changed``: the routing is not the router's."""

    routing: Routing
    early: BoolArray | None = None
    late: BoolArray | None = None
    changed: bool = False


def count_calls(true: Routing, settled: Settled, statistics: Statistics) -> NDArray[np.int64]:
    """Book a layer's calls; returns how many of each row are approximated, [T].

    Where the routing is not the router's, every call of the row is: its weight is another, if nothing else.
    """
    rows, k = true.ids.shape
    counts = statistics.approximate
    counts["calls"] += rows * k
    touched: BoolArray = np.zeros((rows, k), dtype=np.bool_)
    for name, mask in (("early", settled.early), ("late", settled.late)):
        if mask is not None:
            counts[name] += int(mask.sum())
            touched |= mask
    if settled.changed:
        same = (settled.routing.ids[:, :, None] == true.ids[:, None, :]).any(axis=2)
        counts["replaced"] += int((~same).sum())
        touched[:] = True
    counts["approximated"] += int(touched.sum())
    sums: NDArray[np.int64] = touched.sum(axis=1)
    return sums


class Approximate(Policy):
    """Base of the policies that are not exact.

    ``corrects``: early calls run on the corrected input (``runtime.input_correction``), not on the stale one.
    ``weighs``: an early result is weighted by the true router, once that is known.
    ``needs``: columns of a trace, beside the routing, without which it cannot be simulated.
    """

    exact: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    placement: Book

    def open(self, sequences: Sequence[int]) -> None:
        """New sequences begin; what was known of their numbers is forgotten."""
        self.placement.open(sequences)

    def close(self, sequences: Sequence[int]) -> None:
        """These sequences are over: nothing of them is kept."""
        self.placement.close(sequences)

    def asks(self, layer: int) -> bool:
        """Whether the router of ``layer + 1`` is to be asked while ``layer`` runs."""
        return False

    def announce(
        self, layer: int, sequences: Sequence[int], forecast: Routing, scores: FloatArray | None
    ) -> Settled:
        """Calls of ``layer + 1`` that start now: ``forecast`` as its router gave it, or as the policy changes
        it, and ``early``. ``scores`` [T, E] rank the experts (None: not known)."""
        return Settled(forecast)

    def settle(
        self, layer: int, sequences: Sequence[int], routing: Routing, distances: FloatArray | None
    ) -> Settled:
        """The router of ``layer`` is known. ``distances`` [T]: of the announced input from the true one,
        relative to the true one's norm (None: nothing was announced)."""
        return Settled(routing)


class Static(Approximate):
    """A placement by frequency that never changes; every miss is computed where it lies."""

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        from .static import by_frequency, uniform

        super().start(geometry, slots, costs, view)
        known = self.profile
        chosen = uniform(geometry, slots) if known is None else by_frequency(known.frequency, slots)
        self.placement = self.book = SequencePlacement(geometry, chosen, margin=None)
        return chosen


def check_count(name: str, value: object, lowest: int = 0) -> int:
    """A whole number that an option of a policy must be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise DaopError(f"{name} is {value!r}, but must be a whole number of at least {lowest}")
    return value


def check_share(name: str, value: object, highest: float = 1.0) -> float:
    """A number in 0..highest that an option of a policy must be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
        raise DaopError(f"{name} is {value!r}, but must lie between 0 and {highest:g}")
    return float(value)
