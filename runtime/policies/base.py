"""The seam between placement and clock: what a policy is asked, and what it may see.

A policy is pure: numbers in, decisions out. It starts no thread, reads no clock and no file, and
does not import torch. The real executor and the simulator drive the same objects through
``daop.runtime.conductor``. A new policy is one new file in this folder, with one class decorated by
``@POLICIES.register("name")``.

A policy answers four questions:
    what to keep        ``start`` and ``victims``
    what to bring early ``look_ahead``
    where to run a miss ``plan``
    when to change      ``observe``

A miss can be served in three ways:
    keep    fetch it into a slot and keep it (admission)
    stream  fetch it into a staging buffer, compute it on the device, drop it
    host    compute it where it lies (cuda: the CPU; host: a direct read, then compute)
On the device ``host`` there is one processor, so ``stream`` and ``host`` are the same read.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from daop.core import BoolArray, DaopError, FloatArray, Forecast, Geometry, Phase, Registry, Step
from daop.runtime.profile import Profile


class Costs(Protocol):
    """Seconds that things take on the machine at hand. All are estimates; none is a promise.

    ``host_beside``: whether the host computes misses while the device and the link work (tier
    ``device``); False where a miss is read and then computed by the one processor there is.
    """

    @property
    def host_beside(self) -> bool: ...

    def copy(self, flat: int) -> float:
        """Moving one expert into fast memory, the link being idle."""

    def host(self, flat: int, tokens: int) -> float:
        """Computing one expert for so many tokens where it lies, beyond fast memory."""

    def device(self, flat: int, tokens: int) -> float:
        """Computing one resident expert for so many tokens."""

    def layer(self, rows: int) -> float:
        """Everything in a layer but its routed experts, for so many rows."""


class View(Protocol):
    """What a policy may look at; it must not write to any of it."""

    @property
    def resident(self) -> BoolArray:
        """[total] readable in fast memory now."""

    @property
    def filling(self) -> BoolArray:
        """[total] holds a slot whose bytes are still under way."""

    @property
    def evictable(self) -> BoolArray:
        """[total] resident and not needed by the running layer."""

    @property
    def prefetched(self) -> BoolArray:
        """[total] resident or filling by speculation, and not used since."""

    def free_slots(self, flat: int) -> int:
        """Free slots that an expert of this shape could take."""

    def same_slot(self, flat: int) -> BoolArray | None:
        """[total] experts whose slots this one could take over; None: all of them."""

    @property
    def held(self) -> Sequence[int]:
        """[L] slots that each layer's experts hold, resident or filling."""

    @property
    def now(self) -> float:
        """Seconds since the run began."""

    @property
    def link_free_at(self) -> float:
        """When the transfers already under way or queued will have ended, in seconds of ``now``."""

    @property
    def host_free_at(self) -> float:
        """When the host pool will have ended what it was given."""


@dataclass(slots=True, eq=False)  # not frozen, as ``Step``
class Plan:
    """How a step's misses are served; every miss stands in exactly one of the three lists.

    ``keep`` is in order of urgency. Each keeps its slot only if there is a free one or ``victims``
    gives one up; otherwise it is streamed. ``evict`` is given up before anything is admitted.
    An expert already under way (``view.filling``) is waited for, unless ``host`` or ``stream`` names it.
    """

    keep: Sequence[int] = ()
    stream: Sequence[int] = ()
    host: Sequence[int] = ()
    evict: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A migration worth starting before the need.

    ``value``: seconds it is expected to save; victims worth more than that are not given up.
    ``within``: it is dropped, if not yet begun, once so many more MoE layers have been reached
    (1: the next layer must find it); None: no hurry.
    """

    flat: int
    value: float
    within: int | None = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step cost, told after it."""

    step: Step
    hits: int
    misses: int
    late: int
    stall_seconds: float
    compute_seconds: float


class Policy:
    """Base of all policies: keeps nothing, brings nothing early, streams every miss.

    Subclasses override what they decide. ``exact`` False: may change the model's output, and says so.
    ``horizon``: how many layers of forecast ``look_ahead`` wants (0: it is never called with any);
        ``start`` may set it by the machine.
    ``needs_future``: only a simulator, which knows the whole trace, can run it.
    ``profile``: what other traffic taught, set before ``start`` (None: nothing is known).
    ``plan_us``, ``look_ahead_us``: microseconds that the decisions of one decode layer take (measured by
    ``benchmarks/policy_overhead.py``); the simulator reads them after each call and charges them. The
    second runs beside the compute. A policy that rests may set them lower for itself.
    ``keeps_hot_set``: promises that a prefill through every expert leaves most of what decode had.
    """

    exact: ClassVar[bool] = True
    horizon: int = 0
    needs_future: ClassVar[bool] = False
    plan_us: float = 10.0
    look_ahead_us: float = 0.0
    keeps_hot_set: ClassVar[bool] = False

    profile: Profile | None = None

    def foresee(self, steps: Sequence[Sequence[int]]) -> None:
        """``steps[i]``: the experts of the i-th layer step of the whole run. Only where ``needs_future``."""

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        """Called once; returns the flat ids to load before the first token, at most ``slots``."""
        self.geometry = geometry
        self.slots = slots
        self.costs = costs
        return ()

    def begin(self, phase: Phase, rows: int) -> None:
        """A forward pass of ``rows`` tokens starts."""

    def begin_sequences(self, count: int) -> None:
        """Called before ``begin`` when the pass is the first of so many new sequences."""

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        """The router of ``step`` is known; ``missing``: its experts neither resident nor under way."""
        return Plan(stream=missing)

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        """Up to ``count`` evictable residents to give up, the first for ``incoming``.

        ``prefetch`` is None for a miss that must be served; else the speculation that asks, which must
        not cost something worth more. Fewer than ``count`` is a legal answer.
        """
        return ()

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        """Called after ``plan`` of the same step; most valuable first."""
        return ()

    def observe(self, outcome: Outcome) -> None:
        """The step was computed: food for adapting."""

    # -- for reports only ------------------------------------------------------------------------

    @property
    def prefetching(self) -> bool:
        """Whether it looks ahead at present; one that adapts may have switched that off."""
        return type(self).look_ahead is not Policy.look_ahead

    @property
    def forecast(self) -> dict[str, Any] | None:
        """What it forecasts by, and how well that has done of late; None: it has no forecast of its own."""
        return None

    def expected(self, layer: int) -> FloatArray | None:
        """Chance of each of the layer's experts to be used at its next visit, [E]; None: it has no forecast
        of its own."""
        return None


POLICIES: Registry[type[Policy]] = Registry("policy", "daop.runtime.policies", Policy)


def make_policy(
    name: str, profile: Profile | None = None, options: Mapping[str, object] | None = None
) -> Policy:
    """A policy by name (or ``module:Class``), told what other traffic taught; ``options`` are for its
    constructor, which must know them all."""
    kind = POLICIES.get(name)
    if unknown := set(options or {}) - set(inspect.signature(kind).parameters):
        known = ", ".join(sorted(inspect.signature(kind).parameters)) or "none"
        raise DaopError(f"policy {name!r} has no option {', '.join(sorted(unknown))}; it has: {known}")
    try:
        policy = kind(**options or {})
    except TypeError as error:
        raise DaopError(f"policy {name!r} cannot be made without arguments: {error}") from error
    policy.profile = profile
    return policy
