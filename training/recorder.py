"""Recording the routing of a run into a trace file, at the price of a few array copies per layer.

The run's thread only copies ids and weights into place; a worker thread turns full row groups into Parquet.
If writing fails, the next ``end_forward`` or ``close`` raises: a recording is never silently short.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from daop.core import DaopError, Geometry, Phase

from .parquet import concatenate
from .trace import ABSENT, PHASES, Trace
from .writer import ROW_GROUP, TraceWriter


class TraceRecorder:
    """One trace being recorded.

    Per forward pass: ``begin_forward``, ``record`` for every MoE layer, ``end_forward``. A layer that is not
    recorded, or only for the last tokens, leaves absent choices. ``token_ids`` are stored only if asked for.
    """

    def __init__(
        self,
        path: str | Path,
        geometry: Geometry,
        *,
        source: dict[str, Any] | None = None,
        store_token_ids: bool = False,
        store_weights: bool = True,
        store_forecasts: bool = False,
    ) -> None:
        self.geometry = geometry
        self.tokens = 0
        self._ids_too = store_token_ids
        # decided by the first layer that is recorded: absent router weights are absent, not zero
        self._weights_too: bool | None = None if store_weights else False
        self._forecasts_too = store_forecasts
        self._writer = TraceWriter(path, geometry, source)
        self._forward = 0
        self._open: dict[str, Any] | None = None
        self._waiting: list[Trace] = []
        self._rows = 0
        self._queue: queue.Queue[list[Trace] | None] = queue.Queue(maxsize=8)
        self._failure: Exception | None = None
        self._worker = threading.Thread(target=self._work, name="daop-trace-writer", daemon=True)
        self._worker.start()

    def begin_forward(
        self,
        phase: Phase,
        sequences: Sequence[int] | NDArray[np.integer[Any]],
        positions: Sequence[int] | NDArray[np.integer[Any]],
        token_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """A forward over T tokens starts; each argument has one entry per token."""
        n = len(sequences)
        if len(positions) != n or (token_ids is not None and len(token_ids) != n):
            raise ValueError(f"{n} sequences, but {len(positions)} positions; one of each per token")
        shape = (n, self.geometry.layers, self.geometry.top_k)
        self._open = {
            "sequence": np.asarray(sequences, dtype=np.int32),
            "position": np.asarray(positions, dtype=np.int32),
            "phase": np.full(n, PHASES.index(phase), dtype=np.uint8),
            "forward": np.full(n, self._forward, dtype=np.int32),
            "ids": np.full(shape, ABSENT, dtype=np.uint16),
            "weights": np.zeros(shape, dtype=np.float16),
            "token_ids": np.asarray(token_ids, dtype=np.int32)
            if self._ids_too and token_ids is not None
            else None,
        }
        if self._forecasts_too:
            self._open |= {
                "distances": np.full(shape[:2], np.nan, dtype=np.float32),
                "forecast_ids": np.full(shape, ABSENT, dtype=np.uint16),
                "forecast_weights": np.zeros(shape, dtype=np.float16),
            }
        self._forward += 1

    def record(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: NDArray[np.floating[Any]] | None = None
    ) -> None:
        """Layer ``layer`` chose ``ids`` [t, K]; t below T means the last t tokens only."""
        if self._open is None:
            raise ValueError("record() outside begin_forward() and end_forward()")
        kept = self._open["ids"]
        if len(ids) > len(kept):
            raise ValueError(f"layer {layer} routed {len(ids)} tokens of a forward of {len(kept)}")
        start = len(kept) - len(ids)
        kept[start:, layer] = ids
        if self._weights_too is None:
            self._weights_too = weights is not None
        if self._weights_too:
            if weights is None:
                raise ValueError(f"layer {layer} came without router weights, earlier ones had them")
            self._open["weights"][start:, layer] = weights

    def record_forecast(
        self,
        layer: int,
        distances: NDArray[np.floating[Any]],
        ids: NDArray[np.integer[Any]],
        weights: NDArray[np.floating[Any]],
    ) -> None:
        """What was announced of layer ``layer`` [T, ...] while the one before it ran; how far off it was."""
        if self._open is None or not self._forecasts_too:
            raise ValueError("record_forecast() without begin_forward(), or forecasts are not stored")
        for name, values in (("distances", distances), ("forecast_ids", ids), ("forecast_weights", weights)):
            self._open[name][:, layer] = values

    def end_forward(self) -> None:
        """The forward is complete; its tokens belong to the trace."""
        if self._open is None:
            raise ValueError("end_forward() without begin_forward()")
        if not self._weights_too:
            self._open["weights"] = None
        piece = Trace(geometry=self.geometry, **self._open)
        self._open = None
        self._waiting.append(piece)
        self._rows += len(piece)
        self.tokens += len(piece)
        if self._rows >= ROW_GROUP:
            self._flush()
        self._check()

    def _flush(self) -> None:
        if self._waiting:
            self._queue.put(self._waiting)
        self._waiting, self._rows = [], 0

    def _work(self) -> None:
        while (pieces := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._writer.write(concatenate(pieces))
                except (OSError, DaopError, ValueError, pa.ArrowException) as error:
                    self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            kept = (
                "what was written before is kept in {0}.partial" if self._writer.rows else "nothing is kept"
            )
            raise DaopError(
                f"recording to {self._writer.path} failed: {self._failure}; "
                f"{kept.format(self._writer.path)}; free the disk or choose another path"
            ) from self._failure

    def close(self) -> None:
        """Write what is left and make the file appear. A forward that never ended is not part of it."""
        self._stop()
        if self._failure is not None and not self._writer.rows:
            self._writer.abort()
        self._check()
        self._writer.close()

    def keep_partial(self) -> None:
        """Stop after an error: flush, but leave the recording marked as unfinished. Without a row group there
        is none, and the next try finds nothing in its way."""
        self._stop()
        if not self._writer.rows:
            self._writer.abort()

    def _stop(self) -> None:
        if self._worker.is_alive():
            self._flush()
            self._queue.put(None)
            self._worker.join()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.keep_partial()
