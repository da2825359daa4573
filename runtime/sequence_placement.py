"""Where a sequence's experts would lie if it were alone: fixed at the start, swapped by its own prompt.

An approximate policy must know which calls "are on the CPU". What is resident depends on everybody's
requests, so it does not ask that: it keeps this book for each sequence, made of the placement at the start
and the sequence's own prefill. For one sequence at a time the two agree, once the swaps have landed.

The swap is DAOP's (arXiv 2501.10375, step 2): per layer the E/2 busiest experts behind the link are paired,
in order, with the E/2 idlest resident ones, and a pair is swapped if the first has more than ``margin`` times
the tokens of the second. It always starts from the placement at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, Geometry

Counts = NDArray[np.int64]


def swapped(resident: BoolArray, counts: Counts, margin: float) -> BoolArray:
    """[E] which of a layer's experts are resident after the swaps for tokens ``counts`` [E]."""
    half = len(resident) // 2
    outside, inside = np.flatnonzero(~resident), np.flatnonzero(resident)
    busy = outside[np.argsort(-counts[outside], kind="stable")][:half]
    idle = inside[np.argsort(counts[inside], kind="stable")][:half]
    n = min(len(busy), len(idle))
    busy, idle = busy[:n], idle[:n]
    swap = counts[busy] > margin * counts[idle]
    out = resident.copy()
    out[busy[swap]] = True
    out[idle[swap]] = False
    return out


class Book(Protocol):
    """What an approximate policy asks of a sequence's own placement."""

    def open(self, sequences: Sequence[int]) -> None:
        """New sequences begin; what was known of their numbers is forgotten."""

    def close(self, sequences: Sequence[int]) -> None:
        """These sequences are over."""

    def forget_all(self) -> None:
        """No sequence is known any more."""

    def prompt(self, layer: int, ids: NDArray[Any], sequences: NDArray[Any]) -> None:
        """Prefill tokens of ``sequences`` [T] chose ``ids`` [T, K]."""


class SequencePlacement:
    """``chosen``: flat ids resident at the start; ``margin`` None: nothing is ever swapped."""

    def __init__(self, geometry: Geometry, chosen: Sequence[int], margin: float | None) -> None:
        self._offsets = geometry.offsets
        start = np.zeros(geometry.total, dtype=np.bool_)
        start[np.asarray(list(chosen), dtype=np.int64)] = True
        self.start = [start[a:b] for a, b in zip(self._offsets, self._offsets[1:], strict=False)]
        self._margin = margin
        self._counts: dict[int, list[Counts]] = {}
        self._behind: dict[tuple[int, int], BoolArray] = {}

    def open(self, sequences: Sequence[int]) -> None:
        """New sequences begin; what was known of their numbers is forgotten."""
        for sequence in sequences:
            self._counts[sequence] = [np.zeros(len(layer), dtype=np.int64) for layer in self.start]
            for layer in range(len(self.start)):
                self._behind.pop((sequence, layer), None)

    def close(self, sequences: Sequence[int]) -> None:
        """These sequences are over."""
        for sequence in sequences:
            self._counts.pop(sequence, None)
            for layer in range(len(self.start)):
                self._behind.pop((sequence, layer), None)

    def forget_all(self) -> None:
        self._counts.clear()
        self._behind.clear()

    def prompt(self, layer: int, ids: NDArray[Any], sequences: NDArray[Any]) -> None:
        """Prefill tokens of ``sequences`` [T] chose ``ids`` [T, K]."""
        if self._margin is None:
            return
        experts = len(self.start[layer])
        for sequence in np.unique(sequences).tolist():
            if sequence not in self._counts:
                self.open([sequence])
            mine = ids[sequences == sequence].ravel()
            mine = mine[(mine >= 0) & (mine < experts)]
            self._counts[sequence][layer] += np.bincount(mine, minlength=experts)
            self._behind.pop((sequence, layer), None)

    def after(self, layer: int, counts: Counts) -> BoolArray:
        """[E] what is resident after the swaps for ``counts``."""
        start = self.start[layer]
        return start if self._margin is None else swapped(start, counts, self._margin)

    def behind(self, layer: int, sequences: Sequence[int]) -> BoolArray:
        """[T, E] the experts that lie behind the link for each row's sequence."""
        return np.stack([self._of(layer, sequence) for sequence in sequences])

    def calls_behind(self, layer: int, sequences: Sequence[int], ids: NDArray[Any]) -> BoolArray:
        """[T, K] which calls go behind the link."""
        known = np.minimum(np.maximum(ids, 0), len(self.start[layer]) - 1)
        out: BoolArray = np.take_along_axis(self.behind(layer, sequences), known, axis=1) & (known == ids)
        return out

    def _of(self, layer: int, sequence: int) -> BoolArray:
        known = self._behind.get((sequence, layer))
        if known is None:
            counts = self._counts.get(sequence)
            known = ~(self.start[layer] if counts is None else self.after(layer, counts[layer]))
            self._behind[sequence, layer] = known
        return known


class RecentPlacement:
    """What a sequence alone would keep if each layer kept what that sequence has used most of late.

    Of every layer ``slots`` in proportion; an expert counts by its share of other traffic's tokens
    (``frequency``, per expert; None: all alike), and by its decayed uses in the sequence's prompt and answer.
    """

    PRIOR = 4.0  # tokens that the frequency of other traffic is worth
    DECAY = 0.97  # of a use, per token

    def __init__(self, geometry: Geometry, slots: int, frequency: NDArray[np.float32] | None) -> None:
        self._geometry = geometry
        known = np.full(geometry.total, 1e-3) if frequency is None else frequency.astype(np.float64)
        cuts = geometry.offsets[1:-1]
        self._start = [self.PRIOR * part for part in np.split(known, cuts)]
        self._kept = [slots * experts // geometry.total for experts in geometry.experts]
        self._scores: dict[int, list[NDArray[np.float64]]] = {}

    def open(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._scores[sequence] = [part.copy() for part in self._start]

    def close(self, sequences: Sequence[int]) -> None:
        """These sequences are over."""
        for sequence in sequences:
            self._scores.pop(sequence, None)

    def forget_all(self) -> None:
        self._scores.clear()

    def prompt(self, layer: int, ids: NDArray[Any], sequences: NDArray[Any]) -> None:
        """Tokens of ``sequences`` [T], in their order, chose ``ids`` [T, K]."""
        experts = self._geometry.experts[layer]
        for sequence in np.unique(sequences).tolist():
            mine = ids[sequences == sequence]
            age = np.repeat(len(mine) - 1 - np.arange(len(mine)), mine.shape[1])
            chosen = mine.ravel()
            known = (chosen >= 0) & (chosen < experts)
            added = np.bincount(chosen[known], self.DECAY ** age[known], minlength=experts)
            scores = self._of(layer, sequence)
            scores *= self.DECAY ** len(mine)
            scores += added

    def calls_behind(self, layer: int, sequences: Sequence[int], ids: NDArray[Any]) -> BoolArray:
        """[T, K] which calls go behind the link."""
        out = np.zeros(ids.shape, dtype=np.bool_)
        kept = self._kept[layer]
        for row, sequence in enumerate(sequences):
            scores = self._of(layer, sequence)
            if kept >= len(scores):
                continue
            outside = np.ones(len(scores), dtype=np.bool_)
            outside[np.argsort(-scores, kind="stable")[:kept]] = False
            known = np.clip(ids[row], 0, len(scores) - 1)
            out[row] = outside[known] & (known == ids[row])
        return out

    def _of(self, layer: int, sequence: int) -> NDArray[np.float64]:
        if sequence not in self._scores:
            self.open([sequence])
        return self._scores[sequence][layer]
