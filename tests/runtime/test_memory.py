"""The division of memory: whatever is asked, nothing exceeds its bound, and what cannot be is an error."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from daop.core import DaopError
from daop.runtime.memory import SlotClass, default_headroom, divide, slots_for_bytes, slots_for_share

CLASSES = st.lists(
    st.builds(SlotClass, experts=st.integers(1, 300), slot_bytes=st.integers(1, 10**9)),
    min_size=1,
    max_size=3,
)
GIB = 1 << 30


def bytes_of(classes: list[SlotClass], slots: tuple[int, ...]) -> int:
    return sum(count * kind.slot_bytes for count, kind in zip(slots, classes, strict=True))


@given(CLASSES, st.floats(0, 1.2), st.integers(0, 10**9))
def test_slots_fill_a_budget_and_never_exceed_it(classes: list[SlotClass], share: float, extra: int) -> None:
    whole = sum(kind.experts * kind.slot_bytes for kind in classes)
    budget = int(whole * share) + extra
    slots = slots_for_bytes(classes, budget)
    assert bytes_of(classes, slots) <= budget
    for count, kind in zip(slots, classes, strict=True):
        assert 0 <= count <= kind.experts
        unused = budget - bytes_of(classes, slots)
        assert count == kind.experts or unused < kind.slot_bytes, "another slot would fit"
    if budget >= whole:
        assert slots == tuple(kind.experts for kind in classes)


@given(CLASSES, st.floats(0, 1), st.floats(0, 1))
def test_more_share_is_never_fewer_slots(classes: list[SlotClass], one: float, two: float) -> None:
    few, many = (slots_for_share(classes, share) for share in sorted((one, two)))
    assert all(a <= b for a, b in zip(few, many, strict=True))
    assert sum(slots_for_share(classes, 0.0)) == 0
    assert slots_for_share(classes, 1.0) == tuple(kind.experts for kind in classes)


@pytest.mark.parametrize("experts", [1, 3, 7, 60, 64, 128, 384])
def test_a_share_of_n_experts_means_n_experts(experts: int) -> None:
    for wanted in range(experts + 1):
        classes = [SlotClass(experts=experts, slot_bytes=10)]
        assert slots_for_share(classes, wanted / experts) == (wanted,)


@given(
    CLASSES,
    st.integers(0, 10**10),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(0, 10**12),
    st.one_of(st.none(), st.integers(0, 10**12)),
)
def test_a_plan_fits_or_is_an_error(
    classes: list[SlotClass], non_experts: int, cache: int, workspace: int, limit: int, asked: int | None
) -> None:
    rest = non_experts + cache + workspace + default_headroom(limit)
    try:
        plan = divide(
            classes=classes,
            non_experts=non_experts,
            kv_cache=cache,
            workspace=workspace,
            limit=limit,
            limit_source="test",
            fast_memory=asked,
        )
    except DaopError:
        whole = sum(kind.experts * kind.slot_bytes for kind in classes)
        assert rest > limit or min(whole, asked or 0) > limit - rest
        return
    assert plan.total + plan.headroom <= limit
    assert plan.experts == bytes_of(classes, plan.slots)
    assert asked is None or plan.experts <= asked
    assert 0 <= plan.ecr <= 1


def test_auto_takes_all_experts_when_they_fit_and_what_is_left_when_not() -> None:
    classes = [SlotClass(experts=100, slot_bytes=GIB // 100)]
    rest = {"non_experts": GIB, "kv_cache": 0, "workspace": 0, "limit_source": "test", "headroom": 0}
    assert divide(classes=classes, limit=3 * GIB, **rest).ecr == 1  # type: ignore[arg-type]
    assert divide(classes=classes, limit=GIB + GIB // 2, **rest).ecr == 0.5  # type: ignore[arg-type]
    assert divide(classes=classes, limit=GIB, **rest).ecr == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("slot_bytes", [3, 10**6, 3 * 10**9, 10**10 + 7])
def test_a_byte_less_than_n_slots_is_a_slot_less(slot_bytes: int) -> None:
    classes = [SlotClass(experts=300, slot_bytes=slot_bytes)]
    assert slots_for_bytes(classes, 100 * slot_bytes) == (100,)
    assert slots_for_bytes(classes, 100 * slot_bytes - 1) == (99,)
    mixed = [SlotClass(experts=1, slot_bytes=3), *classes]  # the share of the first rounds to no slot
    assert slots_for_bytes(mixed, 100 * slot_bytes - 1) == ((1, 99) if slot_bytes > 3 else (0, 99))


def test_experts_that_fit_the_limit_but_not_beside_the_rest_are_refused() -> None:
    with pytest.raises(DaopError, match=r"only 512 MiB are left"):
        divide(
            classes=[SlotClass(experts=1, slot_bytes=600 << 20)],
            non_experts=GIB // 4,
            kv_cache=GIB // 4,
            workspace=0,
            headroom=0,
            limit=GIB,
            limit_source="test",
            ecr=1.0,
        )


def test_a_budget_beyond_all_experts_is_capped_and_said() -> None:
    plan = divide(
        classes=[SlotClass(experts=4, slot_bytes=1 << 20)],
        non_experts=0,
        kv_cache=0,
        workspace=0,
        limit=GIB,
        limit_source="test",
        fast_memory=GIB,
    )
    assert plan.slots == (4,)
    assert "all experts take 4.00 MiB" in plan.reason


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"fast_memory": 1, "ecr": 0.5}, "not both"),
        ({"fast_memory": -1}, "negative"),
        ({"ecr": 1.5}, "between 0"),
        ({"ecr": float("nan")}, "between 0"),
        ({"ecr": 1.0}, "--fast-memory 440MiB"),
        ({"non_experts": 2 * GIB}, "without a resident expert"),
    ],
)
def test_errors_name_the_numbers_and_the_remedy(asked: dict[str, float], words: str) -> None:
    usual = {
        "non_experts": GIB // 2,
        "kv_cache": 0,
        "workspace": 8 << 20,
        "limit": GIB,
        "limit_source": "test",
    }
    with pytest.raises(DaopError, match=words):
        divide(classes=[SlotClass(experts=10, slot_bytes=GIB)], **(usual | asked))  # type: ignore[arg-type]


@given(CLASSES, st.integers(1, 10**12))
def test_the_remedy_of_a_budget_that_does_not_fit_fits(classes: list[SlotClass], limit: int) -> None:
    common = {
        "classes": classes,
        "non_experts": limit // 3,
        "kv_cache": 0,
        "workspace": 0,
        "limit": limit,
        "limit_source": "test",
    }
    try:
        divide(**common, ecr=1.0)  # type: ignore[arg-type]
        assume(False)
    except DaopError as error:
        message = str(error)
    if "--fast-memory" in message:
        size = int(message.split("at most --fast-memory ")[1].split("MiB")[0]) << 20
        assert divide(**common, fast_memory=size).experts <= size  # type: ignore[arg-type]
        share = float(message.split("(--ecr ")[1].split(")")[0])
        divide(**common, ecr=share)  # type: ignore[arg-type]
