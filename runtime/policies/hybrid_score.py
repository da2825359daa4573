"""``hybrid_score``: cache by decayed router scores, prefetch and schedule by simulated layer time.

Source: HybriMoE (Zhong et al., DAC 2025): (1) each expert's score is a moving average of its router
scores, only the largest 2k counting; the lowest leaves. (2) The split of a layer's misses is the one
whose simulated max(host, link + device) is least: busiest experts are copied, the rest runs on the host.
(3) The next three layers' forecasts are simulated too, and the prefetch that saves most goes first.
Difference: where only the chosen experts' router weights are known, the others score zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import Forecast, Geometry, Step

from .base import POLICIES, Costs, Plan, Policy, Prefetch, View
from .lfu import lowest

DECAY = 0.9


@POLICIES.register("hybrid_score")
class HybridScore(Policy):
    """A copied expert is kept; one computed on the host is not."""

    horizon = 3
    plan_us = 28.0
    look_ahead_us = 27.0

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        self._score = np.zeros(geometry.total, dtype=np.float32)
        return ()

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        begin, end = self.geometry.offsets[step.layer : step.layer + 2]
        part = self._score[begin:end]
        part *= DECAY
        gained = step.tokens if step.weights is None else step.weights
        self._score[step.experts] += np.asarray(gained, dtype=np.float32) * (
            (1.0 - DECAY) / max(1, step.rows)
        )
        if not missing:
            return Plan()
        if not self.costs.host_beside:
            return Plan(keep=missing)
        device, tokens = self.costs.device, dict(zip(step.experts, step.tokens, strict=True))
        order = missing if step.rows == 1 else sorted(missing, key=lambda flat: -tokens[flat])
        absent = set(missing)
        ready = sum([device(flat, n) for flat, n in tokens.items() if flat not in absent])
        copied = self._best_split(order, tokens, ready)
        return Plan(keep=order[:copied], host=order[copied:])

    def _best_split(self, order: Sequence[int], tokens: dict[int, int], ready: float) -> int:
        """How many of ``order`` to copy so that the layer ends soonest."""
        costs = self.costs
        on_host = [costs.host(flat, tokens[flat]) for flat in order]
        host = sum(on_host)
        link, device = 0.0, ready
        best, copied = max(ready, host), 0
        for index, flat in enumerate(order):
            link += costs.copy(flat)
            host -= on_host[index]
            device = max(device, link) + costs.device(flat, tokens[flat])
            end = max(device, host)
            if end < best:
                best, copied = end, index + 1
            if device >= host:  # another copy would only make it later
                break
        return copied

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        chosen = lowest(self._score, count, view, incoming)
        if prefetch is not None:
            return [flat for flat in chosen if self._score[flat] < prefetch.value / self.costs.host(flat, 1)]
        return chosen

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        if not forecasts or view.link_free_at > view.now + self.costs.copy(step.experts[0]):
            return ()
        k, offsets = self.geometry.top_k, self.geometry.offsets
        begin, end = offsets[forecasts[0].layer], offsets[forecasts[-1].layer + 1]
        here = view.resident[begin:end] | view.filling[begin:end]
        best: tuple[float, int, int] | None = None
        for ahead, forecast in enumerate(forecasts, start=1):
            base, scores = offsets[forecast.layer], forecast.scores
            absent = scores.copy()
            absent[here[base - begin : base - begin + len(scores)]] = -1.0
            likeliest = int(absent.argmax())
            score = absent[likeliest]
            if score < 0 or np.count_nonzero(scores > score) >= k:  # none of the k likeliest is absent
                continue
            # With one miss less the layer ends sooner by the host's time for it, as likely as it is used.
            gain = float(score) * self.costs.host(base + likeliest, 1)
            if best is None or gain > best[0]:
                best = gain, base + likeliest, ahead
        return [] if best is None else [Prefetch(best[1], best[0], best[2])]
