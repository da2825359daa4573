"""The compiled forecast against the plain one of numpy, and the searches over what experts are worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.core import Geometry, Phase, Step
from daop.runtime.context_model import LEADS, ContextModel, turns
from daop.runtime.context_state import ContextState
from daop.runtime.lowest import lowest_by_numpy
from daop.runtime.native_context import load_context
from daop.runtime.policies.lfu import lowest
from daop.runtime.worth import WorthTable

needs_library = pytest.mark.skipif(load_context() is None, reason="the compiled library is not built")


def model_of(geometry: Geometry, seed: int) -> ContextModel:
    rng = np.random.default_rng(seed)
    model = ContextModel.empty(geometry, turns(LEADS, geometry.layers), None)
    model.table[:] = rng.normal(0, 0.5, model.table.shape)
    model.gain[:] = rng.normal(0, 0.2, model.gain.shape)
    model.bias[:] += rng.normal(0, 0.5, model.bias.shape)
    return model


def steps_of(geometry: Geometry, rng: np.random.Generator, forwards: int, most: int) -> list[Step]:
    """A prompt of several rows now and then; single tokens between."""
    steps = []
    for forward in range(forwards):
        rows = 1 if rng.random() < 0.7 else int(rng.integers(2, most))
        for layer, experts in enumerate(geometry.experts):
            picks = [rng.choice(experts, geometry.top_k, replace=False) for _ in range(rows)]
            ids, tokens = np.unique(np.concatenate(picks), return_counts=True)
            flat = (ids + geometry.offsets[layer]).tolist()
            phase = Phase.DECODE if rows == 1 else Phase.PREFILL
            steps.append(Step(layer, phase, forward, rows, flat, tokens.tolist()))
    return steps


@needs_library
@settings(max_examples=40, deadline=None)
@given(
    experts=st.lists(st.integers(2, 21), min_size=1, max_size=6),
    top_k=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_compiled_and_plain_forecasts_agree(experts: list[int], top_k: int, seed: int) -> None:
    geometry = Geometry(
        experts=tuple(experts),
        top_k=top_k,
        expert_bytes=(1,) * len(experts),
        layer_to_model_layer=tuple(range(len(experts))),
    )
    rng = np.random.default_rng(seed)
    frequency = rng.random(geometry.total).astype(np.float32) if seed % 2 else None
    model = model_of(geometry, seed)
    tables = [
        WorthTable(ContextState(model, geometry, frequency, use_native=native), geometry)
        for native in (True, False)
    ]
    compiled, plain = tables
    assert compiled.state.native is not None
    assert plain.state.native is None
    for step in steps_of(geometry, rng, 8, 5):
        for table in tables:
            table.absorb(step)
        for name in ("chance", "rate", "usual"):
            np.testing.assert_allclose(
                getattr(compiled.state, name), getattr(plain.state, name), rtol=2e-4, atol=2e-6
            )
        assert compiled.state.trust == pytest.approx(plain.state.trust, rel=1e-3, abs=1e-6)
        np.testing.assert_allclose(compiled.flat, plain.flat, rtol=2e-4, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), native=st.booleans())
def test_the_best_absent_expert_is_the_best(seed: int, native: bool) -> None:
    """Against a plain loop, with late layers and experts already taken."""
    rng = np.random.default_rng(seed)
    geometry = Geometry.uniform(5, int(rng.integers(2, 12)), 1, 1)
    table = WorthTable(ContextState(model_of(geometry, seed), geometry, None, use_native=native), geometry)
    for step in steps_of(geometry, rng, 2, 3):
        table.absorb(step)
    resident, filling = rng.random((2, geometry.total)) < 0.4
    late = rng.choice(5, int(rng.integers(0, 4)), replace=False).tolist()
    taken = rng.choice(geometry.total, int(rng.integers(0, 3)), replace=False).tolist()
    best, most = -1, 0.0
    for flat in range(geometry.total):
        layer, expert = geometry.pair(flat)
        worth = table.flat[flat] - (table.state.chance[layer, expert] if layer in late else np.float32(0))
        if worth > most and not (resident[flat] or filling[flat] or flat in taken):
            best, most = flat, float(worth)
    flat, worth = table.best(resident, filling, late, taken)
    assert flat == best
    assert worth == pytest.approx(most, rel=1e-6, abs=1e-7)


class Flags:
    """The part of a view that ``lowest`` reads."""

    def __init__(self, evictable: np.ndarray, same: np.ndarray | None) -> None:
        self.evictable, self._same = evictable, same

    def same_slot(self, flat: int) -> np.ndarray | None:
        return self._same


@settings(max_examples=80, deadline=None)
@given(
    worth=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    count=st.integers(1, 45),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_lowest_is_the_head_of_a_stable_sort(dtype: type, worth: list[int], count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values: np.ndarray = np.asarray(worth, dtype=dtype)
    evictable = rng.random(len(worth)) < 0.6
    same = rng.random(len(worth)) < 0.6 if seed % 2 else None
    allowed = evictable if same is None else evictable & same
    expected = sorted((i for i in range(len(worth)) if allowed[i]), key=lambda i: (worth[i], i))[:count]
    assert lowest(values, count, Flags(evictable, same), 0) == expected  # type: ignore[arg-type]
    assert lowest_by_numpy(values, allowed, count) == expected
