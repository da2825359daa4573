"""What the past of a sequence looks like to a predictor: the same numbers online and offline.

``History`` keeps, for each of R sequences, what its tokens chose so far; ``Context`` is what is known at one
layer of one forward pass: the histories before it and the choices of its own layers so far.
Shapes: R sequences, T tokens of a forward, L layers, K choices, W half-lives, total = all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, IntArray

from .data import Routing

HALF_LIVES = (2, 8, 32, 128)
_DECAY = np.asarray([0.5 ** (1 / h) for h in HALF_LIVES], dtype=np.float32)
NEVER = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """Histories of n rows, read-only.

    ``previous`` [n, L, K] flat ids that the latest token chose (-1: there was none); ``frequency`` [n, W,
    total] share of recent tokens that chose each expert, older ones counting half per half-life, drawn
    towards K/E while there are few; ``since`` [n, total] tokens since the last use (0: the latest token; at
    most ``NEVER``); ``weight`` [n, total] router weight at the last use (NaN: unknown); ``length`` [n]
    tokens so far.
    """

    previous: IntArray
    frequency: FloatArray
    since: IntArray
    weight: FloatArray
    length: IntArray

    def rows(self, index: NDArray[Any]) -> Past:
        return Past(
            previous=self.previous[index],
            frequency=self.frequency[index],
            since=self.since[index],
            weight=self.weight[index],
            length=self.length[index],
        )


class History:
    """The pasts of up to R sequences that grow token by token."""

    def __init__(self, geometry: Geometry, rows: int = 1) -> None:
        total = geometry.total
        self.geometry = geometry
        self._prior = (geometry.top_k / np.repeat(geometry.experts, geometry.experts)).astype(np.float32)
        self.previous = np.full((rows, geometry.layers, geometry.top_k), -1, dtype=np.int32)
        self.decayed = np.zeros((rows, len(HALF_LIVES), total), dtype=np.float32)
        self.mass = np.zeros((rows, len(HALF_LIVES)), dtype=np.float32)
        self.since = np.full((rows, total), NEVER, dtype=np.int32)
        self.weight = np.full((rows, total), np.nan, dtype=np.float32)
        self.length = np.zeros(rows, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        kept = (self.previous, self.decayed, self.mass, self.since, self.weight, self.length)
        return sum(a.nbytes for a in kept)

    def reset(self, row: int) -> None:
        """A new sequence takes this row."""
        self.previous[row] = -1
        self.decayed[row] = 0
        self.mass[row] = 0
        self.since[row] = NEVER
        self.weight[row] = np.nan
        self.length[row] = 0

    def advance(self, row: int, chosen: IntArray, weights: NDArray[Any] | None = None) -> None:
        """The next token of a sequence chose ``chosen`` [L, K] (flat ids, -1 where not known)."""
        flat = chosen.ravel()
        known = flat
        if (flat < 0).any():
            known = flat[flat >= 0]
        decayed = self.decayed[row]
        decayed *= _DECAY[:, None]
        decayed[:, known] += 1.0
        self.mass[row] = self.mass[row] * _DECAY + 1.0
        since = self.since[row]
        np.minimum(since + 1, NEVER, out=since)
        since[known] = 0
        if weights is not None:
            self.weight[row, known] = weights.ravel()[flat >= 0]
        self.previous[row] = chosen
        self.length[row] += 1

    def past(self, rows: NDArray[Any] | slice = slice(None)) -> Past:
        """The pasts of these rows; a copy where it must be, so that it stays true while the rows grow."""
        mass = self.mass[rows][:, :, None]
        return Past(
            previous=self.previous[rows].copy(),
            frequency=(self.decayed[rows] + self._prior) / (mass + 1.0),
            since=self.since[rows].copy(),
            weight=self.weight[rows].copy(),
            length=self.length[rows].copy(),
        )


@dataclass(kw_only=True, eq=False)
class Context:
    """One forward pass at one layer: its router is known for layers 0 to ``layer``.

    ``chosen`` [T, L, K] flat ids; entries of later layers must not be read. ``past`` has T rows. ``hidden``
    [T, H] is the input of MoE layer ``layer``. ``memo`` belongs to the predictor: it may keep there what it
    computed for earlier layers of the same forward.
    """

    geometry: Geometry
    layer: int
    chosen: IntArray
    past: Past
    weights: NDArray[Any] | None = None
    token_ids: IntArray | None = None
    hidden: dict[int, FloatArray] | None = None
    memo: dict[str, Any] = field(default_factory=dict)


def walk(data: Routing, chunk: int = 512) -> Iterator[tuple[slice, Past, Past]]:
    """The pasts before and after every token, in chunks of rows: ``(rows, before, after)``."""
    history = History(data.geometry)
    starts = set(data.offsets[:-1].tolist())
    for first in range(0, len(data), chunk):
        rows = slice(first, min(first + chunk, len(data)))
        n = rows.stop - rows.start
        buffer = _Buffer(data.geometry, n + 1)
        # Slot i holds the past before token i; the slot after it is also before the next token, unless a
        # sequence starts.
        fresh: list[int] = []
        buffer.put(0, history)
        for i in range(n):
            if rows.start + i in starts:
                history.reset(0)
                fresh.append(i)
            weights = None if data.weights is None else data.weights[rows.start + i]
            history.advance(0, data.flat[rows.start + i], weights)
            buffer.put(i + 1, history)
        after = buffer.past(slice(1, n + 1))
        before = buffer.past(slice(0, n), fresh)
        yield rows, before, after


class _Buffer:
    """Snapshots of a one-row history."""

    def __init__(self, geometry: Geometry, n: int) -> None:
        self.store = History(geometry, n)

    def put(self, i: int, history: History) -> None:
        for name in ("previous", "decayed", "mass", "since", "weight", "length"):
            getattr(self.store, name)[i] = getattr(history, name)[0]

    def past(self, rows: slice, fresh: list[int] | None = None) -> Past:
        past = self.store.past(rows)
        if fresh:
            blank = History(self.store.geometry).past()
            for name in ("previous", "frequency", "since", "weight", "length"):
                getattr(past, name)[fresh] = getattr(blank, name)[0]
        return past


def contexts(data: Routing, chunk: int = 512) -> Iterator[tuple[slice, Context]]:
    """Every token as a forward of its own, ``chunk`` tokens side by side; ``layer`` starts at 0.

    Raise ``context.layer`` from 0 to L - 1 to pass through the layers as a run would.
    """
    for rows, before, _ in walk(data, chunk):
        yield (
            rows,
            Context(
                geometry=data.geometry,
                layer=0,
                chosen=data.flat[rows],
                past=before,
                weights=None if data.weights is None else data.weights[rows],
                token_ids=None if data.token_ids is None else data.token_ids[rows],
            ),
        )


def previous_choices(data: Routing, rows: NDArray[np.int64]) -> IntArray:
    """[n, L, K] what the token before each of ``rows`` chose; -1 where it is its sequence's first."""
    out = data.flat[np.maximum(rows - 1, 0)].copy()
    out[np.isin(rows, data.offsets[:-1])] = -1
    return out


def hidden_contexts(data: Routing, chunk: int = 256) -> Iterator[tuple[NDArray[np.int64], Context]]:
    """The tokens whose hidden states were sampled, as ``contexts`` gives them, but their pasts know nothing
    beyond what the previous token chose."""
    if data.hidden is None:
        return
    previous = previous_choices(data, data.hidden.rows)
    for first in range(0, len(data.hidden.rows), chunk):
        rows = data.hidden.rows[first : first + chunk]
        values = data.hidden.values[first : first + chunk].astype(np.float32)
        yield (
            rows,
            Context(
                geometry=data.geometry,
                layer=0,
                chosen=data.flat[rows],
                past=replace(
                    History(data.geometry, len(rows)).past(), previous=previous[first : first + chunk]
                ),
                weights=None if data.weights is None else data.weights[rows],
                token_ids=None if data.token_ids is None else data.token_ids[rows],
                hidden={layer: values[:, layer] for layer in range(data.geometry.layers)},
            ),
        )
