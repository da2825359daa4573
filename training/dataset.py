"""From a trace file to what predictors are fitted on, within a bound on memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from daop.core import DaopError
from daop.predictors.data import Counts, Routing

from .parquet import TraceFile, read_any
from .trace import CountsTrace, Trace

log = logging.getLogger(__name__)


def to_routing(trace: Trace) -> Routing:
    """The same tokens, grouped by sequence, with flat ids."""
    if len(trace) == 0:
        raise DaopError("the trace has no tokens; record or import it again")
    trace = trace.grouped()
    return Routing(
        geometry=trace.geometry,
        flat=trace.flat,
        offsets=trace.offsets,
        weights=trace.weights,
        token_ids=trace.token_ids,
    )


def to_counts(trace: CountsTrace) -> Counts:
    """The same counts in the predictors' own form."""
    return Counts(geometry=trace.geometry, counts=trace.counts, tokens=trace.tokens)


def read_bounded(path: Path, max_tokens: int | None, seed: int = 0) -> Trace | CountsTrace:
    """The trace at ``path``; of one with more tokens than ``max_tokens`` whole sequences, drawn at random."""
    file = TraceFile(path)
    if max_tokens is None or file.kind == "counts" or file.rows <= max_tokens:
        return read_any(path)
    lengths = file.lengths()
    order = np.random.default_rng(seed).permutation(sorted(lengths))
    fits = int(np.searchsorted(np.cumsum([lengths[int(s)] for s in order]), max_tokens, side="right"))
    kept = [int(s) for s in order[: max(2, fits)]]
    log.info("%s: %d of %d sequences, drawn at random, to bound memory", path, len(kept), len(lengths))
    return file.read_sequences(kept)


def read_traces(paths: Sequence[Path], max_tokens: int | None = None, seed: int = 0) -> Trace | CountsTrace:
    """Several traces of one model as one; sequences are renumbered so that none collide."""
    traces = [read_bounded(path, max_tokens, seed) for path in paths]
    first = traces[0]
    for path, other in zip(paths[1:], traces[1:], strict=True):
        first.geometry.check_same_shape(other.geometry, str(paths[0]), str(path))
        if type(other) is not type(first):
            raise DaopError(f"{path} and {paths[0]}: one holds tokens, the other counts; train on them apart")
    if len(traces) == 1:
        return first
    if isinstance(first, CountsTrace):
        counts = [t for t in traces if isinstance(t, CountsTrace)]
        return CountsTrace(
            geometry=first.geometry,
            sequence=np.arange(sum(map(len, counts)), dtype=np.int32),
            tokens=np.concatenate([t.tokens for t in counts]),
            counts=np.concatenate([t.counts for t in counts]),
        )
    return _join([t.grouped() for t in traces if isinstance(t, Trace)])


def _join(traces: list[Trace]) -> Trace:
    numbered, start = [], 0
    for trace in traces:
        lengths = np.diff(trace.offsets)
        numbered.append(np.repeat(np.arange(start, start + len(lengths), dtype=np.int32), lengths))
        start += len(lengths)
    columns = {}
    for name in ("position", "phase", "ids", "weights", "token_ids"):
        parts = [getattr(t, name) for t in traces]
        if any(p is None for p in parts) and any(p is not None for p in parts):
            log.warning("column %r is missing in some of the traces and is left out", name)
        columns[name] = None if any(p is None for p in parts) else np.concatenate(parts)
    return Trace(
        geometry=traces[0].geometry,
        sequence=np.concatenate(numbered),
        complete=all(t.complete for t in traces),
        **columns,  # type: ignore[arg-type]
    )
