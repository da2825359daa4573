"""What holds for every registered policy, whatever the traffic, the budget and the transfers do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_engine import Chaotic, FlatCosts, Harness

from daop.core import Geometry, Phase
from daop.runtime.policies.base import POLICIES, Policy

NAMES = POLICIES.names()
RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, list[int], list[int]]:
    """A geometry, its slots per class, and the class of each layer."""
    layers = draw(st.integers(1, 4))
    experts = tuple(draw(st.integers(2, 6)) for _ in range(layers))
    top_k = draw(st.integers(1, min(experts)))
    classes = [draw(st.integers(0, 1)) for _ in range(layers)]
    kinds = sorted(set(classes))
    class_of_layer = [kinds.index(kind) for kind in classes]
    geometry = Geometry(
        experts=experts,
        top_k=top_k,
        expert_bytes=tuple(100 + 50 * kind for kind in class_of_layer),
        layer_to_model_layer=tuple(range(layers)),
    )
    slots = []
    for kind in range(len(kinds)):
        total = sum(n for n, c in zip(experts, class_of_layer, strict=True) if c == kind)
        choices = {0, 1, top_k - 1, top_k, total // 2, total}
        slots.append(draw(st.sampled_from(sorted(n for n in choices if n <= total))))
    return geometry, slots, class_of_layer


def choose(geometry: Geometry, decide: Callable[[int], int], rows: int) -> list[list[tuple[int, int]]]:
    """The router's choice in every layer: each of ``rows`` tokens picks top-k distinct experts."""
    chosen = []
    for experts in geometry.experts:
        counts: dict[int, int] = {}
        for _ in range(rows):
            left = list(range(experts))
            for _ in range(geometry.top_k):
                pick = left.pop(decide(len(left)))
                counts[pick] = counts.get(pick, 0) + 1
        chosen.append(sorted(counts.items()))
    return chosen


def check_invariants(
    policy: Policy, shape: tuple[Geometry, list[int], list[int]], decide: Callable[[int], int], faults: bool
) -> None:
    geometry, slots, class_of_layer = shape
    harness = Harness(policy, geometry, slots, class_of_layer, decide, faults)
    requests = 0
    for forward in range(8):
        prefill = forward % 4 == 0
        rows = 1 + decide(6) if prefill else 1 + decide(2)
        chosen = choose(geometry, decide, rows)
        requests += sum(len(pairs) for pairs in chosen)
        harness.run_forward(Phase.PREFILL if prefill else Phase.DECODE, chosen, rows)
    statistics = harness.statistics
    assert statistics.steps == 8 * geometry.layers
    assert int((statistics.hits + statistics.misses + statistics.lates).sum()) == requests
    fates = statistics.prefetches
    ended = sum(fates[fate] for fate in ("useful", "late", "wasted")) + statistics.failed_prefetches
    assert fates["issued"] >= ended


@pytest.mark.parametrize("name", NAMES)
@RELAXED
@given(shape=geometries(), random=st.randoms(use_true_random=False), faults=st.booleans())
def test_invariants(name: str, shape: Any, random: Random, faults: bool) -> None:
    check_invariants(POLICIES.get(name)(), shape, random.randrange, faults)


@settings(RELAXED, max_examples=300)
@given(shape=geometries(), seed=st.integers(0, 2**32), faults=st.booleans())
def test_invariants_hold_whatever_a_policy_does(shape: Any, seed: int, faults: bool) -> None:
    decide = Random(seed).randrange
    check_invariants(Chaotic(decide), shape, decide, faults)


def landing(options: int) -> int:
    """Every transfer under way lands at the next opportunity."""
    return min(1, options - 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_expert_in_fast_memory_ends_in_hits(name: str) -> None:
    """With a slot for every expert a policy may not go on missing for ever."""
    geometry = Geometry.uniform(3, 4, 2, 100)
    everything = [[(expert, 1) for expert in range(4)] for _ in range(3)]
    harness = Harness(
        POLICIES.get(name)(), geometry, [12], [0] * 3, landing, faults=False, costs=FlatCosts(1e-6)
    )
    for _ in range(12):
        works = harness.run_forward(Phase.DECODE, everything, 2)
    if name != "on_demand":  # the only one that keeps nothing
        assert all(len(work.ready) == 4 for work in works)


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.keeps_hot_set])
def test_a_prefill_through_every_expert_keeps_the_hot_set(name: str) -> None:
    geometry = Geometry.uniform(4, 8, 2, 100)
    harness = Harness(POLICIES.get(name)(), geometry, [12], [0] * 4, lambda n: n - 1, faults=False)
    usual = [[(layer, 1), (layer + 1, 1)] for layer in range(4)]
    for _ in range(20):
        harness.run_forward(Phase.DECODE, usual, 1)
    before = harness.residency.resident.copy()
    harness.run_forward(Phase.PREFILL, [[(expert, 4) for expert in range(8)] for _ in range(4)], 16)
    kept = harness.residency.resident & before
    assert kept.sum() >= 0.75 * before.sum()
