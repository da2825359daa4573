"""Notices every forward pass of a transformers model, however it is called: prefill or decode, which
sequences, which rows are padding. The executor and the trace need to know, and transformers' experts
modules are not told."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import Phase
from daop.runtime.around import Around
from daop.runtime.executor import Executor

CACHE_ARGUMENTS = ("cache", "past_key_values")  # transformers renamed it within version 5


class ForwardWatch:
    """Hooks on a model that announce its forward passes to an executor and its recorder."""

    def __init__(
        self,
        model: torch.nn.Module,
        executor: Executor,
        between: Around,
    ) -> None:
        self._executor = executor
        self._early = between.early
        self._tap = between.tap
        self._sequence = 0  # number of the running batch's first sequence in the trace
        self._begun = False  # whether anything of it was run
        self._ended: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._model = model
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def next_sequences(self, count: int) -> None:
        """The ``count`` sequences of the running batch, if anything of it was run, are over."""
        self._sequence += count if self._begun else 0
        self._begun = False

    def _before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds", args[0] if args else None)
        if tokens is None:
            return
        self._begun = True
        rows, length = int(tokens.shape[0]), int(tokens.shape[1])
        cache = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        seen = int(cache.get_seq_length()) if cache is not None else 0
        phase = Phase.DECODE if length == 1 and seen > 0 else Phase.PREFILL
        new = rows if seen == 0 else 0
        recorder = self._executor.recorder
        if recorder is None and self._early is None:
            self._executor.begin_forward(phase, rows * length, new)
            return
        positions, real = _positions(kwargs, rows, length, seen)
        if self._early is not None:
            self._early.begin(phase, rows * length, rows, new > 0, real)
        if recorder is None:
            self._executor.begin_forward(phase, rows * length, new)
            return
        sequences = np.arange(self._sequence, self._sequence + rows, dtype=np.int32).repeat(length)
        ids = tokens.reshape(-1).cpu().numpy() if tokens.dim() == 2 else None
        if new:
            self._ended = np.zeros(rows, dtype=np.bool_)
        elif rows > 1 and ids is not None and phase is Phase.DECODE:
            real = real[~self._has_ended(ids)[real]]
        some = None if len(real) == rows * length else real
        self._executor.begin_forward(phase, rows * length, new, some)
        if self._tap is not None:
            self._tap.begin(phase, some)
        recorder.begin_forward(phase, sequences[real], positions[real], None if ids is None else ids[real])

    def _has_ended(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of a decode step only wait for the others: they were given their end token, or more."""
        end = getattr(getattr(self._model, "generation_config", None), "eos_token_id", None)
        if end is not None:
            ends = {end} if isinstance(end, int) else set(end)
            self._ended = self._ended | np.asarray([token in ends for token in ids.tolist()])
        return self._ended

    def _after(self, *_: Any) -> None:
        if self._executor.recorder is not None:
            self._executor.recorder.end_forward()


def _positions(
    kwargs: dict[str, Any], rows: int, length: int, seen: int
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Position of every token in its own sequence [B * S], and the indices of those that are not padding."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2 or mask.shape[1] != seen + length:
        at = np.tile(np.arange(seen, seen + length, dtype=np.int32), rows)
        return at, np.arange(rows * length)
    marks = mask.cpu().numpy().astype(np.int32)
    at = (np.cumsum(marks, axis=1) - 1)[:, seen:].astype(np.int32).reshape(-1)
    return at, np.flatnonzero(marks[:, seen:])
