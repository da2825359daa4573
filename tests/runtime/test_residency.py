"""Residency against a plain model of it, under any legal sequence of changes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daop.core import DaopError, Geometry
from daop.runtime.residency import Residency


def make(slots: list[int]) -> Residency:
    geometry = Geometry.uniform(3, 4, 2, 100)
    return Residency(geometry, slots, [0, 1, 0] if len(slots) == 2 else None)


@given(slots=st.lists(st.integers(0, 5), min_size=1, max_size=2), seed=st.integers(0, 2**32))
def test_states_follow_the_changes(slots: list[int], seed: int) -> None:
    random = Random(seed)
    residency = make(slots)
    filling: dict[int, bool] = {}
    resident: dict[int, bool] = {}
    protected: set[int] = set()
    for _ in range(60):
        flat = random.randrange(12)
        absent = flat not in filling and flat not in resident
        action = random.randrange(7)
        if action == 0 and absent and residency.free_slots(flat):
            filling[flat] = random.random() < 0.5
            residency.reserve(flat, speculative=filling[flat])
        elif action == 1 and flat in filling:
            resident[flat] = filling.pop(flat)
            residency.complete(flat)
        elif action == 2 and flat in filling:
            del filling[flat]
            residency.abandon(flat)
        elif action == 3 and flat in resident and flat not in protected:
            del resident[flat]
            residency.evict(flat)
        elif action == 4:
            protected.add(flat)
            residency.sort_out([flat])
        elif action == 5:
            protected.discard(flat)
            residency.unprotect([flat])
        elif action == 6 and flat in resident:
            assert residency.use(flat) == resident[flat]
            resident[flat] = False
        assert {f for f in range(12) if residency.is_resident(f)} == set(resident)
        assert {f for f in range(12) if residency.is_filling(f)} == set(filling)
        assert {f for f in range(12) if residency.evictable[f]} == set(resident) - protected
        brought = {f for f, early in {**filling, **resident}.items() if early}
        assert {f for f in range(12) if residency.is_prefetched(f)} == brought
        assert residency.missing(range(12)) == [
            f for f in range(12) if f not in filling and f not in resident
        ]
        assert residency.used_slots == len(filling) + len(resident)
        for kind, count in enumerate(slots):
            members = [f for f in range(12) if residency.class_of[f] == kind]
            held = [residency.slot_of[f] for f in members if residency.slot_of[f] >= 0]
            assert len(held) == len(set(held)) == count - residency.free_slots(members[0])
            assert set(held) <= set(range(count))


def test_illegal_changes_are_refused() -> None:
    residency = make([2])
    residency.reserve(3, speculative=False)
    with pytest.raises(AssertionError, match="already has a slot"):
        residency.reserve(3, speculative=False)
    with pytest.raises(AssertionError, match="may not be evicted"):
        residency.evict(3)
    residency.complete(3)
    with pytest.raises(AssertionError, match="not under way"):
        residency.complete(3)
    residency.sort_out([3])
    with pytest.raises(AssertionError, match="may not be evicted"):
        residency.evict(3)
    with pytest.raises(DaopError, match="negative"):
        make([-1])


def test_sorting_out_a_step_protects_it() -> None:
    residency = Residency(Geometry.uniform(1, 6, 4, 10), [4])
    for flat in (0, 1):
        residency.reserve(flat, speculative=False)
    residency.complete(0)
    assert residency.sort_out([0, 1, 2]) == ([0], [1], [2])
    assert residency.missing([0, 1, 2]) == [2]
    assert residency.protected.tolist() == [True, True, True, False, False, False]
    assert not residency.evictable[0], "what the running layer needs is not a victim"
    residency.complete(1)
    assert not residency.evictable[1]
    residency.unprotect([0, 1, 2])
    assert residency.evictable[0]
