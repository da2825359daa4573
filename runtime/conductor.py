"""Carries a policy's decisions out on an engine: the one place where placement happens.

The executor (real threads, real bytes) and the simulator (a virtual clock) both run every MoE layer
through the same four calls, in this order:

    work = conductor.plan(step)                # who is ready, who is coming, who runs elsewhere
    conductor.look_ahead(step, forecasts)      # speculation, behind all demand
    ... compute; conductor.arrived(flat) for every expert of work.coming that was waited for ...
    conductor.finish(step, work, stall, compute)

The conductor owns the rules that hold for every policy: what the running layer needs is not a
victim, a demand joins a prefetch under way, speculation never waits for a slot and never blocks a
demand, and whatever cannot be admitted is streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daop.core import DaopError, Forecast, Phase, Step

from .engine import Engine, EngineView
from .policies.base import Costs, Outcome, Plan, Policy
from .residency import Residency
from .statistics import Statistics
from .watching import Watcher, all_spans


@dataclass(slots=True, eq=False)  # not frozen, as ``Step``
class Work:
    """What the caller computes for a step.

    ``ready`` are resident; ``coming`` hold a slot and must be waited for, most urgent first (the
    first ``late`` of them were prefetches under way); ``stream`` and ``host`` hold no slot.
    """

    ready: Sequence[int]
    coming: Sequence[int]
    late: int
    stream: Sequence[int]
    host: Sequence[int]


class Conductor:
    """Runs one policy over one residency and one engine, and counts what happens."""

    def __init__(
        self,
        policy: Policy,
        residency: Residency,
        engine: Engine,
        costs: Costs,
        statistics: Statistics,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.policy = policy
        self.residency = residency
        self.engine = engine
        self.costs = costs
        self.statistics = statistics
        self.view = EngineView(residency, engine)
        self._bytes_of = [int(n) for n in residency.geometry.bytes_of]
        self._expiry: dict[int, int | None] = {}  # speculative fetch under way -> last tick it may begin
        self._tick = 0
        self._speculated = False  # whether anything was ever brought by speculation
        self._observes = type(policy).observe is not Policy.observe
        self.watchers = tuple(watchers)
        self.span = all_spans(self.watchers)  # what engines and executors tell the watchers, from any thread
        for watcher in self.watchers:
            watcher.attach(self)

    def start(self) -> list[int]:
        """Ask the policy what to load first and begin to load it; returns those, to be waited for."""
        residency = self.residency
        chosen: list[int] = []
        asked = self.policy.start(residency.geometry, residency.capacity, self.costs, self.view)
        for flat in dict.fromkeys(asked):
            if not 0 <= flat < residency.geometry.total:
                raise self._wrong(f"start named expert {flat}, of {residency.geometry.total}")
            if residency.free_slots(flat):
                self.engine.fetch(flat, residency.reserve(flat, speculative=False), demand=True)
                self.statistics.bytes.start += self._bytes_of[flat]
                self._tell_asked(flat, "start")
                chosen.append(flat)
        return chosen

    def begin(self, phase: Phase, rows: int, new_sequences: int = 0) -> None:
        """A forward pass starts; ``new_sequences``: of how many sequences it is the first."""
        self.settle()
        for watcher in self.watchers:
            watcher.begin(phase, rows)
        if new_sequences:
            self.policy.begin_sequences(new_sequences)
        self.policy.begin(phase, rows)

    def plan(self, step: Step) -> Work:
        """Settle what arrived, protect what the step needs, and start what must be fetched."""
        self._tick += 1
        self.settle()
        ready, coming, missing = self.residency.sort_out(step.experts)
        if self._expiry:
            self._drop_expired()
        plan = self.policy.plan(step, missing, self.view)
        if coming:
            coming = self._join(coming, plan)
        for flat in plan.evict:
            self._evict(flat)
        late = len(coming)
        stream = list(plan.stream)
        if plan.keep:
            self._admit(plan.keep, coming, stream)
        self._check(step, ready, coming, stream, plan)
        if self._speculated:
            for flat in ready:
                if self.residency.use(flat):
                    self._end(flat, "useful")
        statistics, bytes_of, hits = self.statistics, self._bytes_of, len(ready)
        if hits < len(step.experts):
            demanded = stream + coming[late:]
            if not self.costs.host_beside:  # where it lies is on the disk: it is read to be computed
                demanded += plan.host
            statistics.bytes.demand += sum([bytes_of[flat] for flat in demanded])
            statistics.streamed_experts += len(stream)
            statistics.host_experts += len(plan.host)
        statistics.count(step.phase, step.layer, hits, len(step.experts) - hits - late, late)
        work = Work(ready, coming, late, stream, plan.host)
        for watcher in self.watchers:
            watcher.planned(step, work)
        return work

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast]) -> None:
        """Start the speculation that the policy asks for, as far as slots allow."""
        residency, statistics = self.residency, self.statistics
        for watcher in self.watchers:
            watcher.forecast(step, forecasts)
        for prefetch in self.policy.look_ahead(step, forecasts, self.view):
            flat = prefetch.flat
            if not 0 <= flat < residency.geometry.total:
                raise self._wrong(f"look_ahead named expert {flat}, of {residency.geometry.total}")
            if residency.is_resident(flat) or residency.is_filling(flat):
                continue
            if not residency.free_slots(flat):
                for victim in self.policy.victims(flat, 1, self.view, prefetch):
                    self._evict(victim)
            if not residency.free_slots(flat):
                statistics.prefetches["dropped"] += 1
                continue
            self._speculated = True
            self.engine.fetch(flat, residency.reserve(flat, speculative=True), demand=False)
            self._expiry[flat] = None if prefetch.within is None else self._tick + prefetch.within
            statistics.prefetches["issued"] += 1
            self._tell_asked(flat, "prefetch")

    def arrived(self, flat: int) -> None:
        """The bytes of an expert under way are there; the caller says so of those that it waited for."""
        if self._expiry:
            self._expiry.pop(flat, None)
        self.residency.complete(flat)
        for watcher in self.watchers:
            watcher.arrived(flat)

    def finish(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        """The step was computed: its experts may be given up again."""
        residency = self.residency
        if self._speculated:
            for flat in work.coming:
                residency.use(flat)
        residency.unprotect(step.experts)
        if self._observes:
            hits, late = len(work.ready), work.late
            misses = len(step.experts) - hits - late
            self.policy.observe(Outcome(step, hits, misses, late, stall_seconds, compute_seconds))
        for watcher in self.watchers:
            watcher.finished(step, work, stall_seconds, compute_seconds)

    def settle(self) -> None:
        """Take note of the transfers that have ended."""
        for flat in self.engine.poll():
            self.arrived(flat)
        for flat in self.engine.failed():
            self.residency.abandon(flat)
            if flat in self._expiry:
                del self._expiry[flat]
                self.statistics.failed_prefetches += 1
            self._tell_fate(flat, "failed")

    def abort(self, step: Step) -> None:
        """The step broke off and will not be finished; all transfers have ended. What is on its way even so
        has arrived without anybody noting it."""
        self.settle()
        for flat in np.flatnonzero(self.residency.filling).tolist():
            self._expiry.pop(flat, None)
            self.residency.abandon(flat)
            self._tell_fate(flat, "failed")
        self.residency.unprotect(step.experts)

    @property
    def pending_bytes(self) -> int:
        """Bytes of prefetches resident and not used yet."""
        residency = self.residency
        return int(residency.geometry.bytes_of[residency.prefetched & residency.resident].sum())

    # -- the rules -------------------------------------------------------------------------------

    def _join(self, coming: Sequence[int], plan: Plan) -> list[int]:
        """Demand joins the prefetches of the same experts, but for those that the plan serves elsewhere;
        returns the joined ones."""
        joined = [flat for flat in coming if flat not in plan.host and flat not in plan.stream]
        for flat in joined:
            self._expiry.pop(flat, None)
            self.engine.promote(flat)
            if self.residency.use(flat):
                self._end(flat, "late")
        return joined

    def _drop_expired(self) -> None:
        """Speculation whose layer has been reached is dropped, unless it has begun."""
        over = [flat for flat, tick in self._expiry.items() if tick is not None and tick <= self._tick]
        for flat in over:
            self._drop(flat)

    def _drop(self, flat: int) -> bool:
        """Take back a speculation that has not begun and that the running layer does not need."""
        if self.residency.protected[flat] or not self.engine.cancel(flat):
            return False
        del self._expiry[flat]
        self.residency.abandon(flat)
        self._end(flat, "dropped")
        return True

    def _admit(self, keep: Sequence[int], coming: list[int], stream: list[int]) -> None:
        """Fetch into slots as many as there is room for, in order: they are ``coming``. The rest is
        streamed."""
        residency = self.residency
        free_slots, fetch = residency.free_slots, self.engine.fetch
        for index, flat in enumerate(keep):
            if not (free_slots(flat) or self._make_room(flat, keep[index:])):
                stream.append(flat)
                continue
            fetch(flat, residency.reserve(flat, speculative=False), demand=True)
            coming.append(flat)
            if self.watchers:
                self._tell_asked(flat, "demand")

    def _make_room(self, flat: int, waiting: Sequence[int]) -> int:
        """One call for all that wait for the same kind of slot; speculation not begun goes first. Returns
        how many slots are free then."""
        residency = self.residency
        class_of = residency.class_of
        kind, wanted = class_of[flat], len(waiting)
        if residency.same_slot(flat) is not None:
            wanted = len([other for other in waiting if class_of[other] == kind])
        for victim in self.policy.victims(flat, wanted, self.view, None):
            self._evict(victim)
        if self._expiry and not residency.free_slots(flat):
            for queued in list(self._expiry):
                if class_of[queued] == kind and self._drop(queued):
                    break
        return residency.free_slots(flat)

    def _wrong(self, what: str) -> DaopError:
        return DaopError(f"policy {type(self.policy).__name__} gave an answer that it may not give: {what}")

    def _evict(self, flat: int) -> None:
        if self._speculated and self.residency.is_prefetched(flat):
            self._end(flat, "wasted")
        try:
            self.residency.evict(flat)
        except (AssertionError, IndexError) as error:
            raise self._wrong(f"expert {flat} as a victim: {error}") from error

    def _check(
        self, step: Step, ready: Sequence[int], coming: Sequence[int], stream: Sequence[int], plan: Plan
    ) -> None:
        """A policy that forgets or repeats an expert would mean wrong output: refuse it."""
        served = len(ready) + len(coming) + len(stream) + len(plan.host)
        if served != len(step.experts) or (
            served > len(ready) and sorted([*ready, *coming, *stream, *plan.host]) != list(step.experts)
        ):
            raise self._wrong(
                f"layer {step.layer} chose {list(step.experts)}, ready were {list(ready)}, planned {plan}"
            )

    # -- the news --------------------------------------------------------------------------------

    def _end(self, flat: int, fate: str) -> None:
        """A prefetch has met its fate."""
        self.statistics.end_prefetch(fate, self._bytes_of[flat])
        self._tell_fate(flat, fate)

    def _tell_fate(self, flat: int, fate: str) -> None:
        for watcher in self.watchers:
            watcher.fate(flat, fate)

    def _tell_asked(self, flat: int, cause: str) -> None:
        for watcher in self.watchers:
            watcher.asked(flat, cause)
