"""The trace file: what is written comes back, what is damaged says so, what was cut off still opens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.core import DaopError, Geometry
from daop.training.parquet import TraceFile, partial_folder, read_any, read_trace
from daop.training.trace import ABSENT, Trace, counts_of
from daop.training.writer import TraceWriter, write_trace


def random_trace(
    experts: tuple[int, ...], top_k: int, lengths: list[int], *, weights: bool = True, seed: int = 0
) -> Trace:
    rng = np.random.default_rng(seed)
    layers = len(experts)
    geometry = Geometry(
        experts=experts,
        top_k=top_k,
        expert_bytes=(7,) * layers,
        layer_to_model_layer=tuple(range(1, layers + 1)),
        fingerprint="abc",
    )
    n = sum(lengths)
    ids = np.stack(
        [np.argsort(rng.random((n, e)), axis=1)[:, :top_k].astype(np.uint16) for e in experts], axis=1
    ).reshape(n, layers, top_k)
    return Trace(
        geometry=geometry,
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=np.concatenate([np.arange(k, dtype=np.int32) for k in lengths] or [np.zeros(0, np.int32)]),
        phase=rng.integers(0, 2, n).astype(np.uint8),
        ids=ids,
        weights=rng.random(ids.shape).astype(np.float16) if weights else None,
        source={"by": "test"},
    )


def assert_equal(a: Trace, b: Trace) -> None:
    assert a.geometry == b.geometry
    for name in ("sequence", "position", "phase", "ids", "weights", "hits", "forward", "token_ids"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=name)


@settings(max_examples=25, deadline=None)
@given(
    experts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, experts: list[int], lengths: list[int], data: Any
) -> None:
    top_k = data.draw(st.integers(1, min(experts)))
    trace = random_trace(tuple(experts), top_k, lengths, weights=data.draw(st.booleans()))
    path = tmp_path_factory.mktemp("t") / "t.parquet"
    write_trace(trace, path)
    assert_equal(read_trace(path), trace)
    assert TraceFile(path).source == {"by": "test"}
    assert not partial_folder(path).exists()


def test_absent_choices_stay_absent(tmp_path: Path) -> None:
    trace = random_trace((4, 4), 2, [6])
    trace.ids[2, 1] = ABSENT
    trace.ids[3, 1] = ABSENT
    write_trace(trace, tmp_path / "t.parquet")
    stored = pq.read_table(tmp_path / "t.parquet").column("ids").to_pylist()
    assert stored[2][2:] == [None, None]
    back = read_trace(tmp_path / "t.parquet")
    np.testing.assert_array_equal(back.ids, trace.ids)
    assert (back.flat[2, 1] == -1).all()


def test_absent_columns_are_not_in_the_file(tmp_path: Path) -> None:
    write_trace(random_trace((4,), 2, [6], weights=False), tmp_path / "t.parquet")
    assert pq.read_schema(tmp_path / "t.parquet").names == ["sequence", "position", "phase", "ids"]


def test_chunks_join_to_the_whole(tmp_path: Path) -> None:
    trace = random_trace((8,) * 3, 2, [50, 70])
    write_trace(trace, tmp_path / "t.parquet")
    pieces = list(TraceFile(tmp_path / "t.parquet").chunks(rows=32))
    assert len(pieces) > 2
    np.testing.assert_array_equal(np.concatenate([p.ids for p in pieces]), trace.ids)


def test_a_killed_recording_still_opens(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = random_trace((8,) * 3, 2, [50, 70])
    writer = TraceWriter(path, trace.geometry)
    writer.write(trace.take(slice(0, 60)))
    writer.write(trace.take(slice(60, 100)))
    (partial_folder(path) / "part-000002.tmp").write_bytes(b"PAR1 half a row gro")  # the process died here
    file = TraceFile(path)
    assert not file.complete
    np.testing.assert_array_equal(file.read().ids, trace.ids[:100])
    assert not file.read().complete
    with pytest.raises(DaopError, match="never finished"):
        TraceWriter(path, trace.geometry)
    writer.close()
    assert TraceFile(path).complete
    assert not partial_folder(path).exists()


def test_an_exception_keeps_the_finished_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = random_trace((8,), 2, [10])

    def record() -> None:
        with TraceWriter(path, trace.geometry) as writer:
            writer.write(trace)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        record()
    assert not path.exists()
    assert len(read_trace(path)) == 10


@pytest.mark.parametrize("counted", [False, True])
def test_a_disk_that_fills_up_is_named_and_nothing_is_left(
    counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = random_trace((4, 4), 2, [5])

    def full(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(DaopError, match=r"t.parquet .*No space left.*another -o"):
        write_trace(counts_of(trace) if counted else trace, tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_cannot_be_joined_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace((4, 4), 2, [5])
    writer = TraceWriter(tmp_path / "t.parquet", trace.geometry)
    writer.write(trace)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
    with pytest.raises(DaopError, match=r"No space left.*recording is in .*partial"):
        writer.close()
    assert len(read_trace(tmp_path / "t.parquet")) == len(trace)


def test_an_empty_recording_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DaopError, match="nothing was recorded"):
        TraceWriter(tmp_path / "t.parquet", Geometry.uniform(1, 2, 1)).close()
    assert list(tmp_path.iterdir()) == []


def test_grouping_sorts_interleaved_sequences() -> None:
    trace = random_trace((8,) * 2, 2, [4, 4])
    mixed = trace.take(np.array([0, 4, 1, 5, 2, 6, 3, 7]))
    assert not mixed.is_grouped
    assert_equal(mixed.grouped(), trace)
    assert trace.offsets.tolist() == [0, 4, 8]


def test_counts_round_trip(tmp_path: Path) -> None:
    counts = counts_of(random_trace((4, 8), 2, [5, 9]))
    write_trace(counts, tmp_path / "c.parquet")
    back = read_any(tmp_path / "c.parquet")
    np.testing.assert_array_equal(back.counts, counts.counts)  # type: ignore[union-attr]
    with pytest.raises(DaopError, match="counts per sequence"):
        read_trace(tmp_path / "c.parquet")


def _rewrite(path: Path, **change: Any) -> None:
    table = pq.read_table(path)
    document = json.loads(table.schema.metadata[b"daop"])
    for key, value in change.items():
        if key in document["geometry"]:
            document["geometry"][key] = value
        else:
            document[key] = value
    pq.write_table(table.replace_schema_metadata({b"daop": json.dumps(document).encode()}), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": [3, 8]}, "names expert"),
        ({"experts": [8]}, "one entry per MoE layer"),
        ({"experts": [8, 8, 8], "expert_bytes": [0, 0, 0], "layer_to_model_layer": [0, 1, 2]}, "list of 6"),
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "'other'"),
        ({"kind": "maps"}, "not a whole trace"),
        ({"experts": "many"}, "damaged"),
        ({"experts": [1 << 40, 8]}, "more than any model"),
        ({"experts": [70_000, 8]}, "more than any model"),
        ({"top_k": 1e400}, "damaged"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_damaged_metadata_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.parquet"
    write_trace(random_trace((8, 8), 2, [20]), path)
    _rewrite(path, **change)
    with pytest.raises(DaopError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ids", np.tile(np.arange(65536, 65538), 20 * 2)),  # would wrap around to experts 0 and 1
        ("ids", np.full(80, -1)),
        ("ids", np.full(80, 0.5)),
        ("phase", np.full(20, 2)),
        ("phase", np.full(20, -1)),
        ("phase", np.full(20, 256)),
        ("sequence", np.full(20, 1 << 40)),
        ("position", np.full(20, np.nan)),
    ],
)
def test_columns_that_do_not_hold_what_they_should(tmp_path: Path, name: str, values: Any) -> None:
    path = tmp_path / "t.parquet"
    write_trace(random_trace((8, 8), 2, [20]), path)
    table = pq.read_table(path)
    column = pa.array(values)
    if name == "ids":
        column = pa.FixedSizeListArray.from_arrays(column, 4)
    pq.write_table(table.set_column(table.schema.names.index(name), name, column), path)
    with pytest.raises(DaopError, match=str(path)):
        read_trace(path)


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(random_trace((8, 8), 2, [20]), path)
    table = pq.read_table(path)
    pq.write_table(table.append_column("ids", table.column("ids")), path)
    with pytest.raises(DaopError, match="not a whole trace"):
        read_trace(path)


def test_an_expert_chosen_twice_is_named(tmp_path: Path) -> None:
    trace = random_trace((8, 8), 2, [20])
    trace.ids[7, 1] = (5, 5)
    write_trace(trace, tmp_path / "t.parquet")
    with pytest.raises(DaopError, match=r"row 7, layer 1 chose \[5, 5\]"):
        read_trace(tmp_path / "t.parquet")


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(random_trace((8, 8), 2, [500]), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DaopError, match="not a readable Parquet"):
        read_trace(path)
    broken = bytearray(whole)
    broken[200:260] = os.urandom(60)
    path.write_bytes(bytes(broken))
    with pytest.raises(DaopError):
        read_trace(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(DaopError, match="not a daop trace"):
        read_trace(path)
    with pytest.raises(DaopError, match="no trace at"):
        read_trace(tmp_path / "none.parquet")


def test_edges_of_k() -> None:
    for k in (1, 5):  # one expert, and every expert of a layer
        trace = random_trace((5, 5), k, [9])
        assert trace.validate("t") is trace
        assert trace.ids.shape == (9, 2, k)
