"""A predictor in a run: what the router chose goes in, forecasts come out. numpy only.

A forward pass is told layer by layer (``observe``), for all its tokens at once; after any layer,
``forecast`` looks ahead, and after the last one the tokens join their sequences' histories, from which
``wait`` tells how soon every expert is wanted again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, IntArray

from .base import NextLayer, Reuse
from .history import Context, History, Past

# A prefill chooses nearly every expert anyway: that many of its tokens, evenly spaced, stand for all.
MAX_ROWS = 32


class Session:
    """The memory of one run of one model.

    ``next_layer`` and ``reuse`` may each be None. Sequences are named by small integers; up to
    ``sequences`` of them are told apart.
    """

    def __init__(
        self,
        geometry: Geometry,
        next_layer: NextLayer | None = None,
        reuse: Reuse | None = None,
        *,
        sequences: int = 1,
    ) -> None:
        for predictor in (next_layer, reuse):
            if predictor is not None:
                name = f"the predictor {type(predictor).__name__}"
                predictor.geometry_.check_same_shape(geometry, name, "the model")
        self.geometry = geometry
        self.next_layer = next_layer
        self.reuse = reuse
        self._history = History(geometry, sequences)
        self._offsets = geometry.offsets
        self._layer = -1
        self._tokens = np.zeros(0, dtype=np.int64)  # [T] sequence of each token of the forward
        self._rows: NDArray[Any] | slice = slice(None)  # the tokens that stand for all
        self._chosen = np.zeros((0, geometry.layers, geometry.top_k), dtype=np.int32)
        self._weights: FloatArray | None = None
        self._context: Context | None = None
        self._ended: tuple[Context, Past] | None = None  # last tokens of the sequences of the last forward

    @property
    def nbytes(self) -> int:
        """Bytes of the histories this run keeps."""
        return self._history.nbytes

    def begin(self, sequence: int = 0) -> None:
        """A new sequence starts under this number."""
        if sequence >= len(self._history.length):
            self._grow(sequence + 1)
        self._history.reset(sequence)

    def _grow(self, rows: int) -> None:
        old, self._history = self._history, History(self.geometry, rows)
        for name in ("previous", "decayed", "mass", "since", "weight", "length"):
            getattr(self._history, name)[: len(old.length)] = getattr(old, name)

    def observe(
        self,
        layer: int,
        ids: NDArray[np.integer[Any]],
        weights: NDArray[np.floating[Any]] | None = None,
        *,
        sequences: NDArray[np.integer[Any]] | None = None,
        hidden: FloatArray | None = None,
        token_ids: IntArray | None = None,
    ) -> None:
        """The router of ``layer`` chose ``ids`` [T, K] (the layer's own numbers).

        Layer 0 starts a forward pass; ``sequences`` [T] (default: all 0) counts there. A token's ids that are
        negative or too large are taken as not known.
        """
        if layer == 0 or len(ids) != len(self._tokens):
            self._start(len(ids), sequences, weights is not None, token_ids)
        flat = np.asarray(ids, dtype=np.int32) + np.int32(self._offsets[layer])
        outside = (flat < self._offsets[layer]) | (flat >= self._offsets[layer + 1])
        if outside.any():
            flat[outside] = -1
        self._chosen[:, layer] = flat
        if weights is not None and self._weights is not None:
            self._weights[:, layer] = weights
        self._layer = layer
        context = self._context
        if context is not None:
            context.layer = layer
            if hidden is not None:
                context.hidden = {**(context.hidden or {}), layer: hidden[self._rows]}
            if context.chosen is not self._chosen:
                context.chosen[:, layer] = flat[self._rows]
                if context.weights is not None and weights is not None:
                    context.weights[:, layer] = weights[self._rows]
        if layer == self.geometry.layers - 1:
            self._finish()

    def _start(
        self, tokens: int, sequences: NDArray[Any] | None, weighted: bool, token_ids: IntArray | None
    ) -> None:
        shape = (tokens, self.geometry.layers, self.geometry.top_k)
        self._tokens = np.zeros(tokens, np.int64) if sequences is None else np.asarray(sequences, np.int64)
        if tokens and int(self._tokens.max()) >= len(self._history.length):
            self._grow(int(self._tokens.max()) + 1)
        self._chosen = np.full(shape, -1, dtype=np.int32)
        self._weights = np.zeros(shape, dtype=np.float32) if weighted else None
        few = tokens <= MAX_ROWS
        self._rows = slice(None)
        if not few:
            self._rows = np.linspace(0, tokens - 1, MAX_ROWS).astype(np.int64)
        self._context = None
        if self.next_layer is not None and tokens:
            self._context = Context(
                geometry=self.geometry,
                layer=0,
                chosen=self._chosen if few else self._chosen[self._rows],
                past=self._history.past(self._tokens[self._rows]),
                weights=self._weights if few or self._weights is None else self._weights[self._rows],
                token_ids=None if token_ids is None else np.asarray(token_ids, np.int32)[self._rows],
            )

    def _finish(self) -> None:
        """The tokens of the forward join their sequences' histories."""
        sequences = self._tokens.tolist()
        last = {sequence: i for i, sequence in enumerate(sequences)}
        for i, sequence in enumerate(sequences):
            if last[sequence] != i:
                self._advance(i, sequence)
        active, rows = np.asarray(list(last)), np.asarray(list(last.values()))
        before = self._history.past(active) if self.reuse is not None and len(active) else None
        for sequence, i in last.items():
            self._advance(i, sequence)
        if before is not None:
            context = Context(
                geometry=self.geometry,
                layer=self.geometry.layers - 1,
                chosen=self._chosen[rows],
                past=before,
                weights=None if self._weights is None else self._weights[rows],
            )
            self._ended = (context, self._history.past(active))

    def _advance(self, i: int, sequence: int) -> None:
        weights = None if self._weights is None else self._weights[i]
        self._history.advance(sequence, self._chosen[i], weights)

    def forecast(self, horizon: int = 1) -> FloatArray | None:
        """[E] chance that layer ``layer + horizon`` of the running forward wants each expert, for at least
        one token; None if there is no such layer or the predictor does not look so far."""
        context, predictor = self._context, self.next_layer
        if context is None or predictor is None or not 1 <= horizon <= predictor.horizons:
            return None
        if self._layer + horizon >= self.geometry.layers:
            return None
        each = predictor.probabilities(context, horizon)  # [rows, E]
        if len(self._tokens) == 1:
            return np.asarray(each[0], dtype=np.float32)
        nobody = np.prod(1.0 - each, axis=0, dtype=np.float32)
        share = len(self._tokens) / len(each)
        return np.asarray(1.0 - nobody**share, dtype=np.float32)

    def wait(self) -> FloatArray | None:
        """[total] expected forward passes until each expert's next use, by any sequence of the last forward.

        Call it after the last layer, off the critical path. With several sequences their rates of use add up.
        """
        if self.reuse is None or self._ended is None:
            return None
        each = self.reuse.wait(*self._ended)  # [n, total]
        if len(each) == 1:
            return np.asarray(each[0], dtype=np.float32)
        return np.asarray(np.maximum(1.0, 1.0 / (1.0 / each).sum(axis=0)), dtype=np.float32)
