"""``prefill_swap``: DAOP's placement without its approximate decode: swap during prefill, then stay.

Source: Zhang, Aggarwal and Mitra, DAOP (DATE 2025, arXiv 2501.10375), steps 1 and 2. Start: every layer
gets floor(slots / layers) of its most frequent experts, the remainder follows the global ranking. In a
prefill, layer by layer, the E/2 busiest experts behind the link are paired with the E/2 idlest resident
ones, and a pair is swapped if the first has more than 1.05 times the tokens of the second. Then every
expert of the prompt runs where that costs less. Nothing moves during decode.

Two quirks of the released code are left out (an exponential placement loop; a swap used up by an expert
without tokens). A resident expert that the prompt needs is computed before it gives up its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import Forecast, Geometry, Phase, Step

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View
from .fiddler import cheaper_side
from .static import uniform

MARGIN = 1.05


@POLICIES.register("prefill_swap")
class PrefillSwap(Policy):
    """Without a profile it starts from the uniform placement."""

    plan_us = 1.5

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        self._pending: list[tuple[int, int]] = []  # (leaves, comes), once the first was computed
        self._leaving: dict[int, int] = {}
        if self.profile is None:
            return uniform(geometry, slots)
        frequency = self.profile.frequency
        ranked: list[int] = np.argsort(-frequency, kind="stable").tolist()
        share = slots // geometry.layers
        layer_of = geometry.layer_of.tolist()
        held = [0] * geometry.layers
        chosen: list[int] = []
        for flat in ranked:
            if held[layer_of[flat]] < share:
                held[layer_of[flat]] += 1
                chosen.append(flat)
        taken = set(chosen)
        return [*chosen, *(flat for flat in ranked if flat not in taken)][:slots]

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        if step.phase is Phase.DECODE:
            return Plan(host=missing)
        pairs = self._swaps(step, missing, view)
        tokens = dict(zip(step.experts, step.tokens, strict=True))
        at_once = [(out, into) for out, into in pairs if out not in tokens]
        self._pending += [(out, into) for out, into in pairs if out in tokens]
        keep = [into for _, into in at_once]
        stream, host = cheaper_side([flat for flat in missing if flat not in set(keep)], step, self.costs)
        return Plan(keep=keep, stream=stream, host=host, evict=[out for out, _ in at_once])

    def _swaps(self, step: Step, missing: Sequence[int], view: View) -> list[tuple[int, int]]:
        begin, end = self.geometry.offsets[step.layer : step.layer + 2]
        tokens = dict(zip(step.experts, step.tokens, strict=True))
        half = (end - begin) // 2
        busy = sorted(missing, key=lambda flat: -tokens[flat])[:half]
        resident = [flat for flat in range(begin, end) if view.resident[flat]]
        idle = sorted(resident, key=lambda flat: tokens.get(flat, 0))[:half]
        return [
            (out, into)
            for into, out in zip(busy, idle, strict=False)
            if tokens[into] > MARGIN * tokens.get(out, 0)
        ]

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        """Swaps whose resident half has been computed by now."""
        if not self._pending:
            return ()
        ready = [(out, into) for out, into in self._pending if view.evictable[out]]
        self._pending = [(out, into) for out, into in self._pending if not view.evictable[out]]
        self._leaving = {into: out for out, into in ready}
        return [Prefetch(into, 0.0, None) for _, into in ready]

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        out = self._leaving.pop(incoming, None)
        return [out] if out is not None and view.evictable[out] else []
