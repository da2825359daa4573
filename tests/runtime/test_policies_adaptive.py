"""``adaptive`` pays where it can and is never a loss where it cannot; its forecast learns and is doubted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from excerpt import GEOMETRY, excerpt, profile, replay

from daop.core import DaopError, Geometry, Phase, Step
from daop.predictors.base import State
from daop.predictors.network import shapes
from daop.predictors.visit_task import FORECASTS
from daop.predictors.visits import Visits
from daop.runtime import context_model
from daop.runtime.context_model import ContextModel
from daop.runtime.context_state import ContextState
from daop.runtime.profile import Profile
from daop.runtime.sim_traffic import Traffic

QUARTER, MOST = 192, 576


@cache
def informed() -> Profile:
    """The first two sequences' frequencies and a context model of them."""
    traffic = excerpt()
    part = traffic.sequence < 2
    model = context_model.fit(GEOMETRY, traffic.ids[part], traffic.sequence[part], epochs=4)
    return replace(profile(), arrays=model.as_arrays())


def unseen() -> Traffic:
    """The other two sequences."""
    traffic = excerpt()
    part = traffic.sequence >= 2
    return replace(traffic, ids=traffic.ids[part], sequence=traffic.sequence[part])


def shuffled() -> Traffic:
    """Each layer's choices in an order of their own: nothing foretells anything."""
    rng = np.random.default_rng(0)
    traffic = unseen()
    ids = traffic.ids.copy()
    for layer in range(ids.shape[1]):
        ids[:, layer] = ids[rng.permutation(len(ids)), layer]
    return replace(traffic, ids=ids)


def misled() -> Profile:
    """A context model that is always wrong: it expects exactly what it should not."""
    known = informed()
    arrays = {
        name: -array if name != "context.leads" else array for name, array in (known.arrays or {}).items()
    }
    return replace(known, arrays=arrays)


def raving() -> Profile:
    """A predictor that says anything but what it was asked."""
    rng = np.random.default_rng(3)
    arrays = {
        name: rng.normal(0, 0.5, shape).astype(np.float32)
        for name, shape in shapes(GEOMETRY, 16, FORECASTS, Visits.sight).items()
    }
    return replace(profile(), predictor=Visits(width=16).restore(State(arrays=arrays), GEOMETRY))


def speeds(slots: int, traffic: Traffic, known: Profile) -> tuple[float, float]:
    """(adaptive, the best of the static placements and ``balanced``) in tokens per second."""
    others = ("static", "static_frequency", "balanced")
    best = max(replay(name, slots, traffic, known).tokens_per_second for name in others)
    return replay("adaptive", slots, traffic, known).tokens_per_second, best


def test_it_pays_on_traffic_that_it_has_not_seen() -> None:
    mine, best = speeds(QUARTER, unseen(), informed())
    assert mine > 1.1 * best


@pytest.mark.parametrize(
    ("slots", "traffic", "known"),
    [
        (MOST, unseen, informed),
        (QUARTER, shuffled, informed),
        (QUARTER, unseen, misled),
        (QUARTER, unseen, raving),
    ],
    ids=["three-quarters-resident", "unpredictable-traffic", "forecast-always-wrong", "predictor-raves"],
)
def test_it_is_never_a_loss(slots: int, traffic: Callable[[], Traffic], known: Callable[[], Profile]) -> None:
    mine, best = speeds(slots, traffic(), known())
    assert mine >= 0.97 * best


def test_it_rests_when_nearly_everything_is_resident() -> None:
    run = replay("adaptive", 768, unseen(), informed())
    assert run.statistics.prefetches["issued"] == 0


def test_a_wrong_forecast_loses_its_say_and_a_right_one_wins_it() -> None:
    traffic = unseen()
    for known, trusted in ((informed(), True), (misled(), False)):
        model = ContextModel.from_arrays(known.arrays or {}, GEOMETRY)
        assert model is not None
        state = ContextState(model, GEOMETRY, known.frequency, use_native=False)
        for forward, token in enumerate(traffic.ids.astype(int)):
            for layer, chosen in enumerate(token):
                flats = sorted(layer * 32 + int(expert) for expert in chosen)
                state.absorb(Step(layer, Phase.DECODE, forward, 1, flats, [1] * 4))
        assert (state.trust > 0.9) if trusted else (state.trust < 0.1)


def test_the_context_model_learns_a_rule() -> None:
    """Layer 1 always chooses what layer 0 chose: the next layer's forecast must say so."""
    rng = np.random.default_rng(0)
    geometry = Geometry.uniform(2, 8, 2, 10)
    first = np.stack([rng.choice(8, 2, replace=False) for _ in range(2000)])
    ids = np.stack([first, first], axis=1).astype(np.uint8)
    model = context_model.fit(geometry, ids, np.zeros(2000, dtype=np.int32), epochs=30)
    state = ContextState(model, geometry, None, use_native=False)
    state.trust = 1.0
    for forward in range(5):
        for layer in (0, 1):
            flats = [layer * 8 + 2, layer * 8 + 5]
            state.absorb(Step(layer, Phase.DECODE, forward, 1, flats, [1, 1]))
            if layer == 0:
                assert set(np.argsort(-state.chance[1])[:2].tolist()) == {2, 5}


def test_lookup_and_product_agree() -> None:
    """The single token's gather of table rows gives what the general product gives."""
    model = ContextModel.from_arrays(informed().arrays or {}, GEOMETRY)
    assert model is not None
    state = ContextState(model, GEOMETRY, None, use_native=False)
    for forward, token in enumerate(excerpt().ids[:3].astype(int)):
        for layer, chosen in enumerate(token):
            flats = sorted(layer * 32 + int(expert) for expert in chosen)
            state.absorb(Step(layer, Phase.DECODE, forward, 1, flats, [1] * 4))
            targets = state.targets[layer]
            np.testing.assert_allclose(
                state._looked_up(layer, targets), state._multiplied(layer, targets), rtol=1e-4, atol=1e-4
            )


def test_a_profile_survives_saving_and_is_checked(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path)) / "profile"
    informed().save(folder)
    again = Profile.load(folder, GEOMETRY)
    np.testing.assert_array_equal(again.frequency, informed().frequency)
    model = ContextModel.from_arrays(again.arrays or {}, GEOMETRY)
    assert model is not None
    assert model.leads == (1, 2, 3, 24)
    with pytest.raises(DaopError, match="MoE layers"):
        Profile.load(folder, Geometry.uniform(12, 32, 4, 1))
    with pytest.raises(DaopError, match="not a profile"):
        Profile.load(Path(str(tmp_path)), GEOMETRY)
    (folder / "profile.json").write_text('{"format": 99, "experts": [1], "top_k": 1}')
    with pytest.raises(DaopError, match="format 99"):
        Profile.load(folder, GEOMETRY)
