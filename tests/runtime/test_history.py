"""The history of a run against counts made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daop.core import Forecast, Geometry, Phase, Step
from daop.runtime.history import History

GEOMETRY = Geometry.uniform(2, 4, 2)


def watched(samples: int = 240, expected: Any = None) -> History:
    history = History(samples)
    resident = np.zeros(GEOMETRY.total, dtype=np.bool_)
    policy = SimpleNamespace(prefetching=True, expected=lambda layer: expected)
    residency = SimpleNamespace(geometry=GEOMETRY, resident=resident)
    conductor: Any = SimpleNamespace(residency=residency, policy=policy)
    history.attach(conductor)
    return history


def step(layer: int, experts: list[int]) -> Step:
    flats = [GEOMETRY.offsets[layer] + expert for expert in experts]
    return Step(layer, Phase.DECODE, 0, 1, flats, [1] * len(flats))


WORK: Any = None


def test_uses_and_reuse_distances() -> None:
    history = watched()
    for experts in ([0, 1], [0, 2], [3, 2], [0, 1], [0, 3]):  # 0: 1, 2, 1; 1: 3; 2: 1; 3: 2
        history.begin(Phase.DECODE, 1)
        history.planned(step(0, experts), WORK)
    assert history.uses.tolist() == [4, 2, 2, 2, 0, 0, 0, 0]
    assert history.first_uses == 4
    assert history.reuse[:4].tolist() == [3, 2, 1, 0]  # distance 1; 2; 3 to 4; 5 to 8


def test_residency_is_sampled_evenly_and_bounded() -> None:
    history = watched(samples=10)
    for token in range(100):
        history._residency.resident[:] = False
        history._residency.resident[token % GEOMETRY.total] = True
        history.begin(Phase.DECODE, 1)
    assert len(history.tokens) <= 10
    assert history.stride == 16
    assert history.tokens == list(range(0, 100, 16))
    assert [int(row.argmax()) for row in history.resident] == [t % GEOMETRY.total for t in history.tokens]


def test_forecasts_are_judged_by_what_came() -> None:
    history = watched()
    sure = np.asarray([0.95, 0.95, 0.05, 0.05], dtype=np.float32)
    for chosen in ([0, 1], [0, 2], [0, 1], [0, 1]):
        history.begin(Phase.DECODE, 1)
        history.forecast(step(0, [0, 1]), [Forecast(1, sure)])
        history.planned(step(1, chosen), WORK)
    assert history.forecasts.tolist() == [8, 0, 0, 0, 0, 0, 0, 0, 0, 8]
    assert history.came_true.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 7]
    assert history.scores[9] == pytest.approx(8 * 0.95, rel=1e-5)
    assert history.recall == 7 / 8


def test_a_policy_is_judged_by_what_it_expected_before() -> None:
    expected = np.asarray([0.9, 0.8, 0.1, 0.0], dtype=np.float32)
    history = watched(expected=expected)
    history.begin(Phase.DECODE, 1)
    history.planned(step(0, [0, 1]), WORK)  # nothing was expected of the first layer
    assert history.forecasts.sum() == 0
    history.finished(step(0, [0, 1]), WORK, 0.0, 0.0)
    expected[:] = 0  # learning from the step must not change what was expected of it
    history.planned(step(1, [0, 1]), WORK)
    assert history.recall == 1.0
    history.reset()
    assert (history.passes, history.wanted, history.uses.sum()) == (0, 0, 0)
