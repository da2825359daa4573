"""The columns that say how well the next layer was foretold: written, read, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_trace_file import random_trace

from daop.core import DaopError, Phase
from daop.training.parquet import read_trace
from daop.training.recorder import TraceRecorder
from daop.training.trace import ABSENT, FORECASTS, Trace
from daop.training.writer import write_trace


def foretold() -> Trace:
    plain = random_trace((6, 4), 2, [5, 3])
    distances = np.full((8, 2), np.nan, dtype=np.float32)
    distances[3:, 1] = np.linspace(0.0, 1.7, 5)
    ids = np.full((8, 2, 2), ABSENT, dtype=np.uint16)
    ids[3:, 1] = [[0, 1], [2, 3], [3, 1], [1, 0], [2, 0]]
    weights = np.where(ids == ABSENT, 0, 0.25).astype(np.float16)
    return replace(plain, distances=distances, forecast_ids=ids, forecast_weights=weights)


def test_they_come_back_as_they_were(tmp_path: Path) -> None:
    trace = foretold()
    write_trace(trace, tmp_path / "t.parquet")
    back = read_trace(tmp_path / "t.parquet")
    for name in FORECASTS:
        assert np.array_equal(getattr(back, name), getattr(trace, name), equal_nan=name == "distances"), name
    part = back.select([1])
    assert part.distances is not None
    assert len(part.distances) == 3
    without = read_trace(tmp_path / "t.parquet", columns=["weights"])
    assert without.distances is None
    assert without.forecast_ids is None


def test_a_recorder_keeps_them_only_if_asked(tmp_path: Path) -> None:
    trace = foretold()
    with TraceRecorder(tmp_path / "t.parquet", trace.geometry, store_forecasts=True) as recorder:
        for phase, n in ((Phase.PREFILL, 3), (Phase.DECODE, 1)):
            recorder.begin_forward(phase, [0] * n, list(range(n)))
            for layer in range(2):
                recorder.record(layer, trace.ids[:n, layer], np.ones((n, 2), dtype=np.float32))
            if phase is Phase.DECODE:
                recorder.record_forecast(1, np.asarray([0.5]), np.asarray([[3, 1]]), np.asarray([[0.7, 0.3]]))
            recorder.end_forward()
    back = read_trace(tmp_path / "t.parquet")
    assert back.distances is not None
    assert back.forecast_ids is not None
    assert np.isnan(back.distances).sum() == 4 * 2 - 1
    assert back.distances[3, 1] == 0.5
    assert back.forecast_ids[3].tolist() == [[ABSENT, ABSENT], [3, 1]]
    with TraceRecorder(tmp_path / "u.parquet", trace.geometry) as recorder:
        recorder.begin_forward(Phase.DECODE, [0], [0])
        with pytest.raises(ValueError, match="not stored"):
            recorder.record_forecast(1, np.asarray([0.5]), np.asarray([[3, 1]]), np.asarray([[0.7, 0.3]]))
        recorder.record(0, trace.ids[:1, 0])
        recorder.end_forward()
    assert read_trace(tmp_path / "u.parquet").distances is None


def test_nonsense_is_named() -> None:
    trace = foretold()
    assert trace.forecast_ids is not None
    assert trace.distances is not None
    ids = trace.forecast_ids.copy()
    ids[4, 1, 0] = 4
    with pytest.raises(DaopError, match="forecast_ids name an expert that its layer does not have"):
        replace(trace, forecast_ids=ids).validate("t")
    with pytest.raises(DaopError, match="distances are negative"):
        replace(trace, distances=trace.distances - 1).validate("t")
    with pytest.raises(DaopError, match="'distances' has shape"):
        replace(trace, distances=trace.distances[:, :1])
