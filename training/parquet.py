"""The trace file: Parquet, format version 1 (``docs/trace-format.md`` specifies it).

One row per token (kind ``tokens``) or per sequence (kind ``counts``); a JSON document under the metadata
key ``daop`` holds version, kind, geometry and source. A recording grows as small finished Parquet
files in ``NAME.partial/``, one row group each, and becomes ``NAME`` in one rename when it is closed; a
recording that was killed leaves the folder behind, which opens like the file would.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from daop.core import DaopError, Geometry

from .trace import ABSENT, OPTIONAL, CountsTrace, Trace

FORMAT = "daop-trace"
VERSION = 1
_REQUIRED = ("sequence", "position", "phase", "ids")
_MAX_TOTAL = 1 << 20


def partial_folder(path: Path) -> Path:
    """Where the recording of ``path`` lies until it is closed."""
    return path.with_name(path.name + ".partial")


def _parse(metadata: dict[bytes, bytes] | None, name: str) -> tuple[str, Geometry, dict[str, Any]]:
    raw = (metadata or {}).get(b"daop")
    if raw is None:
        raise DaopError(
            f"{name} is a Parquet file, but not a daop trace; convert it with `daop trace import`"
        )
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise DaopError(f"{name}: format {document['format']!r} is not {FORMAT!r}")
        if document["version"] != VERSION:
            raise DaopError(
                f"{name} has trace format version {document['version']}, this daop reads version {VERSION}; "
                "update daop, or record again"
            )
        g = document["geometry"]
        if sum(g["experts"]) > _MAX_TOTAL or max(g["experts"], default=0) >= ABSENT:
            raise DaopError(f"{name}: {sum(g['experts'])} experts in all is more than any model has")
        geometry = Geometry(
            experts=tuple(int(e) for e in g["experts"]),
            top_k=int(g["top_k"]),
            expert_bytes=tuple(int(b) for b in g["expert_bytes"]),
            layer_to_model_layer=tuple(int(n) for n in g["layer_to_model_layer"]),
            fingerprint=str(g["fingerprint"]),
        )
        return str(document["kind"]), geometry, dict(document["source"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DaopError(
            f"{name}: its trace metadata is damaged ({error!r}); record or import it again"
        ) from error


def _values(
    table: pa.Table, name: str, shape: tuple[int, ...], dtype: Any, absent: Any = None
) -> NDArray[Any]:
    """A column as numpy [rows, *shape]; nulls become ``absent``."""
    chunks = []
    for chunk in table.column(name).chunks:
        if shape and not (pa.types.is_fixed_size_list(chunk.type) and chunk.type.list_size == np.prod(shape)):
            raise DaopError(
                f"column {name!r} has type {chunk.type}, expected a list of {int(np.prod(shape))}"
            )
        if chunk.null_count:
            raise DaopError(f"column {name!r} has empty rows")
        values = chunk.flatten() if shape else chunk
        if values.null_count:
            if absent is None:
                raise DaopError(f"column {name!r} has empty values")
            values = values.fill_null(pa.scalar(absent, values.type))
        chunks.append(_cast(values.to_numpy(zero_copy_only=False), name, dtype).reshape(-1, *shape))
    return np.concatenate(chunks) if chunks else np.zeros((0, *shape), dtype=dtype)


def _cast(found: NDArray[Any], name: str, dtype: Any) -> NDArray[Any]:
    """As ``dtype``; whole numbers must be that, and fit."""
    if np.issubdtype(dtype, np.integer) and found.dtype != dtype:
        room = np.iinfo(dtype)
        if found.dtype.kind not in "iu" or (
            len(found) and not room.min <= found.min() <= found.max() <= room.max
        ):
            raise DaopError(
                f"column {name!r} holds something else than whole numbers of {room.min} to {room.max}"
            )
    with np.errstate(over="ignore"):  # router weights beyond float16 are found by ``validate``
        return np.asarray(found, dtype=dtype)


class TraceFile:
    """An open trace: metadata at once, rows by column and by chunk.

    ``path`` may be a finished file, or the name of a recording that never finished (its ``.partial`` folder
    is then read and ``complete`` is False).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.complete = True
        files = self._find()
        self._files = [_open(f) for f in files]
        self.kind, self.geometry, self.source = _parse(self._files[0].schema_arrow.metadata, str(files[0]))
        for name, other in zip(files[1:], self._files[1:], strict=True):
            if other.schema_arrow.metadata != self._files[0].schema_arrow.metadata:
                raise DaopError(f"{name} belongs to another recording than {files[0]}; keep one of the two")
        self.rows = sum(f.metadata.num_rows for f in self._files)
        self.columns = list(self._files[0].schema_arrow.names)
        required = _REQUIRED if self.kind == "tokens" else ("sequence", "tokens", "counts")
        missing = [c for c in required if c not in self.columns]
        if self.kind not in ("tokens", "counts") or missing or len(set(self.columns)) < len(self.columns):
            raise DaopError(f"{self.path}: kind {self.kind!r}, columns {self.columns}: not a whole trace")

    def _find(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        partial = self.path if self.path.suffix == ".partial" else partial_folder(self.path)
        parts = sorted(partial.glob("part-*.parquet")) if partial.is_dir() else []
        if not parts:
            raise DaopError(f"no trace at {self.path}; check the path")
        self.complete = False
        return parts

    def chunks(self, columns: Iterable[str] | None = None, rows: int = 65536) -> Iterator[Trace]:
        """The trace in pieces of at most about ``rows`` tokens, file order; each validated."""
        if self.kind != "tokens":
            raise DaopError(
                f"{self.path} holds counts per sequence, not tokens; only some predictors can use it"
            )
        wanted = [*_REQUIRED, *(OPTIONAL if columns is None else columns)]
        names = [c for c in dict.fromkeys(wanted) if c in self.columns]
        for file in self._files:
            with _reading(self.path):
                for batch in file.iter_batches(batch_size=rows, columns=names):
                    yield self._trace(pa.Table.from_batches([batch]))

    def lengths(self) -> dict[int, int]:
        """Tokens of every sequence, from the one column that says so."""
        found: Counter[int] = Counter()
        with _reading(self.path):
            for file in self._files:
                for batch in file.iter_batches(batch_size=1 << 20, columns=["sequence"]):
                    numbers, counts = np.unique(batch.column(0).to_numpy(), return_counts=True)
                    found.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        return dict(found)

    def read_sequences(self, sequences: Collection[int], columns: Iterable[str] | None = None) -> Trace:
        """Only these sequences, read chunk by chunk, so that memory holds little else."""
        wanted = np.asarray(sorted(sequences))
        pieces = [
            piece.take(np.flatnonzero(np.isin(piece.sequence, wanted))) for piece in self.chunks(columns)
        ]
        return concatenate(pieces)

    def read(self, columns: Iterable[str] | None = None) -> Trace:
        """The whole trace; ``columns`` names the optional ones wanted (default: all that are there)."""
        pieces = list(self.chunks(columns))
        if not pieces:
            empty = np.zeros(0, dtype=np.int32)
            shape = (0, self.geometry.layers, self.geometry.top_k)
            return Trace(
                geometry=self.geometry,
                sequence=empty,
                position=empty,
                phase=np.zeros(0, np.uint8),
                ids=np.zeros(shape, np.uint16),
                source=self.source,
                complete=self.complete,
            )
        return concatenate(pieces)

    def _trace(self, table: pa.Table) -> Trace:
        shape = (self.geometry.layers, self.geometry.top_k)
        kinds: dict[str, tuple[tuple[int, ...], Any, Any]] = {
            "sequence": ((), np.int32, None),
            "position": ((), np.int32, None),
            "phase": ((), np.uint8, None),
            "ids": (shape, np.uint16, ABSENT),
            "weights": (shape, np.float16, 0),
            "hits": (shape, np.bool_, False),
            "forward": ((), np.int32, None),
            "token_ids": ((), np.int32, None),
            "distances": (shape[:1], np.float32, np.nan),
            "forecast_ids": (shape, np.uint16, ABSENT),
            "forecast_weights": (shape, np.float16, 0),
        }
        try:
            got = {name: _values(table, name, *kinds[name]) for name in table.column_names}
        except (DaopError, pa.ArrowException, ValueError, TypeError) as error:
            raise DaopError(f"{self.path}: {error}; record or import the trace again") from error
        trace = Trace(geometry=self.geometry, source=self.source, complete=self.complete, **got)
        return trace.validate(str(self.path))

    def read_counts(self) -> CountsTrace:
        """The counts of a counts-only trace."""
        if self.kind != "counts":
            raise DaopError(f"{self.path} holds tokens, not counts per sequence")
        with _reading(self.path):
            table = pa.concat_tables([f.read() for f in self._files])
        try:
            return CountsTrace(
                geometry=self.geometry,
                sequence=_values(table, "sequence", (), np.int32),
                tokens=_values(table, "tokens", (), np.int32),
                counts=_values(table, "counts", (self.geometry.total,), np.uint32),
                source=self.source,
            ).validate(str(self.path))
        except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
            raise DaopError(f"{self.path}: {error}; import the trace again") from error


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DaopError(f"{path} is not a readable Parquet file ({error}); it may be cut off") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DaopError(f"{path}: reading failed ({error}); the file is damaged, record it again") from error


def read_trace(path: str | Path, columns: Iterable[str] | None = None) -> Trace:
    """The token trace at ``path``, validated."""
    return TraceFile(path).read(columns)


def read_any(path: str | Path) -> Trace | CountsTrace:
    """The trace at ``path``, of either kind."""
    file = TraceFile(path)
    return file.read_counts() if file.kind == "counts" else file.read()


def concatenate(pieces: list[Trace]) -> Trace:
    """Pieces of one trace, in order."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    joined: dict[str, Any] = {}
    for name in ("sequence", "position", "phase", "ids", *OPTIONAL):
        parts = [getattr(p, name) for p in pieces]
        joined[name] = None if any(p is None for p in parts) else np.concatenate(parts)
    return Trace(geometry=first.geometry, source=first.source, complete=first.complete, **joined)
