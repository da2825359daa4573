"""Metrics against hand-counted cases, and intervals from whole sequences."""

from __future__ import annotations

import numpy as np
import pytest

from daop.core import DaopError, Geometry
from daop.predictors.data import Routing
from daop.training.metrics import RATES, NextScores, interval
from daop.training.reuse_replay import replay


def test_rates_of_a_hand_counted_case() -> None:
    scores = NextScores.empty(Geometry.uniform(2, 5, 2), 1)
    forecast = np.array([[0.9, 0.8, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4, 0.5]], dtype=np.float32)
    chosen = np.array([[0, 2], [3, 4]])
    scores.add(1, forecast, chosen, np.zeros(2, np.int64))
    report = scores.report()
    assert report["recall_at_k"] == pytest.approx((0.5 + 1.0) / 2)
    assert report["recall_at_k1"] == pytest.approx(1.0)
    assert report["recall_at_2k"] == pytest.approx(1.0)
    assert report["whole_set"] == pytest.approx(0.5)
    assert report["top_1"] == pytest.approx(1.0)
    outcome = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 1, 1]])
    assert report["brier"] == pytest.approx(float(((forecast - outcome) ** 2).mean()), rel=1e-5)
    assert report["per_layer"]["recall_at_k"] == [None, pytest.approx(0.75)]
    assert sum(row["chances"] for row in report["reliability"]) == 10


def test_absent_choices_do_not_count() -> None:
    scores = NextScores.empty(Geometry.uniform(2, 4, 2), 1)
    scores.add(1, np.full((2, 4), 0.5, np.float32), np.array([[-1, -1], [0, 1]]), np.zeros(2, np.int64))
    assert scores.seen.sum() == 1


def test_k_equal_to_all_experts() -> None:
    scores = NextScores.empty(Geometry.uniform(1, 2, 2), 1)
    scores.add(0, np.ones((3, 2), np.float32), np.array([[0, 1]] * 3), np.zeros(3, np.int64))
    report = scores.report()
    assert all(report[name] == 1.0 for name in RATES if name != "brier")
    assert report["brier"] == 0.0


def test_the_interval_widens_with_sequences_that_differ() -> None:
    alike = interval(np.full(20, 5.0), np.full(20, 10.0))
    apart = interval(np.r_[np.zeros(10), np.full(10, 10.0)], np.full(20, 10.0))
    assert alike == [0.5, 0.5]
    assert apart is not None
    assert apart[1] - apart[0] > 0.3
    assert interval(np.array([1.0]), np.array([2.0])) is None


def _routing(rows: list[list[int]], experts: int) -> Routing:
    flat = np.asarray(rows, dtype=np.int32)[:, None, :]
    return Routing(
        geometry=Geometry.uniform(1, experts, flat.shape[2]), flat=flat, offsets=np.array([0, len(rows)])
    )


def test_replay_against_hand_counted_hits() -> None:
    data = _routing([[0], [1], [2], [0], [1], [0]], 3)
    assert replay(data, 2, "lru").hits.tolist() == [0, 0, 0, 0, 0, 1]
    assert replay(data, 2, "optimum").hits.tolist() == [0, 0, 0, 1, 0, 1]
    assert replay(data, 3, "lru").hits.sum() == 3


def test_perfect_waits_reach_the_optimum() -> None:
    rng = np.random.default_rng(0)
    data = _routing([rng.permutation(12)[:2].tolist() for _ in range(300)], 12)
    waits = np.full((300, 12), 1e6)
    for token in range(300):
        for expert in range(12):
            later = np.flatnonzero((data.flat[token + 1 :, 0] == expert).any(axis=1))
            if len(later):
                waits[token, expert] = later[0] + 1
    best = replay(data, 5, "optimum").hit_rate
    assert replay(data, 5, "forecast", waits).hit_rate == pytest.approx(best)
    assert best > replay(data, 5, "lru").hit_rate > 0


def test_replay_refuses_what_cannot_be() -> None:
    data = _routing([[0, 1]], 4)
    with pytest.raises(DaopError, match="cannot hold"):
        replay(data, 1, "lru")
    with pytest.raises(DaopError, match="not one of lru"):
        replay(data, 2, "magic")
    with pytest.raises(DaopError, match="another shape"):
        replay(data, 2, "forecast", np.zeros((3, 3)))
