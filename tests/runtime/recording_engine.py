"""A stand-in for disks and links whose every timing is chosen by the test.

It keeps what each slot holds, so that a step which would compute with the wrong bytes is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from daop.core import Forecast, Geometry, Phase, Step
from daop.runtime.conductor import Conductor, Work
from daop.runtime.policies.base import Costs, Outcome, Plan, Policy, Prefetch, View
from daop.runtime.residency import Residency
from daop.runtime.statistics import Statistics

GARBAGE = -1


class FlatCosts:
    """Made-up costs: a copy takes three times as long as the host needs for the expert, unless told."""

    host_beside = True

    def __init__(self, copy_seconds: float = 3e-4) -> None:
        self.copy_seconds = copy_seconds

    def copy(self, flat: int) -> float:
        return self.copy_seconds

    def host(self, flat: int, tokens: int) -> float:
        return 1e-4 * tokens

    def device(self, flat: int, tokens: int) -> float:
        return 1e-5 * tokens

    def layer(self, rows: int) -> float:
        return 5e-5


@dataclass
class Fetch:
    slot: tuple[int, int]
    demand: bool
    begun: bool


class RecordingEngine:
    """``decide(n)`` answers a number in 0..n-1: the test's source of disorder."""

    def __init__(self, residency: Residency, decide: Callable[[int], int], faults: bool = False) -> None:
        self.residency = residency
        self.faults = faults
        self.decide = decide
        self.under_way: dict[int, Fetch] = {}
        self.content: dict[tuple[int, int], int] = {}
        self._arrived: list[int] = []
        self._failed: list[int] = []
        self.now = 0.0

    @property
    def link_free_at(self) -> float:
        return self.now + 3e-4 * len(self.under_way)

    @property
    def host_free_at(self) -> float:
        return self.now

    def place(self, flat: int) -> tuple[int, int]:
        return self.residency.class_of[flat], self.residency.slot_of[flat]

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        place = (self.residency.class_of[flat], slot)
        assert flat not in self.under_way, "fetched twice"
        assert place not in {other.slot for other in self.under_way.values()}, "slot is being filled"
        occupant = self.content.get(place, GARBAGE)
        if occupant != GARBAGE and self.residency.is_resident(occupant):
            assert self.place(occupant) != place, "overwrites a resident expert"
        self.content[place] = GARBAGE
        self.under_way[flat] = Fetch(place, demand, begun=self.decide(2) == 0)

    def promote(self, flat: int) -> None:
        self.under_way[flat].demand = True

    def cancel(self, flat: int) -> bool:
        fetch = self.under_way[flat]
        assert not fetch.demand, "a demand is never cancelled"
        if fetch.begun:
            return False
        del self.under_way[flat]
        return True

    def poll(self) -> Sequence[int]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def failed(self) -> Sequence[int]:
        failed, self._failed = self._failed, []
        return failed

    # -- what the test makes happen ----------------------------------------------------------------

    def shake(self) -> None:
        """Some fetches begin, end or fail, in any order."""
        self.now += 1e-4
        for flat in list(self.under_way):
            fetch = self.under_way[flat]
            what = self.decide(5)
            if what == 0:
                fetch.begun = True
            elif what == 1:
                self.land(flat)
                self._arrived.append(flat)
            elif what == 2 and (self.faults or not fetch.demand):
                del self.under_way[flat]
                self._failed.append(flat)

    def land(self, flat: int) -> None:
        fetch = self.under_way.pop(flat)
        self.content[fetch.slot] = flat


class Spy(Policy):
    """Passes everything on to ``inner``, and remembers the last plan."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.planned = Plan()

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        self.inner.profile = self.profile
        asked = self.inner.start(geometry, slots, costs, view)
        assert len(set(asked)) <= slots
        return asked

    def begin_sequences(self, count: int) -> None:
        self.inner.begin_sequences(count)

    def begin(self, phase: Phase, rows: int) -> None:
        self.inner.begin(phase, rows)

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self.planned = self.inner.plan(step, missing, view)
        return self.planned

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        chosen = self.inner.victims(incoming, count, view, prefetch)
        assert len(chosen) <= count
        return chosen

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        return self.inner.look_ahead(step, forecasts, view)

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)


class Chaotic(Policy):
    """Decides everything by lot, within the protocol: whatever it does must be safe."""

    horizon = 2

    def __init__(self, decide: Callable[[int], int]) -> None:
        self.decide = decide

    def _some(self, flats: Sequence[int]) -> list[int]:
        return [flat for flat in flats if self.decide(2)]

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        super().start(geometry, slots, costs, view)
        return self._some(range(geometry.total))[:slots]

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        for flat in missing:
            parts[self.decide(3)].append(flat)
        for flat in step.experts:
            if view.filling[flat] and self.decide(3) == 0:
                parts[1 + self.decide(2)].append(flat)
        leaving = [int(flat) for flat in np.flatnonzero(view.evictable)]
        return Plan(keep=parts[0], stream=parts[1], host=parts[2], evict=self._some(self._some(leaving)))

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        same = view.same_slot(incoming)
        allowed = view.evictable if same is None else view.evictable & same
        return self._some([int(flat) for flat in np.flatnonzero(allowed)])[:count]

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        flats = [self.decide(self.geometry.total) for _ in range(self.decide(5))]
        return [Prefetch(flat, 1.0, (None, 1, 2)[self.decide(3)]) for flat in flats]


class Harness:
    """Runs steps through a conductor as an executor would, and checks the invariants at each."""

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        slots: Sequence[int],
        class_of_layer: Sequence[int],
        decide: Callable[[int], int],
        faults: bool = True,
        costs: FlatCosts | None = None,
    ) -> None:
        self.geometry = geometry
        self.residency = Residency(geometry, slots, class_of_layer)
        self.slots = list(slots)
        self.decide = decide
        self.faults = faults
        self.engine = RecordingEngine(self.residency, decide, faults)
        self.statistics = Statistics(geometry)
        self.spy = Spy(policy)
        self.conductor = Conductor(
            self.spy, self.residency, self.engine, costs or FlatCosts(), self.statistics
        )
        self.policy = policy
        self.forward = -1
        started = self.conductor.start()
        for flat in started:
            self.engine.land(flat)
            self.conductor.arrived(flat)
        self.check_state(())

    def run_forward(self, phase: Phase, chosen: Sequence[Sequence[tuple[int, int]]], rows: int) -> list[Work]:
        """``chosen[layer]``: (expert, tokens) pairs, ascending. Returns each layer's work."""
        self.forward += 1
        self.conductor.begin(phase, rows, int(phase is Phase.PREFILL))
        return [self._layer(layer, phase, pairs, rows) for layer, pairs in enumerate(chosen)]

    def _layer(self, layer: int, phase: Phase, pairs: Sequence[tuple[int, int]], rows: int) -> Work:
        flats = [self.geometry.flat(layer, expert) for expert, _ in pairs]
        step = Step(layer, phase, self.forward, rows, flats, [tokens for _, tokens in pairs])
        self.engine.shake()
        conductor, engine = self.conductor, self.engine
        work = conductor.plan(step)
        self.check_work(step, work)
        engine.shake()
        early = self.decide(2) == 0
        if early:
            conductor.look_ahead(step, self._forecasts(layer))
            self.check_state(step.experts)
        if not all(self._deliver(flat) for flat in work.coming):
            self._break_off(step)
            return work
        self.check_state(step.experts)
        if not early:
            conductor.look_ahead(step, self._forecasts(layer))
            self.check_state(step.experts)
        for flat in (*work.ready, *work.coming):
            assert engine.content[engine.place(flat)] == flat, "would compute with another expert's bytes"
        conductor.finish(step, work, 1e-4, 1e-4)
        self.check_state(())
        return work

    def _deliver(self, flat: int) -> bool:
        """Wait for an expert as an executor does; False if it will not come."""
        engine = self.engine
        if flat in engine.under_way and self.faults and self.decide(7) == 0:
            del engine.under_way[flat]
            engine._failed.append(flat)
        if flat in engine._failed:  # now, or between plan and now
            return False
        if flat in engine.under_way:
            engine.land(flat)
        else:
            engine._arrived.remove(flat)
        self.conductor.arrived(flat)
        return True

    def _break_off(self, step: Step) -> None:
        """An expert did not come: every transfer is let end, and the step is given up."""
        engine = self.engine
        for flat in list(engine.under_way):
            engine.land(flat)
            engine._arrived.append(flat)
        self.conductor.abort(step)
        self.check_state(())

    def _forecasts(self, layer: int) -> list[Forecast]:
        out = []
        for ahead in range(1, self.policy.horizon + 1):
            other = (layer + ahead) % self.geometry.layers
            scores = [self.decide(1000) / 1000 for _ in range(self.geometry.experts[other])]
            out.append(Forecast(other, np.asarray(scores, dtype=np.float32)))
        return out

    def check_work(self, step: Step, work: Work) -> None:
        residency, engine = self.residency, self.engine
        served = [*work.ready, *work.coming, *work.stream, *work.host]
        assert sorted(served) == list(step.experts), "the four lists partition the chosen experts"
        for flat in work.ready:
            assert residency.is_resident(flat)
            assert engine.content[engine.place(flat)] == flat
        for flat in work.coming:
            assert residency.is_filling(flat)
            if flat in engine.under_way:
                assert engine.under_way[flat].demand, "what is waited for goes as a demand"
        for flat in work.stream:
            if flat not in self.spy.planned.stream:
                assert not self._idle_speculation(flat), "speculation blocks a demand"
        self.check_state(step.experts)

    def _idle_speculation(self, flat: int) -> bool:
        """Whether speculation that has not begun holds a slot that ``flat`` could take."""
        kind = self.residency.class_of[flat]
        return any(
            not fetch.demand
            and not fetch.begun
            and fetch.slot[0] == kind
            and not self.residency.protected[other]
            for other, fetch in self.engine.under_way.items()
        )

    def check_state(self, needed: Sequence[int]) -> None:
        residency, engine = self.residency, self.engine
        total = self.geometry.total
        places = [engine.place(flat) for flat in range(total) if residency.slot_of[flat] >= 0]
        assert len(places) == len(set(places)) == residency.used_slots, "a slot belongs to one expert"
        for kind, slot in places:
            assert 0 <= slot < self.slots[kind], "capacity is never exceeded"
        layer_of = [
            int(self.geometry.layer_of[flat]) for flat in range(total) if residency.slot_of[flat] >= 0
        ]
        assert residency.held == [layer_of.count(layer) for layer in range(self.geometry.layers)]
        for flat in range(total):
            states = residency.is_resident(flat) + residency.is_filling(flat)
            assert states == (residency.slot_of[flat] >= 0)
            if residency.is_filling(flat):
                assert flat in engine.under_way or flat in engine._arrived or flat in engine._failed
                assert not residency.evictable[flat]
            assert residency.evictable[flat] == (residency.is_resident(flat) and flat not in needed)
