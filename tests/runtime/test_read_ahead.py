"""Where misses are read: forecasts are believed as far as they come true, and the disk does not idle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording_engine import FlatCosts, Harness

from daop.core import FloatArray, Forecast, Geometry, Phase, Step
from daop.runtime.forecast_blend import ForecastBlend
from daop.runtime.policies.adaptive import Adaptive
from daop.runtime.policies.base import Outcome, Prefetch
from daop.runtime.read_window import ReadWindow

GEOMETRY = Geometry.uniform(4, 16, 2, 1 << 20)


class Disk(FlatCosts):
    """No host beside: a read takes three times as long as computing."""

    host_beside = False


def announce(chosen: list[int], rng: np.random.Generator) -> FloatArray:
    """Scores as the executor gives them: above one half for the chosen ones."""
    scores = (rng.random(16) * 0.3).astype(np.float32)
    scores[chosen] = 0.75
    return scores


def taught(right: Callable[[list[int]], list[int]], tokens: int = 120) -> tuple[float, float]:
    """Mean chance of what the gate names and of the rest, where layer 1 used ``right(named)`` so often."""
    rng, blend = np.random.default_rng(0), ForecastBlend(GEOMETRY)
    usual = np.full(16, 2 / 16, dtype=np.float32)
    named: list[int] = []
    chance = usual
    for _ in range(tokens):
        named = rng.choice(16, 2, replace=False).tolist()
        chance = blend.chance(Forecast(1, announce(named, rng)), usual)
        used = [16 + expert for expert in sorted(right(named))]
        blend.learn(Step(1, Phase.DECODE, 0, 1, used, [1] * len(used)))
    rest = np.delete(chance, named)
    return float(chance[named].mean()), float(rest.mean())


def test_a_forecast_that_comes_true_is_believed_and_one_that_never_does_is_not() -> None:
    named, rest = taught(lambda named: named)
    assert named > 0.9
    assert rest < 0.05
    named, rest = taught(lambda named: [(expert + 5) % 16 for expert in named])
    assert named < 0.2
    assert rest == pytest.approx(2 / 16, abs=0.08)


def test_what_was_not_asked_teaches_nothing() -> None:
    blend = ForecastBlend(GEOMETRY)
    before = blend.chance(Forecast(1, np.full(16, 0.1, dtype=np.float32)), np.full(16, 0.1, dtype=np.float32))
    for _ in range(5):
        blend.learn(Step(2, Phase.DECODE, 0, 1, [32, 33], [1, 1]))
    after = blend.chance(Forecast(1, np.full(16, 0.1, dtype=np.float32)), np.full(16, 0.1, dtype=np.float32))
    np.testing.assert_array_equal(before, after)


@given(st.floats(0.3, 1.0), st.floats(0.0, 2.0))
def test_a_read_pays_in_idle_time_and_the_more_certain_the_less_of_it(chance: float, share: float) -> None:
    window = ReadWindow(GEOMETRY, Disk())
    idle = share * window.read
    early = min(1.0, share)
    assert window.pays(chance, idle, soon=False) == (chance * early > (1 - chance) * (1 - early))
    assert window.pays(chance, 0.0, soon=True) == (chance >= 0.5)
    assert not window.pays(chance, 0.0, soon=False)
    assert not window.pays(0.1, 10 * window.read, soon=True)


def test_the_window_learns_what_the_layers_take() -> None:
    window = ReadWindow(GEOMETRY, Disk())
    now = 0.0
    for _ in range(100):  # two misses of 2 ms each behind one hit; the layers lie 5 ms apart
        window.planned(now)
        window.looked(now, 4e-3, 2)
        step = Step(0, Phase.DECODE, 0, 1, [0, 1, 2], [1, 1, 1])
        window.finished(Outcome(step, 1, 2, 0, stall_seconds=4e-3, compute_seconds=3e-3))
        now += 4e-3 + 3e-3 + 5e-3
    assert window.read == pytest.approx(2e-3, rel=0.01)
    assert window.compute == pytest.approx(1e-3, rel=0.01)
    assert window.between[0] == pytest.approx(5e-3, rel=0.01)
    assert window.idle(0, 1, 2, 4e-3) == pytest.approx(1e-3 + 5e-3, rel=0.01)
    assert window.idle(0, 3, 0, 0.0) == pytest.approx(3e-3 + 5e-3, rel=0.01)


def test_a_pause_between_two_layers_is_not_idle_time() -> None:
    window = ReadWindow(GEOMETRY, Disk())
    before = list(window.between)
    step = Step(3, Phase.DECODE, 0, 1, [48], [1])
    window.finished(Outcome(step, 1, 0, 0, 0.0, 1e-3))
    window.interrupted()
    window.planned(100.0)
    assert window.between == before


class Told(Adaptive):
    """Keeps what it asked for."""

    def look_ahead(self, step: Step, forecasts: object, view: object) -> list[Prefetch]:
        self.asked: dict[int, list[Prefetch]] = getattr(self, "asked", {})
        self.asked[step.layer] = list(super().look_ahead(step, forecasts, view))  # type: ignore[arg-type]
        return self.asked[step.layer]


@pytest.mark.parametrize("host_beside", [False, True])
def test_announced_experts_are_read_only_where_there_is_no_host_beside(host_beside: bool) -> None:
    costs = Disk(copy_seconds=1e-5)  # read within a layer's computing
    costs.host_beside = host_beside
    policy = Told()
    harness = Harness(policy, GEOMETRY, [24], [0] * 4, lambda n: n - 1, faults=False, costs=costs)
    assert policy.horizon == (0 if host_beside else 1)
    if host_beside:
        return
    rng = np.random.default_rng(1)
    absent = [expert for expert in range(16) if not harness.residency.is_resident(16 + expert)][:2]
    harness._forecasts = lambda layer: [Forecast(layer + 1, announce(absent, rng))] if layer == 0 else []  # type: ignore[method-assign]
    harness.run_forward(Phase.DECODE, [[(0, 1), (1, 1)]] * 4, 1)
    asked = {prefetch.flat: prefetch for prefetch in policy.asked[0]}
    assert {16 + expert for expert in absent} <= set(asked)
    assert all(asked[16 + expert].within == 1 for expert in absent)
