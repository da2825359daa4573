"""The running form of the predictor ``visits`` says what the predictor says, compiled or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.core import Geometry, Phase, Step
from daop.predictors.base import State
from daop.predictors.data import Routing
from daop.predictors.history import contexts
from daop.predictors.network import shapes, sigmoid
from daop.predictors.visit_task import AHEAD, FORECASTS
from daop.predictors.visits import Visits
from daop.runtime.native_context import load_context
from daop.runtime.visit_state import VisitState, lengthened, shortened

WIDTH = 8
needs_library = pytest.mark.skipif(load_context() is None, reason="the compiled library is not built")
geometries = st.builds(
    lambda experts, top_k: Geometry(
        experts=tuple(experts),
        top_k=top_k,
        expert_bytes=(1,) * len(experts),
        layer_to_model_layer=tuple(range(len(experts))),
    ),
    st.lists(st.integers(2, 17), min_size=1, max_size=6),
    st.integers(1, 2),
)


def predictor_of(geometry: Geometry, seed: int) -> Visits:
    """Weights by chance; only their order in the sums matters here."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: lengthened(
            shortened(rng.normal(0, 0.4, shape).astype(np.float32))
        )  # the running form rounds the large ones
        for name, shape in shapes(geometry, WIDTH, FORECASTS, Visits.sight).items()
    }
    arrays["rank"] = np.ones(geometry.top_k, dtype=np.float32)
    return Visits(width=WIDTH).restore(State(arrays=arrays), geometry)


def steps_of(geometry: Geometry, rng: np.random.Generator, rows: list[int]) -> list[Step]:
    """Passes of so many rows; some leave a layer out, as an incomplete trace does."""
    steps = []
    for forward, count in enumerate(rows):
        skipped = rng.integers(0, 3 * geometry.layers) if geometry.layers > 1 else -1
        for layer, experts in enumerate(geometry.experts):
            if layer == skipped:
                continue
            picks = [rng.choice(experts, geometry.top_k, replace=False) for _ in range(count)]
            ids, tokens = np.unique(np.concatenate(picks), return_counts=True)
            phase = Phase.PREFILL if count > 3 else Phase.DECODE
            flat = (ids + geometry.offsets[layer]).tolist()
            steps.append(Step(layer, phase, forward, count, flat, tokens.tolist()))
    return steps


@needs_library
@settings(max_examples=40, deadline=None)
@given(geometry=geometries, seed=st.integers(0, 1000), rows=st.lists(st.integers(1, 6), max_size=8))
def test_compiled_and_plain_agree(geometry: Geometry, seed: int, rows: list[int]) -> None:
    rng = np.random.default_rng(seed)
    frequency = rng.random(geometry.total).astype(np.float32) if seed % 2 else None
    predictor = predictor_of(geometry, seed)
    compiled, plain = (VisitState(predictor, geometry, frequency, use_native=n) for n in (True, False))
    assert compiled.native is not None
    assert plain.native is None
    for step in steps_of(geometry, rng, rows):
        if step.layer == 0 and step.forward % 3 == 2:
            for state in (compiled, plain):
                state.begin_sequences(step.rows)
        for state in (compiled, plain):
            state.absorb(step)
        for name in ("chance", "rate", "usual"):
            np.testing.assert_allclose(
                getattr(compiled, name), getattr(plain, name), rtol=2e-3, atol=2e-5, err_msg=name
            )
        assert compiled.trust == pytest.approx(plain.trust, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
@settings(max_examples=15, deadline=None)
@given(geometry=geometries, seed=st.integers(0, 1000))
def test_it_runs_the_network_that_was_fitted(native: bool, geometry: Geometry, seed: int) -> None:
    """Token by token what the predictor, given the whole past, says of the layers ahead and of the layer's
    own next visits."""
    rng = np.random.default_rng(seed)
    shape = (7, geometry.layers, geometry.top_k)
    flat = np.empty(shape, dtype=np.int32)
    for layer, experts in enumerate(geometry.experts):
        for token in range(len(flat)):
            flat[token, layer] = rng.choice(experts, geometry.top_k, replace=False) + geometry.offsets[layer]
    starts = np.asarray([0, 3, 7], dtype=np.int64)
    predictor = predictor_of(geometry, seed)
    running = VisitState(predictor, geometry, None, use_native=native)
    for rows, context in contexts(Routing(geometry=geometry, flat=flat, offsets=starts), 1):
        token = rows.start
        if token in starts:
            running.begin_sequences(1)
        for layer in range(geometry.layers):
            context.layer = layer
            running.trust, running._age = 1.0, 1  # alone, and not judged
            chosen = sorted(flat[token, layer].tolist())
            running.absorb(Step(layer, Phase.DECODE, token, 1, chosen, [1] * len(chosen)))
            for horizon in range(1, AHEAD + 1):
                if layer + horizon < geometry.layers:
                    expected = predictor.probabilities(context, horizon)[0]
                    found = running.chance[layer + horizon, : len(expected)]
                    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
            for head, array in ((predictor.turn, running.chance), (predictor.later, running.rate)):
                begin, end = geometry.offsets[layer : layer + 2]
                just = np.zeros((1, end - begin), dtype=np.float32)
                just[0, np.asarray(chosen) - begin] = 1.0
                expected = sigmoid(predictor.network_.logits(context, head, layer, just))[0]
                np.testing.assert_allclose(array[layer, : len(expected)], expected, rtol=1e-3, atol=1e-5)


def test_a_narrow_layer_has_no_experts_beyond_its_own() -> None:
    geometry = Geometry(experts=(4, 9), top_k=2, expert_bytes=(1, 1), layer_to_model_layer=(0, 1))
    state: Any = VisitState(predictor_of(geometry, 0), geometry, None)
    state.trust = 1.0
    state.absorb(Step(1, Phase.DECODE, 0, 1, [5, 6], [1, 1]))
    state.absorb(Step(0, Phase.DECODE, 1, 1, [0, 1], [1, 1]))
    assert state._expected[0, 4:].max() < 1e-9
