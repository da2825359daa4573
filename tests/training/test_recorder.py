"""The recorder: every token x layer x choice is accounted for, at any batch size, whatever goes wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from daop.core import DaopError, Geometry, Phase
from daop.training import recorder as module
from daop.training.parquet import TraceFile, read_trace
from daop.training.recorder import TraceRecorder
from daop.training.trace import ABSENT, DECODE

GEOMETRY = Geometry.uniform(3, 8, 2)


def choices(rng: np.random.Generator, tokens: int) -> NDArray[np.int64]:
    return np.argsort(rng.random((tokens, 3, 8)), axis=2)[:, :, :2]


def test_prefill_and_batched_decode_are_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROW_GROUP", 16)
    rng = np.random.default_rng(0)
    said = []
    with TraceRecorder(tmp_path / "t.parquet", GEOMETRY, store_token_ids=True) as recorder:
        for forward in range(30):
            prefill = forward == 0
            sequences = np.repeat([0, 1, 2], 5) if prefill else np.arange(3)
            positions = np.tile(np.arange(5), 3) if prefill else np.full(3, 4 + forward)
            ids, weights = choices(rng, len(sequences)), rng.random((len(sequences), 3, 2))
            recorder.begin_forward(
                Phase.PREFILL if prefill else Phase.DECODE, sequences, positions, positions * 7
            )
            for layer in range(3):
                recorder.record(layer, ids[:, layer], weights[:, layer])
            recorder.end_forward()
            said.append(ids)
    trace = read_trace(tmp_path / "t.parquet")
    np.testing.assert_array_equal(trace.ids, np.concatenate(said))
    assert (trace.phase == DECODE).sum() == 29 * 3
    assert trace.forward is not None
    assert trace.forward.max() == 29
    assert trace.weights is not None
    assert trace.token_ids is not None
    grouped = trace.grouped()
    assert grouped.offsets.tolist() == [0, 34, 68, 102]
    assert grouped.position[:34].tolist() == list(range(34))


def test_nothing_of_the_prompt_by_default(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", GEOMETRY) as recorder:
        recorder.begin_forward(Phase.DECODE, [0], [0], [1234])
        recorder.record(0, np.array([[1, 2]]))
        recorder.end_forward()
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.token_ids is None
    assert trace.weights is None


def test_a_layer_seen_for_the_last_tokens_only_leaves_absent_choices(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", GEOMETRY) as recorder:
        recorder.begin_forward(Phase.PREFILL, [0, 0, 0], [0, 1, 2])
        recorder.record(0, np.array([[1, 2], [3, 4], [5, 6]]))
        recorder.record(2, np.array([[7, 0]]))
        recorder.end_forward()
    ids = read_trace(tmp_path / "t.parquet").ids
    assert ids[:, 0].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (ids[:, 1] == ABSENT).all()
    assert (ids[:2, 2] == ABSENT).all()
    assert ids[2, 2].tolist() == [7, 0]


def test_a_run_that_dies_keeps_its_complete_forwards(tmp_path: Path) -> None:
    def run() -> None:
        with TraceRecorder(tmp_path / "t.parquet", GEOMETRY) as recorder:
            for position in range(5):
                recorder.begin_forward(Phase.DECODE, [0], [position])
                recorder.record(0, np.array([[1, 2]]))
                if position == 4:
                    raise KeyboardInterrupt
                recorder.end_forward()

    with pytest.raises(KeyboardInterrupt):
        run()
    file = TraceFile(tmp_path / "t.parquet")
    assert not file.complete
    assert len(file.read()) == 4


def test_a_full_disk_is_reported_and_never_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TraceRecorder(tmp_path / "t.parquet", GEOMETRY)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder._writer, "write", full)
    recorder.begin_forward(Phase.DECODE, [0], [0])
    recorder.record(0, np.array([[1, 2]]))
    recorder.end_forward()
    with pytest.raises(DaopError, match=r"No space left.*nothing is kept"):
        recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_dies_before_anything_was_recorded_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), TraceRecorder(tmp_path / "t.parquet", GEOMETRY):
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_misuse_raises(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.parquet", GEOMETRY)
    with pytest.raises(ValueError, match="outside"):
        recorder.record(0, np.array([[1, 2]]))
    recorder.begin_forward(Phase.DECODE, [0], [0])
    with pytest.raises(ValueError, match="2 tokens of a forward of 1"):
        recorder.record(0, np.array([[1, 2], [3, 4]]))
    recorder.record(0, np.array([[1, 2]]), np.array([[0.5, 0.5]]))
    with pytest.raises(ValueError, match="without router weights"):
        recorder.record(1, np.array([[1, 2]]))
    recorder.keep_partial()
