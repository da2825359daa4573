"""Splits by sequence, seeded and blind to order of recording; never by token.

Neighbouring tokens of one text route alike, so a split by token would test on what was fitted.
Sequences with the same content count as one: they land on the same side.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, IntArray

from .trace import Trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Sequence numbers on either side, ascending."""

    train: IntArray
    test: IntArray
    seed: int
    test_share: float


def sequence_digests(trace: Trace) -> list[str]:
    """A digest of each sequence's routing, in the order of ``trace.sequences``.

    Choices are sorted within a token first, so the same text recorded with ties broken otherwise is found.
    """
    trace = trace.grouped()
    ids = np.sort(trace.ids, axis=2)
    bounds = zip(trace.offsets[:-1], trace.offsets[1:], strict=True)
    return [hashlib.sha256(ids[a:b].tobytes()).hexdigest()[:32] for a, b in bounds]


def split_by_sequence(trace: Trace, *, test_share: float = 0.2, seed: int = 0) -> Split:
    """Put ``test_share`` of the distinct sequences aside for testing."""
    if not 0 < test_share < 1:
        raise DaopError(f"--test-share is {test_share}, but must lie between 0 and 1")
    trace = trace.grouped()
    _, group = np.unique(np.asarray(sequence_digests(trace), dtype=np.str_), return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    held_out = max(1, round(test_share * groups))
    if held_out >= groups:
        raise DaopError(
            f"a split by sequence needs at least 2 different sequences, the trace has {groups}; record more, "
            "or train on one trace and evaluate on another"
        )
    first_seen = {int(g): i for i, g in reversed(list(enumerate(group)))}
    order = sorted(first_seen, key=first_seen.__getitem__)
    chosen = np.random.default_rng(seed).permutation(groups)[:held_out]
    in_test = np.isin(group, np.asarray(order)[chosen])
    sequences = trace.sequences
    return Split(train=sequences[~in_test], test=sequences[in_test], seed=seed, test_share=test_share)


def without_copies(trace: Trace, of: Trace) -> tuple[Trace, int]:
    """``trace`` less the sequences whose routing also stands in ``of``, and how many those were."""
    trace = trace.grouped()
    known = set(sequence_digests(of))
    keep: NDArray[np.bool_] = np.asarray([d not in known for d in sequence_digests(trace)], dtype=np.bool_)
    return trace.select(trace.sequences[keep]), int((~keep).sum())
