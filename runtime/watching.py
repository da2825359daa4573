"""What a run tells those who watch it: the timeline, the history behind a report, metrics.

The conductor tells every watcher what was decided and what became of it; engines and executors tell
it, through ``Conductor.span``, when something was busy. With no watcher nothing of this runs.

Fates of a prefetch, as in ``statistics``: useful, late, wasted; dropped (never begun), failed.
Causes of a fetch: start (before the first token), demand, prefetch.
Tracks: device, host, link in, link out, disk, policy, predictor; a track may be busy with several
things at once (reading threads, a pool).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from daop.core import Forecast, Phase, Step

if TYPE_CHECKING:
    from .conductor import Conductor, Work


class Busy(NamedTuple):
    """``track`` was busy with ``flats`` (or with something else of ``layer``), one after another for
    ``shares`` of the time; None: they were worked on together, and nobody knows how long each took."""

    track: str
    what: str
    begin: float
    end: float
    flats: Sequence[int] = ()
    layer: int | None = None
    shares: Sequence[float] | None = None


Span = Callable[[Busy], None]
"""``Watcher.span`` of all watchers: what an engine calls."""


class Watcher:
    """Every method may be left out. All but ``span`` are called from the thread that runs the model;
    ``span`` from any thread. Times are those of ``engine.now``, in seconds."""

    def attach(self, conductor: Conductor) -> None:
        """Before anything else, once."""

    def reset(self) -> None:
        """The statistics start again."""

    def begin(self, phase: Phase, rows: int) -> None:
        """A forward pass of ``rows`` tokens starts."""

    def planned(self, step: Step, work: Work) -> None:
        """The router has chosen, and the policy has said who is computed where."""

    def forecast(self, step: Step, forecasts: Sequence[Forecast]) -> None:
        """While ``step`` runs, this is expected of coming layers."""

    def asked(self, flat: int, cause: str) -> None:
        """A transfer into a slot has been asked for."""

    def arrived(self, flat: int) -> None:
        """The bytes of an expert that was asked for are there."""

    def fate(self, flat: int, fate: str) -> None:
        """What became of a prefetch."""

    def finished(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        """A layer was computed."""

    def span(self, busy: Busy) -> None:
        """Something was busy."""


def all_spans(watchers: Sequence[Watcher]) -> Span:
    """One call for all of them; where there is but one, nothing is put between."""
    if len(watchers) == 1:
        return watchers[0].span

    def tell(busy: Busy) -> None:
        for watcher in watchers:
            watcher.span(busy)

    return tell
