"""``fiddler``: static by frequency; each miss runs where it ends sooner, on the host or after a copy.

Source: Kamahori et al., Fiddler (ICLR 2025): popularity placement, and per expert the smaller of the
host's time for its tokens and the transfer plus the device's time. Nothing is kept of a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

from daop.core import Step

from .base import POLICIES, Costs, Plan, View
from .static import StaticFrequency


def cheaper_side(missing: Sequence[int], step: Step, costs: Costs) -> tuple[list[int], list[int]]:
    """Each miss by itself: (to stream, to compute on the host)."""
    tokens = dict(zip(step.experts, step.tokens, strict=True))
    stream: list[int] = []
    host: list[int] = []
    for flat in missing:
        n = tokens[flat]
        sooner = costs.host(flat, n) <= costs.copy(flat) + costs.device(flat, n)
        (host if sooner else stream).append(flat)
    return stream, host


@POLICIES.register("fiddler")
class Fiddler(StaticFrequency):
    """Placement by frequency, misses by cost."""

    plan_us = 5.0

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        if not missing:
            return Plan()
        stream, host = cheaper_side(missing, step, self.costs)
        return Plan(stream=stream, host=host)
