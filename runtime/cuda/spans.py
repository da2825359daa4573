"""When the device was busy, in the process's own time: for the timeline.

Only the device knows when a mark was reached, and only relative to another. Once a layer, when the stream of
computation has just run empty, a mark is set beside the process's clock (``anchor``): whatever begins later
is placed by its distance from it. It is told to the watchers when its marks have been reached, a layer later.
Nothing of this happens in a run that nobody watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daop.runtime.watching import Busy, Span

from .streams import Gpu, Mark


@dataclass(frozen=True, eq=False, slots=True)
class Begun:
    """Something that begins at ``mark``; the mark ``anchor`` was reached at ``at`` by the clock."""

    anchor: Mark
    at: float
    mark: Mark


@dataclass(frozen=True, eq=False, slots=True)
class Open:
    """A span that is told once ``last`` has been reached."""

    track: str
    what: str
    begun: Begun
    last: Mark
    flats: Sequence[int]


class DeviceSpans:
    """``told`` is the watchers' ``span``; ``now`` the clock of all spans. ``begin`` may be called by any
    thread."""

    def __init__(self, gpu: Gpu, told: Span, now: Callable[[], float]) -> None:
        self._gpu = gpu
        self._now = now
        self.told = told
        self._open: deque[Open] = deque()
        self._until = 0.0  # the last computation's end: one stream, one after the other
        self.anchor()

    def anchor(self) -> None:
        """The stream of computation is empty."""
        mark = self._gpu.mark_compute(timed=True)
        mark.synchronize()
        self._anchor = (mark, self._now())

    def begin(self, mark: Mark) -> Begun:
        """Something begins at this timed mark."""
        anchor, at = self._anchor
        return Begun(anchor, at, mark)

    def end(self, track: str, what: str, begun: Begun, last: Mark, flats: Sequence[int]) -> None:
        """It ends at this timed mark."""
        self._open.append(Open(track, what, begun, last, flats))

    def tell(self, *, wait: bool = False) -> None:
        """Tell what has ended; ``wait``: all of it."""
        still: deque[Open] = deque()
        waiting: set[str] = set()  # tracks of which one has not ended: what comes behind it waits, too
        for span in self._open:
            if wait:
                span.last.synchronize()
            elif span.track in waiting or not span.last.done:
                waiting.add(span.track)
                still.append(span)
                continue
            begin = span.begun.at + self._gpu.seconds(span.begun.anchor, span.begun.mark)
            end = span.begun.at + self._gpu.seconds(span.begun.anchor, span.last)
            if span.track == "device":  # two anchors may disagree by microseconds
                begin = max(begin, self._until)
                self._until = end = max(begin, end)
            self.told(Busy(span.track, span.what, begin, end, span.flats))
        self._open = still
