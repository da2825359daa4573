"""Turns recorded routing into the forward passes that a server would run.

A trace is arrays: ``ids`` [N, L, K] experts per token and MoE layer (-1: not recorded), ``sequence`` [N]
in ascending runs, ``prefill`` bool [N] or None (a trace of decode alone). With a batch of B sequences in
flight, each forward decodes one token of every running sequence, and a sequence that ends makes room for
the next (continuous batching). A sequence's prefill tokens run as forwards of their own, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, DaopError, Geometry, Phase

FORECASTS = ("distances", "forecast_ids", "forecast_weights")
BLOCK = 2048  # tokens whose lists are made in one numpy call


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Recorded routing, checked against a geometry."""

    geometry: Geometry
    ids: NDArray[Any]  # [N, L, K]
    sequence: NDArray[Any]  # [N]
    prefill: BoolArray | None = None  # [N]
    weights: NDArray[Any] | None = None  # [N, L, K]
    distances: NDArray[Any] | None = None  # [N, L], NaN: nothing was announced
    forecast_ids: NDArray[Any] | None = None  # [N, L, K]
    forecast_weights: NDArray[Any] | None = None  # [N, L, K]

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or len(self.ids) == 0:
            raise DaopError("the trace holds no tokens")
        tokens, layers, k = self.ids.shape
        if layers != self.geometry.layers:
            raise DaopError(f"the trace has {layers} MoE layers, the model's geometry {self.geometry.layers}")
        if k > min(self.geometry.experts):
            raise DaopError(f"the trace has {k} experts per token, a layer only {min(self.geometry.experts)}")
        for name, array in (("sequence", self.sequence), ("prefill", self.prefill)):
            if array is not None and len(array) != tokens:
                raise DaopError(f"the trace has {tokens} tokens, but {len(array)} entries in {name!r}")
        for name in ("weights", "forecast_ids", "forecast_weights"):
            array = getattr(self, name)
            if array is not None and array.shape != self.ids.shape:
                raise DaopError(f"the trace's {name} differ in shape from its experts")
        if self.distances is not None and self.distances.shape != self.ids.shape[:2]:
            raise DaopError("the trace's distances are not one for each token and MoE layer")
        if self.ids.min() < -1 or (self.ids >= np.asarray(self.geometry.experts)[:, None]).any():
            raise DaopError("the trace names an expert that the model's geometry does not have")

    def head(self, tokens: int) -> Traffic:
        """Only the first tokens."""
        columns: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[:tokens]
            for name in ("ids", "sequence", "prefill", "weights", *FORECASTS)
        }
        return replace(self, **columns)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and past-the-end token of each sequence."""
        cuts = np.flatnonzero(np.diff(self.sequence)) + 1
        edges = [0, *cuts.tolist(), len(self.ids)]
        return list(pairwise(edges))


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One forward pass: per layer the distinct experts (flat, ascending), tokens and router weights."""

    phase: Phase
    rows: int
    token_ids: Sequence[int]  # which tokens of the trace
    starts: Sequence[int]  # sequences (by number) that begin with this pass
    first: Sequence[int]  # sequences whose first token to be counted this pass yields
    experts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]] | None
    context: int = 0  # tokens that the rows see, summed over them


class Lists:
    """Flat ids of each token and layer as sorted Python lists, made in blocks: the hot loop's food."""

    def __init__(self, traffic: Traffic) -> None:
        self._ids = traffic.ids
        self._weights = traffic.weights
        self._offsets = np.asarray(traffic.geometry.offsets[:-1], dtype=np.int32)[:, None]
        self._blocks: dict[int, tuple[list[list[list[int]]], list[list[list[float]]] | None]] = {}

    def token(self, token: int) -> tuple[list[list[int]], list[list[float]] | None]:
        """Per layer: sorted flat ids, and their weights."""
        number, inside = divmod(token, BLOCK)
        if number not in self._blocks:
            if len(self._blocks) > 64:
                self._blocks.pop(next(iter(self._blocks)))
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            flat = self._ids[part].astype(np.int32)
            absent = flat < 0
            flat += self._offsets
            order = np.argsort(flat, axis=-1, kind="stable")
            weights = None
            if self._weights is not None:
                taken = np.take_along_axis(self._weights[part], order, axis=-1)
                weights = taken.astype(np.float32).tolist()
            flats = np.take_along_axis(flat, order, axis=-1).tolist()
            if absent.any():
                there = np.take_along_axis(~absent, order, axis=-1).tolist()
                flats = _only(flats, there)
                weights = None if weights is None else _only(weights, there)
            self._blocks[number] = (flats, weights)
        flats, weighed = self._blocks[number]
        return flats[inside], None if weighed is None else weighed[inside]


def _only(values: list[list[list[Any]]], there: list[list[list[bool]]]) -> list[list[list[Any]]]:
    """Values of the experts that are there."""
    return [
        [list(compress(row, kept)) for row, kept in zip(token, keep, strict=True)]
        for token, keep in zip(values, there, strict=True)
    ]


def forwards(traffic: Traffic, batch: int = 1, prefill_chunk: int = 512) -> Iterator[Forward]:
    """The forward passes that serve a trace, in order."""
    if batch < 1 or prefill_chunk < 1:
        raise DaopError("the batch and the prefill chunk must be at least 1")
    lists = Lists(traffic)
    spans = traffic.spans
    waiting = list(reversed(list(enumerate(spans))))
    running: list[list[int]] = []  # [next token, past-the-end token, sequence number, started]
    while waiting or running:
        while waiting and len(running) < batch:
            number, (begin, end) = waiting.pop()
            after = _prefill_end(traffic, begin, end)
            for at in range(begin, after, prefill_chunk):
                chunk = range(at, min(at + prefill_chunk, after))
                starts = [number] if at == begin else []
                seen = sum(range(chunk.start - begin + 1, chunk.stop - begin + 1))
                ended = [number] if chunk.stop == after else []
                yield merge(lists, Phase.PREFILL, chunk, starts, ended, seen)
            if after < end:
                running.append([after, end, number, int(after > begin)])
        if not running:
            continue
        first = [entry[2] for entry in running if not entry[3]]
        seen = sum([1 + entry[0] - spans[entry[2]][0] for entry in running])
        yield merge(lists, Phase.DECODE, [entry[0] for entry in running], first, first, seen)
        for entry in running:
            entry[0] += 1
            entry[3] = 1
        running = [entry for entry in running if entry[0] < entry[1]]


def _prefill_end(traffic: Traffic, begin: int, end: int) -> int:
    if traffic.prefill is None:
        return begin
    decode = np.flatnonzero(~traffic.prefill[begin:end])
    return begin + int(decode[0]) if len(decode) else end


def merge(
    lists: Lists,
    phase: Phase,
    token_ids: Sequence[int],
    starts: Sequence[int],
    first: Sequence[int],
    context: int = 0,
) -> Forward:
    """One forward over several tokens: experts that several of them chose are counted together."""
    rows = len(token_ids)
    if rows == 1:
        experts, weights = lists.token(token_ids[0])
        widest = [1] * max(map(len, experts))
        ones = [widest if len(row) == len(widest) else [1] * len(row) for row in experts]
        return Forward(phase, 1, token_ids, starts, first, experts, ones, weights, context)
    parts = [lists.token(token) for token in token_ids]
    per_layer: list[list[int]] = []
    counts: list[list[int]] = []
    sums: list[list[float]] = []
    weighed = parts[0][1] is not None
    for layer in range(len(parts[0][0])):
        count: dict[int, int] = {}
        total: dict[int, float] = {}
        for flats, weights in parts:
            for index, flat in enumerate(flats[layer]):
                count[flat] = count.get(flat, 0) + 1
                if weights is not None:
                    total[flat] = total.get(flat, 0.0) + weights[layer][index]
        chosen = sorted(count)
        per_layer.append(chosen)
        counts.append([count[flat] for flat in chosen])
        sums.append([total[flat] for flat in chosen] if weighed else [])
    weight_sums = sums if weighed else None
    return Forward(phase, rows, token_ids, starts, first, per_layer, counts, weight_sums, context)
