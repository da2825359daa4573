"""What predictors are fitted on: the routing of whole sequences, and nothing about files.

Shapes: N tokens, L MoE layers, K choices per token, S sequences; ids are flat (``Geometry``), -1 where a
choice was not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, FloatArray, Geometry, IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Gates:
    """A model's routers: ``weights[l]`` [E, H], ``biases[l]`` [E] or None, ``corrections[l]`` [E] (added to
    the sigmoid of the logits when experts are selected) or None, ``norms[l]`` [H] weight of the norm before
    the layer."""

    weights: Sequence[FloatArray]
    biases: Sequence[FloatArray | None]
    corrections: Sequence[FloatArray | None]
    norms: Sequence[FloatArray | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Hidden:
    """Sampled inputs of the routers: ``values`` [n, L, H] of the tokens ``rows`` [n] of the routing,
    ascending."""

    rows: NDArray[np.int64]
    values: NDArray[np.float16]
    gates: Gates

    def of_rows(self, rows: NDArray[np.int64]) -> Hidden:
        """What belongs to the given rows, numbered anew by their place in ``rows``."""
        order = np.argsort(rows, kind="stable")
        at = np.searchsorted(rows[order], self.rows)
        inside = np.minimum(at, max(len(rows) - 1, 0))
        found = rows[order][inside] == self.rows if len(rows) else np.zeros(len(self.rows), np.bool_)
        places = order[inside[found]]
        ranked = np.argsort(places, kind="stable")
        return Hidden(rows=places[ranked], values=self.values[found][ranked], gates=self.gates)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Tokens in order, sequence after sequence: sequence s has rows ``offsets[s]:offsets[s + 1]``.

    ``flat`` [N, L, K], strongest choice first where known; ``weights`` [N, L, K] router weights or None;
    ``token_ids`` [N] or None; ``position`` [N]; ``hidden`` for predictors that need hidden states.
    """

    geometry: Geometry
    flat: IntArray
    offsets: NDArray[np.int64]
    weights: NDArray[np.floating[Any]] | None = None
    token_ids: IntArray | None = None
    hidden: Hidden | None = None

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    def select(self, sequences: NDArray[np.integer[Any]]) -> Routing:
        """Only these sequences (indices), in this order."""
        parts = [np.arange(self.offsets[s], self.offsets[s + 1]) for s in sequences]
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return replace(
            self,
            flat=self.flat[rows],
            offsets=np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64),
            weights=None if self.weights is None else self.weights[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            hidden=None if self.hidden is None else self.hidden.of_rows(rows),
        )

    def sample(self, max_tokens: int, seed: int = 0) -> Routing:
        """Whole sequences, drawn at random, up to about ``max_tokens``; self if it is small enough."""
        if len(self) <= max_tokens:
            return self
        order = np.random.default_rng(seed).permutation(self.sequences)
        lengths = np.diff(self.offsets)[order]
        count = max(1, int(np.searchsorted(np.cumsum(lengths), max_tokens, side="right")))
        return self.select(np.sort(order[:count]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """How often each sequence chose each expert: ``counts`` [S, total] by flat id, ``tokens`` [S]."""

    geometry: Geometry
    counts: NDArray[np.uint32]
    tokens: IntArray


def one_hot(flat: IntArray, total: int) -> FloatArray:
    """[n, ...] flat ids to [n, total] 0/1; absent ids (-1) mark nothing."""
    n = len(flat)
    out = np.zeros((n, total + 1), dtype=np.float32)
    out[np.arange(n)[:, None], flat.reshape(n, -1)] = 1.0  # -1 lands in the spare column
    return out[:, :total]


def popularity(data: Routing | Counts) -> FloatArray:
    """[total] share of tokens that chose each expert, kept off 0 and 1 by half a token."""
    if isinstance(data, Counts):
        chosen = data.counts.sum(axis=0, dtype=np.float64)
        tokens = np.full(len(chosen), float(data.tokens.sum()))
    else:
        ids = data.flat[data.flat >= 0]
        chosen = np.bincount(ids, minlength=data.geometry.total).astype(np.float64)
        recorded = (data.flat[:, :, 0] >= 0).sum(axis=0)
        tokens = np.repeat(recorded, data.geometry.experts).astype(np.float64)
    if np.sum(tokens) == 0:
        raise DaopError(
            "nothing to fit on: the training side of the trace has no tokens; record more sequences"
        )
    return np.asarray((chosen + 0.5) / (tokens + 1.0), dtype=np.float32)


def next_use(data: Routing, cap: int) -> NDArray[np.int16]:
    """[N, total] tokens until each expert's next use in its sequence, 1 for the very next token, at most
    ``cap``; where the sequence ends first, what was seen until then negated: at least that many."""
    total = data.geometry.total
    out = np.empty((len(data), total), dtype=np.int16)
    for first, end in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        upcoming = np.full(total, 1 << 30, dtype=np.int64)
        for row in range(int(end) - 1, int(first) - 1, -1):
            left = int(end) - 1 - row
            wait = upcoming - row
            out[row] = np.where(wait > left, -min(left, cap), np.minimum(wait, cap))
            if left >= cap:
                out[row][out[row] < 0] = cap
            chosen = data.flat[row].ravel()
            upcoming[chosen[chosen >= 0]] = row
    return out
