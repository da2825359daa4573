"""What approximate policies decide, by themselves: no executor, no model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from early_runs import (
    APPROXIMATE,
    OPTIONS,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.core import DaopError, Geometry
from daop.runtime.policies.approximate import Approximate, Routing, Settled
from daop.runtime.policies.base import make_policy
from daop.runtime.policies.bounded import Bounded
from daop.runtime.policies.daop import Daop
from daop.runtime.sequence_placement import RecentPlacement, SequencePlacement, swapped


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(APPROXIMATE),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    slots=st.integers(0, 16),
)
def test_a_row_is_decided_by_itself(name: str, seed: int, count: int, slots: int) -> None:
    """The same answers for a row alone and among others, whatever those are."""
    rng = np.random.default_rng(seed)
    geometry = Geometry.uniform(2, 8, 3)
    chosen = rng.permutation(16)[:slots].tolist()

    def routing() -> Routing:
        logits = rng.normal(size=(count, 8)) * 2
        ids = np.argsort(-logits, axis=1)[:, :3].astype(np.int32)
        weights = np.take_along_axis(np.exp(logits), ids, axis=1)
        return Routing(ids, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))

    prompts = [rng.integers(0, 8, size=(5, 3)) for _ in range(count)]
    forecast, true = routing(), routing()
    ranks = rng.random((count, 8)).astype(np.float32)
    away = rng.random(count).astype(np.float32)

    def decide(which: list[int]) -> Settled:
        policy = make_policy(name, options=OPTIONS[name] | ({"tolerance": 0.5} if name == "bounded" else {}))
        assert isinstance(policy, Approximate)
        policy.geometry = geometry
        book: Any = SequencePlacement(geometry, chosen, None if name == "deferral" else 1.05)
        if isinstance(policy, Bounded):
            book, policy._usual = RecentPlacement(geometry, slots, None), {}
        policy.placement = policy.book = book  # type: ignore[attr-defined]
        for row in which:
            for layer in range(2):
                policy.placement.prompt(layer, prompts[row], np.full(5, row))
        for layer in range(2):
            settled = policy.settle(layer, which, part(true, which), away[which] if layer else None)
            if policy.asks(layer):
                policy.announce(layer, which, part(forecast, which), ranks[which])
            if not policy.asks(layer):
                return settled
        raise AssertionError

    def part(of: Routing, which: list[int]) -> Routing:
        return Routing(of.ids[which], of.weights[which])

    together = decide(list(range(count)))
    for row in range(count):
        alone = decide([row])
        assert np.array_equal(alone.routing.ids[0], together.routing.ids[row])
        assert np.allclose(alone.routing.weights[0], together.routing.weights[row])
        for mine, theirs in ((alone.early, together.early), (alone.late, together.late)):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or np.array_equal(mine[0], theirs[row])


def test_swaps_of_a_prompt_by_hand() -> None:
    resident = np.asarray([True, True, False, False, False, False])
    counts = np.asarray([4, 20, 3, 9, 4, 0])
    assert swapped(resident, counts, 1.05).tolist() == [False, True, False, True, False, False]
    assert swapped(resident, np.asarray([9, 20, 3, 9, 4, 0]), 1.05).tolist() == resident.tolist()


def test_degradation_keeps_the_first_and_the_sum_of_weights() -> None:
    policy = make_policy("daop", options={"first": 0})
    geometry = Geometry.uniform(2, 6, 2)
    assert isinstance(policy, Daop)
    policy.geometry = geometry
    policy.placement = policy.book = SequencePlacement(geometry, [6 + 4, 6 + 5], None)
    forecast = Routing(np.asarray([[1, 2]], dtype=np.int32), np.asarray([[0.3, 0.6]], dtype=np.float32))
    ranks = np.asarray([[0.1, 0.2, 0.4, 0.05, 0.05, 0.2]], dtype=np.float32)
    settled = policy.announce(0, [0], forecast, ranks)
    assert settled.routing.ids.tolist() == [[5, 2]]
    assert settled.routing.weights[0] == pytest.approx([0.3, 0.6])
    assert settled.early is not None
    assert settled.early.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("bounded", {"tolerance": -0.1}, "--tolerance is -0.1, but must be a relative distance of 0"),
        ("bounded", {"tolerance": float("nan")}, "--tolerance is nan"),
        ("bounded", {"tolerance": "much"}, "--tolerance is 'much'"),
        ("bounded", {"light": 1.5}, "light is 1.5, but must lie between 0 and 1"),
        ("bounded", {"calls": -1}, "calls is -1"),
        ("daop", {"first": 1.5}, "first is 1.5, but must be a whole number"),
        ("deferral", {"deferred": -2}, "deferred is -2"),
    ],
)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DaopError, match=said):
        make_policy(name, options=options)
