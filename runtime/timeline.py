"""Notes what happened when: a bounded recorder of events, written as a Chrome trace (``chrome_trace``).

The same recorder watches the executor and the simulator. While the run goes on it only appends small
tuples to a ring; what belongs together is found when the file is written. When the ring is full the
oldest events go, so that a long run keeps its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from daop.core import Forecast, Geometry, Phase, Step

from .watching import Watcher

if TYPE_CHECKING:
    from .conductor import Conductor, Work

EVENTS = 250_000
"""Events kept: a few thousand tokens of a small model, about 60 MB in memory and 40 MB as a file."""


class Busy(NamedTuple):
    """A span as ``Watcher.span`` was told it."""

    track: str
    what: str
    begin: float
    end: float
    flats: Sequence[int]
    layer: int | None
    shares: Sequence[float] | None


class Said(NamedTuple):
    """What the conductor said at ``at``: kind is begin, planned, asked, arrived, a fate, or finished."""

    kind: str
    at: float
    flat: int
    of: Any


class Timeline(Watcher):
    """Keeps the last ``events`` events; ``geometry`` is known once a run is watched."""

    def __init__(self, events: int = EVENTS) -> None:
        self.geometry: Geometry | None = None
        self.busy: deque[Busy] = deque(maxlen=events // 2)
        self.said: deque[Said] = deque(maxlen=events - events // 2)
        self._queue = 0

    @property
    def complete(self) -> bool:
        """False: the ring is full, and may have dropped its oldest events."""
        return all(len(ring) != ring.maxlen for ring in (self.busy, self.said))

    def attach(self, conductor: Conductor) -> None:
        self.geometry = conductor.residency.geometry
        self._engine = conductor.engine
        self._residency = conductor.residency

    def begin(self, phase: Phase, rows: int) -> None:
        self.said.append(Said("begin", self._engine.now, -1, (phase, rows)))

    def planned(self, step: Step, work: Work) -> None:
        self.said.append(Said("planned", self._engine.now, -1, (step.layer, work)))

    def forecast(self, step: Step, forecasts: Sequence[Forecast]) -> None:
        """Said by the spans of track ``predictor``."""

    def asked(self, flat: int, cause: str) -> None:
        self._queue += 1
        self.said.append(Said("asked", self._engine.now, flat, cause))

    def arrived(self, flat: int) -> None:
        self._queue -= 1

    def fate(self, flat: int, fate: str) -> None:
        if fate in ("dropped", "failed"):
            self._queue -= 1
        self.said.append(Said("fate", self._engine.now, flat, fate))

    def finished(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        counters = (self._residency.used_slots, self._queue, stall_seconds)
        self.said.append(Said("finished", self._engine.now, -1, counters))

    def span(
        self,
        track: str,
        what: str,
        begin: float,
        end: float,
        flats: Sequence[int] = (),
        layer: int | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.busy.append(Busy(track, what, begin, end, flats, layer, shares))
