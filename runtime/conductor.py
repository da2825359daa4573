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
from typing import Protocol

from daop.core import BoolArray, FloatArray, Forecast, Phase, Step

from .policies.base import Costs, Outcome, Plan, Policy
from .residency import Residency
from .statistics import Statistics
from .watching import Watcher, all_spans


class TransferError(Exception):
    """The bytes of an expert could not be brought."""


class Engine(Protocol):
    """What moves bytes: a pool of threads over files, a copy stream, or a virtual link.

    A fetch ends exactly once: its flat id comes out of ``poll``, or out of ``failed``, or ``cancel``
    returned True for it.
    """

    @property
    def now(self) -> float: ...

    @property
    def link_free_at(self) -> float: ...

    @property
    def host_free_at(self) -> float: ...

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        """Start to move an expert into a slot; demand goes before speculation."""

    def promote(self, flat: int) -> None:
        """A speculative fetch under way has become a demand."""

    def cancel(self, flat: int) -> bool:
        """Drop a speculative fetch that has not begun; False if it has."""

    def poll(self) -> Sequence[int]:
        """Fetches that have arrived since the last call."""

    def failed(self) -> Sequence[int]:
        """Fetches that have failed since the last call."""


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


class EngineView:
    """The policy's read-only window on residency and engine (see ``policies.base.View``)."""

    def __init__(self, residency: Residency, engine: Engine) -> None:
        self.resident: BoolArray = _read_only(residency.resident)
        self.filling: BoolArray = _read_only(residency.filling)
        self.evictable: BoolArray = _read_only(residency.evictable)
        self.prefetched: BoolArray = _read_only(residency.prefetched)
        self.held: Sequence[int] = residency.held
        self.free_slots = residency.free_slots
        self.same_slot = residency.same_slot
        self._engine = engine

    @property
    def now(self) -> float:
        return self._engine.now

    @property
    def link_free_at(self) -> float:
        return self._engine.link_free_at

    @property
    def host_free_at(self) -> float:
        return self._engine.host_free_at


def _read_only(flags: BoolArray) -> BoolArray:
    view = flags.view()
    view.flags.writeable = False
    return view


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
            if residency.free_slots(flat):
                self.engine.fetch(flat, residency.reserve(flat, speculative=False), demand=True)
                self.statistics.bytes.start += self._bytes_of[flat]
                self._tell_asked(flat, "start")
                chosen.append(flat)
        return chosen

    def begin(self, phase: Phase, rows: int, new_sequences: int = 0) -> None:
        """A forward pass starts; ``new_sequences``: of how many sequences it is the first."""
        self._settle()
        for watcher in self.watchers:
            watcher.begin(phase, rows)
        if new_sequences:
            self.policy.begin_sequences(new_sequences)
        self.policy.begin(phase, rows)

    def reuse(self, soon: FloatArray) -> None:
        """A reuse forecast (see ``Policy.reuse``) is there; once per forward pass, off the critical path."""
        if self.policy.wants_reuse:
            self.policy.reuse(soon)

    def plan(self, step: Step) -> Work:
        """Settle what arrived, protect what the step needs, and start what must be fetched."""
        self._tick += 1
        self._settle()
        ready, coming, missing = self.residency.sort_out(step.experts)
        if not missing and not self._expiry:
            plan = self.policy.plan(step, missing, self.view)
        else:
            if self._expiry:
                self._drop_expired()
            plan = self.policy.plan(step, missing, self.view)
            if coming and (plan.host or plan.stream):
                elsewhere = {*plan.host, *plan.stream}
                coming = [flat for flat in coming if flat not in elsewhere]
            if coming:
                self._join(coming)
        for flat in plan.evict:
            self._evict(flat)
        late = len(coming)
        stream = list(plan.stream)
        if plan.keep:
            admitted, refused = self._admit(plan.keep)
            coming += admitted
            stream += refused
        self._check(step, ready, coming, stream, plan)
        if self._speculated:
            for flat in ready:
                self._use(flat)
        statistics, bytes_of = self.statistics, self._bytes_of
        for flat in (*stream, *coming[late:]):
            statistics.bytes.demand += bytes_of[flat]
        if not self.costs.host_beside:  # where it lies is on the disk: it is read to be computed
            for flat in plan.host:
                statistics.bytes.demand += bytes_of[flat]
        statistics.streamed_experts += len(stream)
        statistics.host_experts += len(plan.host)
        misses = len(step.experts) - len(ready) - late
        statistics.count(step.phase, step.layer, len(ready), misses, late)
        work = Work(ready=ready, coming=coming, late=late, stream=stream, host=plan.host)
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
        """The caller waited for an expert of ``work.coming``, and its bytes are there."""
        self._complete(flat)

    def lost(self, flat: int) -> None:
        """An expert of ``work.coming`` will not arrive: its slot is free, the caller serves it otherwise."""
        self._expiry.pop(flat, None)
        self.residency.abandon(flat)
        self._tell_fate(flat, "failed")

    def finish(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        """The step was computed: its experts may be given up again."""
        residency = self.residency
        if self._speculated:
            for flat in work.coming:
                residency.use(flat)
        residency.unprotect(step.experts)
        if self._observes:
            self.policy.observe(
                Outcome(
                    step,
                    len(work.ready),
                    len(step.experts) - len(work.ready) - work.late,
                    work.late,
                    stall_seconds,
                    compute_seconds,
                )
            )
        for watcher in self.watchers:
            watcher.finished(step, work, stall_seconds, compute_seconds)

    def settle(self) -> None:
        """Take note of the transfers that have ended."""
        self._settle()

    def abort(self, step: Step) -> None:
        """The step broke off and will not be finished; all transfers have ended."""
        self._settle()
        self.residency.unprotect(step.experts)

    @property
    def pending_bytes(self) -> int:
        """Bytes of prefetches resident and not used yet."""
        residency = self.residency
        return int(residency.geometry.bytes_of[residency.prefetched & residency.resident].sum())

    # -- the rules -------------------------------------------------------------------------------

    def _settle(self) -> None:
        for flat in self.engine.poll():
            self._complete(flat)
        for flat in self.engine.failed():
            self._expiry.pop(flat, None)
            self.residency.abandon(flat)
            self.statistics.failed_prefetches += 1
            self._tell_fate(flat, "failed")

    def _complete(self, flat: int) -> None:
        if self._expiry:
            self._expiry.pop(flat, None)
        self.residency.complete(flat)
        for watcher in self.watchers:
            watcher.arrived(flat)

    def _tell_asked(self, flat: int, cause: str) -> None:
        for watcher in self.watchers:
            watcher.asked(flat, cause)

    def _tell_fate(self, flat: int, fate: str) -> None:
        for watcher in self.watchers:
            watcher.fate(flat, fate)

    def _use(self, flat: int) -> None:
        if self.residency.use(flat):
            self.statistics.prefetches["useful"] += 1
            self.statistics.bytes.useful += self._bytes_of[flat]
            self._tell_fate(flat, "useful")

    def _join(self, coming: Sequence[int]) -> None:
        """Demand joins the prefetches of the same experts."""
        for flat in coming:
            self._expiry.pop(flat, None)
            self.engine.promote(flat)
            if self.residency.use(flat):
                self.statistics.prefetches["late"] += 1
                self.statistics.bytes.late += self._bytes_of[flat]
                self._tell_fate(flat, "late")

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
        self.statistics.prefetches["dropped"] += 1
        self._tell_fate(flat, "dropped")
        return True

    def _admit(self, keep: Sequence[int]) -> tuple[list[int], list[int]]:
        """Fetch into slots as many as there is room for, in order; the rest is refused."""
        residency = self.residency
        admitted: list[int] = []
        refused: list[int] = []
        free_slots, fetch = residency.free_slots, self.engine.fetch
        for index, flat in enumerate(keep):
            if not free_slots(flat):
                self._make_room(flat, keep[index:])
            if free_slots(flat):
                fetch(flat, residency.reserve(flat, speculative=False), demand=True)
                if self.watchers:
                    self._tell_asked(flat, "demand")
                admitted.append(flat)
            else:
                refused.append(flat)
        return admitted, refused

    def _make_room(self, flat: int, waiting: Sequence[int]) -> None:
        """One call for all that wait for the same kind of slot; speculation not begun goes first."""
        residency = self.residency
        class_of = residency.class_of
        kind, wanted = class_of[flat], len(waiting)
        if residency.same_slot(flat) is not None:
            wanted = len([other for other in waiting if class_of[other] == kind])
        for victim in self.policy.victims(flat, wanted, self.view, None):
            self._evict(victim)
        if not residency.free_slots(flat):
            for queued in list(self._expiry):
                if residency.class_of[queued] == kind and self._drop(queued):
                    break

    def _evict(self, flat: int) -> None:
        if self._speculated and self.residency.is_prefetched(flat):
            self.statistics.prefetches["wasted"] += 1
            self.statistics.bytes.wasted += self._bytes_of[flat]
            self._tell_fate(flat, "wasted")
        self.residency.evict(flat)

    def _check(
        self, step: Step, ready: Sequence[int], coming: Sequence[int], stream: Sequence[int], plan: Plan
    ) -> None:
        """A policy that forgets or repeats an expert would mean wrong output: refuse it."""
        served = len(ready) + len(coming) + len(stream) + len(plan.host)
        if served != len(step.experts) or (
            served > len(ready) and sorted([*ready, *coming, *stream, *plan.host]) != list(step.experts)
        ):
            raise AssertionError(
                f"policy {type(self.policy).__name__} served layer {step.layer} wrongly: "
                f"chosen {list(step.experts)}, ready {list(ready)}, planned {plan}"
            )
