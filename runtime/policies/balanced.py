"""``balanced``: one LRU pool; of m misses some are copied and kept, the rest computed on the host.

Source: FreeToken (arXiv 2608.16157): copy q* = m * B_link / B_host of them, rounded so that both ends
finish together. Of the two roundings the one whose later end is sooner is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from daop.core import Step

from .base import POLICIES, Costs, Plan, View
from .lru import Lru


def balance(missing: Sequence[int], step: Step, costs: Costs) -> int:
    """How many of the misses to copy, busiest first: q* rounded to the side that ends sooner."""
    tokens = dict(zip(step.experts, step.tokens, strict=True))
    copies = [costs.copy(flat) for flat in missing]
    hosts = [costs.host(flat, tokens[flat]) for flat in missing]
    share = sum(hosts) / sum(copies) if sum(copies) else 1.0  # B_link / B_host
    low = min(len(missing), int(len(missing) * share))
    high = min(len(missing), low + 1)
    ends = [max(sum(copies[:q]), sum(hosts[q:])) for q in (low, high)]
    return low if ends[0] <= ends[1] else high


@POLICIES.register("balanced")
class Balanced(Lru):
    """Where there is no host beside the device, every miss is copied."""

    plan_us = 10.0

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._recency.use(step.experts)
        if not missing:
            return Plan()
        if not self.costs.host_beside:
            return Plan(keep=missing)
        order = list(missing)
        if step.rows > 1:
            tokens = dict(zip(step.experts, step.tokens, strict=True))
            order.sort(key=lambda flat: -tokens[flat])
        copied = balance(order, step, self.costs)
        return Plan(keep=order[:copied], host=order[copied:])
