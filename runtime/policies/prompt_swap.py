"""Base of ``daop``: experts are swapped during prefill as DAOP does, then nothing moves.

The swaps start from the placement at the start, not from where the last request left it, so that at batch 1
what is resident is what ``SequencePlacement`` says of the sequence alone. What an earlier request had swapped
out is brought back behind all demand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import Geometry, Phase, Step
from daop.runtime.sequence_placement import SequencePlacement

from .approximate import Approximate
from .base import Costs, Plan, View
from .prefill_swap import MARGIN, PrefillSwap


class PromptSwap(PrefillSwap, Approximate):
    """Prefill as in ``prefill_swap``; what decode does not find is computed where it lies."""

    exact = False

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        chosen = super().start(geometry, slots, costs, view)
        self.placement = self.book = SequencePlacement(geometry, chosen, MARGIN)
        self._counts = [np.zeros(n, dtype=np.int64) for n in geometry.experts]
        return chosen

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        if step.phase is Phase.DECODE:
            return Plan(host=[*missing, *(flat for flat in step.experts if view.filling[flat])])
        return super().plan(step, missing, view)

    def begin_sequences(self, count: int) -> None:
        for counts in self._counts:
            counts[:] = 0

    def _swaps(self, step: Step, missing: Sequence[int], view: View) -> list[tuple[int, int]]:
        begin, end = self.geometry.offsets[step.layer : step.layer + 2]
        counts = self._counts[step.layer]
        counts[np.asarray(step.experts) - begin] += np.asarray(step.tokens)
        wanted = self.book.after(step.layer, counts)
        held = view.resident[begin:end] | view.filling[begin:end]
        promised = {flat for pair in self._pending for flat in pair}
        out = np.flatnonzero(view.resident[begin:end] & ~wanted)
        into = np.flatnonzero(wanted & ~held)
        leaving = (out[np.argsort(counts[out], kind="stable")] + begin).tolist()
        coming = (into[np.argsort(-counts[into], kind="stable")] + begin).tolist()
        pairs = zip(
            [flat for flat in leaving if flat not in promised],
            [flat for flat in coming if flat not in promised],
            strict=False,
        )
        asked = set(missing)
        at_once: list[tuple[int, int]] = []
        for pair in pairs:  # what the prompt did not ask for comes behind all demand
            (at_once if pair[1] in asked else self._pending).append(pair)
        return at_once
