"""Writing trace files (the format: ``docs/trace-format.md``; reading them: ``parquet.py``).

A recording grows as small finished Parquet files in ``NAME.partial/``, one row group each, and becomes
``NAME`` in one rename when it is closed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from daop.core import DaopError, Geometry

from .parquet import FORMAT, VERSION, partial_folder
from .trace import ABSENT, OPTIONAL, CountsTrace, Trace

ROW_GROUP = 8192
_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}


def _describe(kind: str, geometry: Geometry, source: dict[str, Any]) -> dict[bytes, bytes]:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "geometry": asdict(geometry),
        "source": source,
    }
    return {b"daop": json.dumps(document).encode()}


def _list_column(values: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    inner = pa.array(flat, mask=None if mask is None else mask.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(inner, int(np.prod(values.shape[1:])))


def _token_table(trace: Trace) -> pa.Table:
    absent = trace.ids == ABSENT
    mask = absent if absent.any() else None
    columns: dict[str, Any] = {
        "sequence": pa.array(trace.sequence, pa.int32()),
        "position": pa.array(trace.position, pa.int32()),
        "phase": pa.array(trace.phase, pa.uint8()),
        "ids": _list_column(trace.ids, mask),
    }
    if trace.weights is not None:
        columns["weights"] = _list_column(trace.weights.astype(np.float16), mask)
    if trace.hits is not None:
        columns["hits"] = _list_column(trace.hits, mask)
    if trace.distances is not None:
        columns["distances"] = _list_column(trace.distances, np.isnan(trace.distances))
    if trace.forecast_ids is not None:
        unknown = trace.forecast_ids == ABSENT
        columns["forecast_ids"] = _list_column(trace.forecast_ids, unknown)
        if trace.forecast_weights is not None:
            columns["forecast_weights"] = _list_column(trace.forecast_weights.astype(np.float16), unknown)
    for name in ("forward", "token_ids"):
        if getattr(trace, name) is not None:
            columns[name] = pa.array(getattr(trace, name), pa.int32())
    return pa.table(columns).replace_schema_metadata(_describe("tokens", trace.geometry, trace.source))


def _counts_table(trace: CountsTrace) -> pa.Table:
    columns = {
        "sequence": pa.array(trace.sequence, pa.int32()),
        "tokens": pa.array(trace.tokens, pa.int32()),
        "counts": _list_column(trace.counts.astype(np.uint32)),
    }
    return pa.table(columns).replace_schema_metadata(_describe("counts", trace.geometry, trace.source))


class TraceWriter:
    """Writes a token trace piece by piece; ``close`` makes the file appear, ``abort`` leaves nothing.

    Pieces must agree in which optional columns they have. Used as a context manager, an exception
    keeps the finished row groups as an unfinished recording (``NAME.partial``).
    """

    def __init__(self, path: str | Path, geometry: Geometry, source: dict[str, Any] | None = None) -> None:
        self.path, self.geometry, self.source = Path(path), geometry, source or {}
        self.rows = 0
        self._parts: list[Path] = []
        self._columns: list[str] | None = None
        self._folder = partial_folder(self.path)
        if self._folder.exists():
            raise DaopError(
                f"{self._folder} holds a recording that never finished (`daop trace info {self.path}` "
                "reads it); remove it or choose another -o"
            )
        if self.path.is_dir():
            raise DaopError(f"{self.path} is a folder; name a file")
        try:
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise DaopError(f"cannot record to {self.path}: {error.strerror}; choose another -o") from error

    def write(self, piece: Trace) -> None:
        """Append the tokens of ``piece`` (same geometry), as one or more row groups."""
        columns = [c for c in OPTIONAL if getattr(piece, c) is not None]
        if self._columns is None:
            self._columns = columns
        if columns != self._columns:
            raise ValueError(f"{self.path} has the optional columns {self._columns}, this piece {columns}")
        if not len(piece):
            return
        cuts = np.linspace(0, len(piece), max(1, len(piece) // ROW_GROUP) + 1).astype(int)
        for start, end in pairwise(cuts):
            rows = piece.take(slice(start, end))
            table = _token_table(Trace(**{**rows.__dict__, "geometry": self.geometry, "source": self.source}))
            part = self._folder / f"part-{len(self._parts):06d}.parquet"
            hidden = part.with_suffix(".tmp")
            _write_table(table, hidden)
            os.replace(hidden, part)
            self._parts.append(part)
            self.rows += len(rows)

    def close(self) -> None:
        """Join the row groups into the finished file."""
        if not self._parts:
            self.abort()
            raise DaopError(f"nothing was recorded, so {self.path} was not written")
        hidden = self._folder / "joined.tmp"
        try:
            with pq.ParquetWriter(hidden, pq.read_schema(self._parts[0]), **_OPTIONS) as out:
                for part in self._parts:
                    out.write_table(pq.read_table(part), row_group_size=2 * ROW_GROUP)
            os.replace(hidden, self.path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise DaopError(
                f"cannot write {self.path} ({error}); all of the recording is in {self._folder}, which "
                f"`daop trace info {self.path}` and every other command read in its place"
            ) from error
        shutil.rmtree(self._folder)

    def abort(self) -> None:
        """Drop everything written so far."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._parts:
            self.abort()


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=2 * ROW_GROUP, **_OPTIONS)


def write_trace(trace: Trace | CountsTrace, path: str | Path) -> None:
    """Write a whole trace; the file appears complete or not at all."""
    path = Path(path)
    if isinstance(trace, CountsTrace):
        hidden = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_table(_counts_table(trace), hidden)
            os.replace(hidden, path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise DaopError(f"cannot write {path} ({error}); choose another -o") from error
        return
    writer = TraceWriter(path, trace.geometry, trace.source)
    try:
        writer.write(trace)
        writer.close()
    except BaseException as error:
        writer.abort()
        if isinstance(error, OSError):
            raise DaopError(f"cannot write {path} ({error}); choose another -o") from error
        raise
