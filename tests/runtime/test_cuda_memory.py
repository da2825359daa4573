"""Where experts lie: arenas of host memory, slabs of slots, and the windows that a product is given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from cuda_standin import StandIn
from hypothesis import given
from hypothesis import strategies as st

from daop.core import Geometry
from daop.runtime.cuda.arenas import choose_for_ram, pack
from daop.runtime.cuda.compute import make_group, make_windows
from daop.runtime.cuda.slabs import DeviceMemory
from daop.runtime.layout import ExpertLayout

LAYOUT = ExpertLayout.pack([("up", (37, 5), "F32"), ("down", (5, 37), "F32")])


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 1000))
def test_experts_never_cross_an_arenas_border(sizes: list[int], arena_bytes: int) -> None:
    places, arenas = pack(sizes, arena_bytes)
    spans = sorted(
        (place.arena, place.offset, place.offset + size) for place, size in zip(places, sizes, strict=True)
    )
    for (arena, _, end), (other, begin, _) in pairwise(spans):
        assert arena != other or end == begin, "one behind the other, without gaps"
    for arena, _, end in spans:
        assert end <= arenas[arena]
    assert sum(arenas) == sum(sizes)
    assert all(size <= max(arena_bytes, max(sizes)) for size in arenas)


def test_locked_memory_exceeds_the_weights_by_less_than_two_percent() -> None:
    layout = ExpertLayout.pack([(role, (768, 2048), "BF16") for role in ("gate", "up", "down")])
    sizes = [layout.nbytes] * 6144
    _, arenas = pack(sizes)
    locked = sum(-(-arena // 4096) * 4096 for arena in arenas)
    assert len(arenas) == 14
    assert locked <= 1.02 * 6144 * layout.stored_bytes


@given(st.integers(1, 4), st.integers(2, 7), st.integers(0, 30))
def test_what_is_kept_in_ram_is_shared_by_the_layers(layers: int, experts: int, room: int) -> None:
    geometry = Geometry.uniform(layers, experts, 1, 10)
    chosen = choose_for_ram(geometry, [10] * layers, room * 10 + 9)
    assert len(chosen) == min(room, geometry.total)
    held = [sum(int(geometry.layer_of[flat]) == layer for flat in chosen) for layer in range(layers)]
    assert max(held) - min(held) <= 1


@given(
    st.dictionaries(st.integers(0, 400), st.integers(1, 5), min_size=1, max_size=12),
    st.integers(1, 300),
    st.integers(1, 100),
)
def test_windows_cover_every_row_once(rows_of: dict[int, int], window: int, gap: int) -> None:
    slots = sorted(rows_of)
    rows = [rows_of[number] for number in slots]
    found = []
    at = 0
    for one in make_windows(slots, rows, window, gap):
        assert one.begin == at
        assert one.count <= window
        assert len(one.ends) == one.count
        begin = 0
        for place, end in enumerate(one.ends.tolist()):
            found += [one.first + place] * (end - begin)
            begin = end
        at = one.end
        assert at == one.begin + begin
    assert found == [number for number, count in zip(slots, rows, strict=True) for _ in range(count)]


def test_a_group_is_in_the_order_of_slots() -> None:
    pairs = [np.array([4, 6]), np.array([1]), np.array([0, 2, 9])]
    group = make_group([7, 30, 2], pairs)
    assert group.slots == [2, 7, 30]
    assert group.pairs.tolist() == [0, 2, 9, 4, 6, 1]
    assert group.arrays()[1].tolist() == [2, 2, 2, 7, 7, 30]


def test_parts_are_seen_over_all_slots() -> None:
    memory = DeviceMemory(StandIn(), (LAYOUT,), [5], 1)
    slab = memory.slabs[0]
    slab.tensor.random_(0, 100)
    for part in LAYOUT.parts:
        whole = slab.part(part)
        for number in range(5):
            assert torch.equal(whole[number], LAYOUT.views(slab.tensor[number])[part.role])
            assert whole[number].data_ptr() == slab.address(number) + part.offset
    with pytest.raises(IndexError):
        slab.address(5)
