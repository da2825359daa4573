"""``on_demand``: keeps nothing. The floor of every comparison."""

from __future__ import annotations

from .base import POLICIES, Policy


@POLICIES.register("on_demand")
class OnDemand(Policy):
    """Streams every expert when it is asked for (the behaviour of a plain offload)."""

    plan_us = 1.5
