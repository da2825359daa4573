"""Splits: by sequence, seeded, copies on one side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.core import DaopError, Geometry
from daop.training.split import split_by_sequence, without_copies
from daop.training.trace import Trace


def make_trace(sequences: int, length: int = 8, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    n = sequences * length
    ids = np.argsort(rng.random((n, 2, 16)), axis=2)[:, :, :3].astype(np.uint16)
    return Trace(
        geometry=Geometry.uniform(2, 16, 3),
        sequence=np.repeat(np.arange(sequences, dtype=np.int32) * 3, length),
        position=np.tile(np.arange(length, dtype=np.int32), sequences),
        phase=np.ones(n, dtype=np.uint8),
        ids=ids,
    )


@settings(max_examples=20, deadline=None)
@given(sequences=st.integers(2, 40), share=st.floats(0.05, 0.6), seed=st.integers(0, 5))
def test_a_split_is_whole_disjoint_and_repeatable(sequences: int, share: float, seed: int) -> None:
    trace = make_trace(sequences)
    split = split_by_sequence(trace, test_share=share, seed=seed)
    assert set(split.train) | set(split.test) == set(trace.sequences)
    assert not set(split.train) & set(split.test)
    assert len(split.train)
    assert len(split.test)
    again = split_by_sequence(trace, test_share=share, seed=seed)
    np.testing.assert_array_equal(split.test, again.test)


def test_copies_land_on_one_side_and_are_found() -> None:
    trace = make_trace(12)
    ids = trace.ids.copy()
    ids[8:16] = ids[0:8, :, ::-1]  # sequence 3 is sequence 0 with the choices listed in another order
    trace = replace(trace, ids=ids)
    for seed in range(8):
        split = split_by_sequence(trace, seed=seed)
        assert (0 in split.test) == (3 in split.test)
    rest, dropped = without_copies(trace, trace.select([0]))
    assert dropped == 2
    assert not {0, 3} & set(rest.sequences)


def test_single_sequence_cannot_be_split() -> None:
    with pytest.raises(DaopError, match="at least 2 different sequences"):
        split_by_sequence(make_trace(1))
    with pytest.raises(DaopError, match="--test-share"):
        split_by_sequence(make_trace(4), test_share=1.5)
