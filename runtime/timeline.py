"""Notes what happened when: a bounded recorder of events, written as a Chrome trace (``chrome_trace``).

The same recorder watches the executor and the simulator. While the run goes on it only appends small
tuples to a ring; what belongs together is found when the file is written. When the ring is full the
oldest events go, so that a long run keeps its end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from daop.core import Geometry, Phase, Step

from .watching import Busy, Watcher

if TYPE_CHECKING:
    from .conductor import Conductor, Work

EVENTS = 250_000
"""Events kept: a few thousand tokens of a small model, about 60 MB in memory and 40 MB as a file."""


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
        self._busy: deque[Busy] = deque(maxlen=events // 2)
        # Plain tuples while the run goes on: naming their fields costs more than noting them.
        self._said: deque[tuple[Any, ...]] = deque(maxlen=events - events // 2)
        self._queue = 0

    @property
    def complete(self) -> bool:
        """False: the ring is full, and may have dropped its oldest events."""
        return all(len(ring) != ring.maxlen for ring in (self._busy, self._said))

    @property
    def busy(self) -> list[Busy]:
        return list(self._busy)

    @property
    def said(self) -> list[Said]:
        return [Said(*fields) for fields in list(self._said)]

    def __len__(self) -> int:
        return len(self._busy) + len(self._said)

    def attach(self, conductor: Conductor) -> None:
        self.geometry = conductor.residency.geometry
        self._engine = conductor.engine
        self._residency = conductor.residency

    def begin(self, phase: Phase, rows: int) -> None:
        self._said.append(("begin", self._engine.now, -1, (phase, rows)))

    def planned(self, step: Step, work: Work) -> None:
        self._said.append(("planned", self._engine.now, -1, (step.layer, work)))

    def asked(self, flat: int, cause: str) -> None:
        self._queue += 1
        self._said.append(("asked", self._engine.now, flat, cause))

    def arrived(self, flat: int) -> None:
        self._queue -= 1

    def fate(self, flat: int, fate: str) -> None:
        if fate in ("dropped", "failed"):
            self._queue -= 1
        self._said.append(("fate", self._engine.now, flat, fate))

    def finished(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        self._said.append(
            ("finished", self._engine.now, -1, (self._residency.used_slots, self._queue, stall_seconds))
        )

    def span(self, busy: Busy) -> None:
        self._busy.append(busy)
