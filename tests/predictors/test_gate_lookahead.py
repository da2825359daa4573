"""Gate look-ahead on a made-up model whose layers share a residual stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daop.core import DaopError, Geometry
from daop.predictors.artefact import load, save
from daop.predictors.base import PREDICTORS, NextLayer
from daop.predictors.data import Gates, Hidden, Routing
from daop.predictors.history import hidden_contexts
from daop.predictors.session import Session
from daop.training.evaluate import evaluate_next
from daop.training.report import evaluate_saved
from daop.training.trace import Trace
from daop.training.writer import write_trace

# with fewer steps of fitting than by default, which would only cost time here
VARIANTS = ("gate_lookahead", "gate_lookahead_norm", "gate_lookahead_residual", "gate_lookahead_corrected")


def made(name: str, steps: int) -> NextLayer:
    cls: Any = PREDICTORS.get(name)
    predictor = cls(steps=steps)
    assert isinstance(predictor, NextLayer)
    return predictor


def residual_stream(n: int = 800, seed: int = 0) -> Routing:
    """Layers add a constant and something that depends on the experts chosen; norms differ by layer."""
    rng = np.random.default_rng(seed)
    layers, experts, k, width = 4, 12, 3, 16
    geometry = Geometry.uniform(layers, experts, k)
    shared = np.random.default_rng(99)
    weights = [shared.standard_normal((experts, width)).astype(np.float32) for _ in range(layers)]
    norms = [np.exp(shared.standard_normal(width) * 0.7).astype(np.float32) for _ in range(layers)]
    shifts = [shared.standard_normal(width) * 0.8 for _ in range(layers)]
    effects = shared.standard_normal((layers, experts, width)) * 0.4
    stream = rng.standard_normal((n, width))
    flat, seen = np.zeros((n, layers, k), np.int32), np.zeros((n, layers, width), np.float16)
    for layer in range(layers):
        unit = stream / np.sqrt((stream**2).mean(axis=1, keepdims=True))
        seen[:, layer] = unit * norms[layer]
        logits = seen[:, layer].astype(np.float32) @ weights[layer].T
        chosen = np.argsort(-logits, axis=1)[:, :k]
        flat[:, layer] = chosen + layer * experts
        stream = (
            stream + shifts[layer] + effects[layer][chosen].sum(axis=1) + rng.normal(0, 0.1, stream.shape)
        )
    none: list[None] = [None] * layers
    return Routing(
        geometry=geometry,
        flat=flat,
        offsets=np.array([0, n // 2, n]),
        hidden=Hidden(
            rows=np.arange(n),
            values=seen,
            gates=Gates(weights=weights, biases=none, corrections=none, norms=norms),
        ),
    )


def test_every_step_helps() -> None:
    train, test = residual_stream(), residual_stream(seed=1)
    fitted = {name: made(name, 150).fit(train) for name in VARIANTS}
    reports = evaluate_next(fitted, test)
    recalls = [reports[name]["recall_at_k"] for name in VARIANTS]
    assert recalls == sorted(recalls)
    assert recalls[1] > recalls[0] + 0.02
    assert recalls[3] > recalls[1] + 0.05
    assert reports["gate_lookahead_corrected"]["ece"] < 0.05


@pytest.mark.parametrize("name", VARIANTS)
def test_online_equals_offline_and_saved_equals_fitted(name: str, tmp_path: Path) -> None:
    data = residual_stream(200)
    predictor = made(name, 20).fit(data)
    save(predictor, tmp_path / "p")
    again = load(tmp_path / "p")
    assert isinstance(again, NextLayer)
    assert data.hidden is not None
    session = Session(data.geometry, again)
    offline = {}
    for rows, context in hidden_contexts(data, 64):
        for layer in range(3):
            context.layer = layer
            for row, scores in zip(rows.tolist(), predictor.probabilities(context, 1), strict=True):
                offline[row, layer] = scores
    for row in range(200):
        if row in data.offsets:
            session.begin()
        for layer in range(4):
            ids = data.flat[row : row + 1, layer] - data.geometry.offsets[layer]
            session.observe(layer, ids, hidden=data.hidden.values[row : row + 1, layer].astype(np.float32))
            got = session.forecast(1)
            if layer < 3:
                assert got is not None
                np.testing.assert_allclose(got, offline[row, layer], rtol=1e-4, atol=1e-5)


def test_it_says_that_it_needs_hidden_states() -> None:
    data = residual_stream(50)
    with pytest.raises(DaopError, match="hidden states"):
        PREDICTORS.get("gate_lookahead")().fit(
            Routing(geometry=data.geometry, flat=data.flat, offsets=data.offsets)
        )


def test_hidden_states_follow_their_sequences() -> None:
    data = residual_stream(100)
    part = data.select(np.array([1]))
    assert part.hidden is not None
    assert data.hidden is not None
    np.testing.assert_array_equal(part.hidden.rows, np.arange(50))
    np.testing.assert_array_equal(part.hidden.values, data.hidden.values[50:])


def test_scoring_on_a_trace_without_hidden_states_is_refused(tmp_path: Path) -> None:
    data = residual_stream(60)
    save(PREDICTORS.get("gate_lookahead")().fit(data), tmp_path / "gate")
    ids = data.flat - np.asarray(data.geometry.offsets[:-1])[None, :, None]
    trace = Trace(
        geometry=data.geometry,
        sequence=np.repeat(np.arange(2, dtype=np.int32), 30),
        position=np.tile(np.arange(30, dtype=np.int32), 2),
        phase=np.ones(60, np.uint8),
        ids=ids.astype(np.uint16),
    )
    write_trace(trace, tmp_path / "t.parquet")
    with pytest.raises(DaopError, match="nothing to score gate on"):
        evaluate_saved(
            str(tmp_path / "gate"), tmp_path / "t.parquet", max_tokens=100, progress=lambda _: None
        )
