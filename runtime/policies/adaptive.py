"""``adaptive``: daop's own policy. Every slot holds what is most likely to be used before it is given up.

Worth of an expert, in expected uses saved:

    worth = chance at its layer's next visit + STAY * usual rate of use

Both come from a running forecast (a trained predictor's, else the context model's: sharp for the next
layers of this token, blunter for the next token), blended with the plain frequency by which of the two has
been right lately; so a forecast that stops paying loses its say, and regains it when it pays again. From it
follow

    victims      the least worth of what may leave; for speculation only if worth less than what comes
    look-ahead   while the link would be idle within the coming layer, the absent expert of most worth;
                 the chance counts only as far as the copy can arrive before its layer asks
    misses       to the host or over the link, by what ends first; a prefetch that would come too late is
                 left to finish while the host computes its expert
    prefill      streams and computes by cost and fills free slots, but gives up nothing

Where there is no host beside the device (tier ``host``) every miss is read; it is kept if it is worth
more than what would leave. There the next layer's gate is asked too (``ForecastBlend``), and what it surely
names is read behind this layer's own reads, so that the disk never idles (``ReadWindow``): measured 1.4 to
1.6 times static placement and 1.1 to 1.3 times ``lru`` on a virtual disk of 0.7 to 1.9 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daop.core import FloatArray, Forecast, Geometry, Phase, Step
from daop.runtime.forecast_blend import ForecastBlend
from daop.runtime.forecast_source import running_forecast
from daop.runtime.read_window import ReadWindow
from daop.runtime.worth import WorthTable

from .base import POLICIES, Costs, Outcome, Plan, Policy, Prefetch, View
from .lfu import lowest
from .static import by_frequency, uniform

MARGIN = 0.10
STALL_MEMORY = 0.005
HORIZON = 1  # layers of gate look-ahead, where misses are read from a disk

SMOOTH = 0.05
# Microseconds charged. The first two are measured (benchmarks/policy_overhead.py), the look-ahead's are what
# a quiet core is assumed to need: on a shared 2 GHz core it took 126 (24 x 32 experts) and 183 (48 x 128).
HIT_US, MISS_US, LOOK_US, REST_US = 2.0, 10.0, 100.0, 1.0
# Measured with the compiled library: a part, and one for each expert of a layer (36 to 39 us for 32 and 71 to
# 75 for 128 on the context model, 51 and 81 on visits).
NATIVE_LOOK_US = {"context model": (28.0, 0.35), "visits": (41.0, 0.31)}
GLANCE, GLANCE_US = 0.8, 55.0
SLEEP, WAKE = 0.15, 0.3  # of the look-ahead's own cost, what stalls must cost to be worth it


@POLICIES.register("adaptive")
class Adaptive(Policy):
    """Works without a profile (learning as it goes), and from token 0 with one."""

    keeps_hot_set = True

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        frequency = None if self.profile is None else self.profile.frequency
        self._state = running_forecast(geometry, self.profile)
        self._table = WorthTable(self._state, geometry)
        self._native = self._state.native is not None
        base, each = NATIVE_LOOK_US[self._state.source]
        self._look_us = base + each * max(geometry.experts) if self._native else LOOK_US
        self._copy = max(costs.copy(begin) for begin in geometry.offsets[:-1])
        self._layer_seconds = costs.layer(1)
        self._between = costs.layer(1)
        self._device = costs.device(0, 1)
        self._ends = 0.0
        self._resting = False
        self._stalled = self._look_us  # microseconds per layer, of late
        self._last = 0.0
        self._flying: dict[int, float] = {}  # prefetch under way -> when it should arrive
        if not costs.host_beside:
            self.horizon = HORIZON
            self._blends = [ForecastBlend(geometry) for _ in range(HORIZON)]
            self._window = ReadWindow(geometry, costs)
        return uniform(geometry, slots) if frequency is None else by_frequency(frequency, slots)

    def begin_sequences(self, count: int) -> None:
        self._state.begin_sequences(count)

    # -- where a miss runs -----------------------------------------------------------------------

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        took = view.now - self._last
        self._last = view.now
        if step.phase is Phase.DECODE and took < 10 * self._layer_seconds + 1.0:
            self._layer_seconds += SMOOTH * (took - self._layer_seconds)
        if step.phase is Phase.PREFILL:
            return self._plan_prefill(step, missing, view)
        if not self.costs.host_beside:
            self.plan_us = MISS_US
            return self._plan_reads(step, missing, view)
        flying = [flat for flat in step.experts if flat in self._flying] if self._flying else []
        self._ends = view.now + (len(step.experts) - len(missing)) * self._device
        if not (missing or flying):
            self.plan_us = HIT_US
            return Plan()
        self.plan_us = MISS_US
        return self._split(step, missing, [flat for flat in flying if view.filling[flat]], view)

    def _split(self, step: Step, missing: Sequence[int], filling: Sequence[int], view: View) -> Plan:
        """Host or link for each, the host's queue and the link's as they are now."""
        costs = self.costs
        tokens = dict(zip(step.experts, step.tokens, strict=True)) if step.rows > 1 else {}
        host = max(0.0, view.host_free_at - view.now)
        link = 0.0
        keep: list[int] = []
        computed: list[int] = []
        for flat in sorted(filling, key=self._flying.__getitem__):
            arrives = max(0.0, self._flying[flat] - view.now)
            waits = sum(costs.host(other, 1) for other in missing)
            if arrives <= max(host + waits, 0.5 * costs.host(flat, 1)):
                link = max(link, arrives)
            else:
                host += costs.host(flat, tokens.get(flat, 1))
                computed.append(flat)
        for flat in missing:
            n = tokens.get(flat, 1)
            by_host = host + costs.host(flat, n)
            by_link = link + costs.copy(flat)
            if by_host <= by_link + costs.device(flat, n):
                host = by_host
                computed.append(flat)
            else:
                link = by_link
                keep.append(flat)
        self._ends = max(self._ends, view.now + max(host, link))
        return Plan(keep=keep, host=computed)

    def _plan_reads(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._window.planned(view.now)
        for blend in self._blends:
            blend.learn(step)
        self._table.absorb(step)
        self._missing = len(missing)
        worth = self._table.flat
        if not missing or view.free_slots(missing[0]) >= len(missing):
            return Plan(keep=missing)
        order = sorted(missing, key=lambda flat: -worth[flat])
        least = lowest(worth, len(order), view, order[0])
        kept = 0
        while kept < min(len(order), len(least)) and worth[order[kept]] > worth[least[kept]]:
            kept += 1
        return Plan(keep=order[:kept], stream=order[kept:])

    def _plan_prefill(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        free = view.free_slots(missing[0]) if missing else 0
        if not self.costs.host_beside:
            self._window.interrupted()
            return Plan(keep=missing[:free], stream=missing[free:])
        tokens = dict(zip(step.experts, step.tokens, strict=True))
        order = sorted(missing, key=lambda flat: -tokens[flat])  # the busiest gain most from the device
        host = link = 0.0
        moved: list[int] = []
        computed: list[int] = []
        for flat in order:
            by_host = host + self.costs.host(flat, tokens[flat])
            by_link = link + self.costs.copy(flat)
            if by_link <= by_host:
                link = by_link
                moved.append(flat)
            else:
                host = by_host
                computed.append(flat)
        return Plan(keep=moved[:free], stream=moved[free:], host=computed)

    # -- what to keep ----------------------------------------------------------------------------

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        worth = self._table.flat
        if prefetch is None:
            return lowest(worth, count, view, incoming)
        chosen = lowest(worth, 1, view, incoming)
        return chosen if chosen and worth[chosen[0]] + MARGIN < prefetch.value else ()

    # -- what to bring early ---------------------------------------------------------------------

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        if self._resting and step.phase is Phase.DECODE:
            self.look_ahead_us = REST_US
            return ()
        if step.phase is Phase.DECODE and not self.costs.host_beside:
            self.look_ahead_us = self._look_us
            return self._read_ahead(step, forecasts, view)
        short = self._ends - view.now < GLANCE * LOOK_US * 1e-6
        if short and not self._native and step.rows == 1:
            self.look_ahead_us = GLANCE_US
            self._table.glance(step)
        else:
            self.look_ahead_us = self._look_us
            self._table.absorb(step)
        now = view.now
        queued = max(0.0, view.link_free_at - now)
        if self._flying:
            self._flying = {flat: at for flat, at in self._flying.items() if view.filling[flat]}
        window = max(self._ends - now, 0.0) + self._between
        if queued >= window:
            return ()
        asked: list[Prefetch] = []
        taken: list[int] = []
        while queued < window and len(asked) < 3:
            late = self._late(step.layer, queued, window)
            flat, value = self._table.best(view.resident, view.filling, late, taken)
            if value <= MARGIN:
                break
            taken.append(flat)
            queued += self._copy
            self._flying[flat] = now + queued
            asked.append(Prefetch(flat, value, None))
        return asked

    def _read_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        """Where misses are read: the absent experts of most worth while the disk would idle, if it pays."""
        chance, window = self._table.state.chance, self._window
        for blend, forecast in zip(self._blends, forecasts, strict=False):
            known = chance[forecast.layer, : len(forecast.scores)]
            self._table.foretell(step.layer, forecast.layer, blend.chance(forecast, known))
        queued = max(0.0, view.link_free_at - view.now)
        if self._flying:
            self._flying = {flat: at for flat, at in self._flying.items() if view.filling[flat]}
        window.looked(view.now, queued, 0 if self._flying else self._missing)
        idle = window.idle(step.layer, len(step.experts) - self._missing, self._missing, queued)
        asked: list[Prefetch] = []
        taken: list[int] = []
        while len(asked) < self.geometry.top_k:
            flat, value = self._table.best(view.resident, view.filling, (), taken)
            if value <= MARGIN:
                break
            layer, expert = self.geometry.pair(flat)
            soon = layer == step.layer + 1
            if not window.pays(float(chance[layer, expert]), idle, soon):
                break
            taken.append(flat)
            idle -= window.read
            self._flying[flat] = view.now + queued + len(taken) * window.read
            asked.append(Prefetch(flat, value, 1 if soon else None))
        return asked

    def observe(self, outcome: Outcome) -> None:
        """Rest while misses cost less than looking ahead would; wake up when they cost more."""
        if outcome.step.phase is not Phase.DECODE:
            return
        if not self.costs.host_beside:
            self._window.finished(outcome)
            return
        self._stalled += STALL_MEMORY * (outcome.stall_seconds * 1e6 - self._stalled)
        self._resting = self._stalled < (WAKE if self._resting else SLEEP) * self._look_us

    @property
    def prefetching(self) -> bool:
        return not self._resting

    @property
    def forecast(self) -> dict[str, Any] | None:
        return self._state.figures

    def expected(self, layer: int) -> FloatArray | None:
        chance: FloatArray = self._state.chance[layer, : self.geometry.experts[layer]]
        return chance

    def _late(self, layer: int, queued: float, until: float) -> list[int]:
        """Layers that will have asked before a copy begun now behind ``queued`` can arrive."""
        arrives = queued + self._copy - 0.5 * self.costs.host(0, 1)
        if arrives <= until:
            return []
        ahead = 1 + int((arrives - until) / max(self._layer_seconds, 1e-9))
        return [(layer + lead) % self.geometry.layers for lead in range(1, min(ahead, 4) + 1)]
