"""A trace in memory: which experts every token chose in every MoE layer.

Shapes: N tokens, L MoE layers, K experts per token, S sequences. ``ids`` holds each layer's own
expert numbers (not flat ids), strongest first where the source knows; ``ABSENT`` marks a choice that was
not recorded (a last layer that prefill never computed, say). A column the source lacks is None.

Two kinds of trace: ``Trace`` has one row per token, ``CountsTrace`` one row per sequence with how often
each expert was chosen; some predictors can be fitted on the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, DaopError, FloatArray, Geometry, IntArray, Phase

ABSENT = 0xFFFF
PHASES = (Phase.PREFILL, Phase.DECODE)
DECODE = PHASES.index(Phase.DECODE)
FORECASTS = ("distances", "forecast_ids", "forecast_weights")
OPTIONAL = ("weights", "hits", "forward", "token_ids", *FORECASTS)

IdArray = NDArray[np.uint16]
HalfArray = NDArray[np.float16]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Routing of N tokens, in the order they were recorded.

    ``sequence`` [N] names the sequence of each token, ``position`` [N] its place in it, ``phase`` [N]
    indexes ``PHASES``; ``ids`` [N, L, K]; ``weights`` [N, L, K] are the router weights of the chosen;
    ``hits`` [N, L, K] says which choices the recording engine found in its expert cache;
    ``forward`` [N] numbers the forward pass; ``token_ids`` [N] are the input tokens.
    ``distances`` [N, L]: of the input that was announced for the layer from the true one, relative to its
    norm (NaN: nothing was announced); ``forecast_ids``, ``forecast_weights`` [N, L, K]: what the layer's
    router named for the announced input. ``complete`` is False for a recording that was cut off.
    """

    geometry: Geometry
    sequence: IntArray
    position: IntArray
    phase: NDArray[np.uint8]
    ids: IdArray
    weights: HalfArray | None = None
    hits: BoolArray | None = None
    forward: IntArray | None = None
    token_ids: IntArray | None = None
    distances: FloatArray | None = None
    forecast_ids: IdArray | None = None
    forecast_weights: HalfArray | None = None
    source: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        n = len(self.sequence)
        choices = (n, self.geometry.layers, self.geometry.top_k)
        wanted = {
            "position": (n,),
            "phase": (n,),
            "ids": choices,
            "weights": choices,
            "hits": choices,
            "forward": (n,),
            "token_ids": (n,),
            "distances": choices[:2],
            "forecast_ids": choices,
            "forecast_weights": choices,
        }
        for name, shape in wanted.items():
            column = getattr(self, name)
            if column is not None and column.shape != shape:
                raise DaopError(
                    f"trace column {name!r} has shape {column.shape}, the geometry asks for {shape}"
                )

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def is_grouped(self) -> bool:
        """Every sequence's tokens stand together, in order of position."""
        change = np.flatnonzero(np.diff(self.sequence)) + 1
        starts = self.sequence[np.concatenate([[0], change])] if len(self) else self.sequence
        same = np.diff(self.sequence) == 0
        ordered = bool(np.all(np.diff(self.position)[same] > 0))
        return ordered and len(np.unique(starts)) == len(starts)

    def grouped(self) -> Trace:
        """The same tokens sorted by (sequence, position); self if they already are.

        Raises DaopError if two tokens claim the same place.
        """
        if self.is_grouped:
            return self
        order = np.lexsort((self.position, self.sequence))
        sequence, position = self.sequence[order], self.position[order]
        twice = np.flatnonzero((np.diff(sequence) == 0) & (np.diff(position) == 0))
        if len(twice):
            raise DaopError(
                f"two tokens of the trace are position {position[twice[0]]} of sequence "
                f"{sequence[twice[0]]}: recordings that number their sequences alike were joined; "
                "keep each in a file of its own"
            )
        return self.take(order)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[S + 1] first row of every sequence of a grouped trace, and N."""
        if not self.is_grouped:
            raise ValueError("offsets need a grouped trace; call grouped() first")
        change = np.flatnonzero(np.diff(self.sequence)) + 1
        first = [0] if len(self) else []
        return np.concatenate([first, change, [len(self)]]).astype(np.int64)

    @property
    def sequences(self) -> IntArray:
        """[S] the sequence numbers of a grouped trace, in row order."""
        return self.sequence[self.offsets[:-1]]

    @cached_property
    def flat(self) -> IntArray:
        """[N, L, K] flat ids; -1 where absent."""
        shift = np.asarray(self.geometry.offsets[:-1], dtype=np.int32)[None, :, None]
        return np.where(self.ids == ABSENT, np.int32(-1), self.ids.astype(np.int32) + shift)

    def take(self, rows: NDArray[Any] | slice) -> Trace:
        """The chosen rows, in the given order."""
        columns = ("sequence", "position", "phase", "ids", *OPTIONAL)
        picked: dict[str, Any] = {
            c: None if getattr(self, c) is None else getattr(self, c)[rows] for c in columns
        }
        return replace(self, **picked)

    def select(self, sequences: Sequence[int] | IntArray) -> Trace:
        """Only the tokens of these sequences."""
        return self.take(np.flatnonzero(np.isin(self.sequence, np.asarray(sequences))))

    def validate(self, name: str) -> Trace:
        """Raise DaopError if an id lies outside its layer, a token chose an expert twice, or the like."""
        limit = np.asarray(self.geometry.experts, dtype=np.uint16)[None, :, None]
        wrong = self.ids >= limit
        if wrong.any():
            wrong &= self.ids != ABSENT
        if wrong.any():
            row, layer, slot = (int(i[0]) for i in np.nonzero(wrong))
            raise DaopError(
                f"{name}: row {row}, layer {layer} names expert {self.ids[row, layer, slot]}, but that layer "
                f"has {self.geometry.experts[layer]}; the trace is damaged or of another model"
            )
        twice = _first_repeated(self.ids)
        if twice is not None:
            row, layer = twice
            raise DaopError(
                f"{name}: row {row}, layer {layer} chose {self.ids[row, layer].tolist()}, the same expert "
                "twice; a router never does, so the trace is damaged or was converted wrongly"
            )
        if (self.phase >= len(PHASES)).any():
            raise DaopError(
                f"{name}: a token is of phase {self.phase.max()}, but there are prefill (0) and decode (1)"
            )
        for weights in (self.weights, self.forecast_weights):
            if weights is not None and not np.isfinite(weights).all():
                raise DaopError(
                    f"{name}: router weights hold NaN or infinity; drop the column or record again"
                )
        if (
            self.forecast_ids is not None
            and ((self.forecast_ids >= limit) & (self.forecast_ids != ABSENT)).any()
        ):
            raise DaopError(f"{name}: forecast_ids name an expert that its layer does not have; record again")
        if self.distances is not None and (self.distances < 0).any():
            raise DaopError(f"{name}: distances are negative; record again")
        return self


def _first_repeated(ids: IdArray) -> tuple[int, int] | None:
    for a in range(ids.shape[2]):
        for b in range(a + 1, ids.shape[2]):
            same = ids[:, :, a] == ids[:, :, b]
            if same.any():
                same &= ids[:, :, a] != ABSENT
                if same.any():
                    row, layer = np.argwhere(same)[0]
                    return int(row), int(layer)
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class CountsTrace:
    """How often each sequence chose each expert: ``counts`` [S, total] by flat id, ``tokens`` [S]."""

    geometry: Geometry
    sequence: IntArray
    tokens: IntArray
    counts: NDArray[np.uint32]
    source: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequence)

    def summed(self) -> CountsTrace:
        """All sequences as one."""
        return replace(
            self,
            sequence=self.sequence[:1],
            tokens=self.tokens.sum(keepdims=True, dtype=np.int32),
            counts=self.counts.sum(axis=0, keepdims=True, dtype=np.uint32),
        )

    def validate(self, name: str) -> CountsTrace:
        """Raise DaopError unless every layer's counts sum to top-k times the sequence's tokens."""
        if self.counts.shape != (len(self), self.geometry.total) or self.tokens.shape != (len(self),):
            raise DaopError(
                f"{name}: counts have shape {self.counts.shape}, not sequences x {self.geometry.total}"
            )
        sums = np.add.reduceat(self.counts.astype(np.int64), self.geometry.offsets[:-1], axis=1)
        wrong = np.argwhere(sums != self.geometry.top_k * self.tokens[:, None].astype(np.int64))
        if len(wrong):
            row, layer = (int(i) for i in wrong[0])
            raise DaopError(
                f"{name}: sequence {self.sequence[row]}, layer {layer} counts {sums[row, layer]} choices, "
                f"not {self.tokens[row]} tokens x top-{self.geometry.top_k}"
            )
        return self


def counts_of(trace: Trace) -> CountsTrace:
    """The counts-only view of a token trace."""
    trace = trace.grouped()
    sequences = trace.sequences
    counts = np.zeros((len(sequences), trace.geometry.total), dtype=np.uint32)
    for i, (a, b) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        chosen = trace.flat[a:b].ravel()
        counts[i] = np.bincount(chosen[chosen >= 0], minlength=trace.geometry.total)
    return CountsTrace(
        geometry=trace.geometry,
        sequence=sequences,
        tokens=np.diff(trace.offsets).astype(np.int32),
        counts=counts,
        source=trace.source,
    )
