"""A link of a virtual machine: the simulator's ``engine.Engine``.

Demand is served in order and never overtaken, so its end is known when it is asked for. Speculation
uses what demand leaves: it advances in chunks, only as far as the clock has come, and a demand that
arrives in the middle of a chunk begins when that chunk has ended. A transfer takes the link for its
``seconds``; it arrives ``delay`` after that, while the link serves others already.
"""

from __future__ import annotations

from collections.abc import Sequence

from .watching import Busy, Span


class VirtualEngine:
    """``seconds[flat]``: the link's time for one transfer; ``chunk_seconds``: what cannot be interrupted."""

    def __init__(
        self,
        seconds: Sequence[float],
        chunk_seconds: float,
        delay: Sequence[float] | None = None,
        track: str = "link in",
    ) -> None:
        self.now = 0.0
        self.host_free_at = 0.0
        self.arrives_at: dict[int, float] = {}  # demand asked for, not collected yet
        self._copy = seconds
        self._delay = delay if delay is not None and any(delay) else None
        self._chunk = chunk_seconds
        self._clock = 0.0  # the link is committed up to here
        self._waiting: dict[int, float] = {}  # speculation: seconds left, in order
        self._begun: set[int] = set()
        self._landed: list[tuple[float, int]] = []  # speculation that has ended, or will at the chunk's end
        self._track = track
        self.span: Span | None = None
        self.busy_seconds = 0.0

    @property
    def link_free_at(self) -> float:
        self._advance()
        return max(self._clock, self.now) + sum(self._waiting.values())

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        if demand:
            if self._waiting or self._delay is not None or self.span is not None:
                self.arrives_at[flat] = self.demand(flat)
            else:  # the same, without a call: this is done for every miss
                clock, now, seconds = self._clock, self.now, self._copy[flat]
                self.arrives_at[flat] = self._clock = (clock if clock > now else now) + seconds
                self.busy_seconds += seconds
        else:
            self._advance()
            if not self._waiting and self._clock < self.now:
                self._clock = self.now
            self._waiting[flat] = self._copy[flat]

    def demand(self, flat: int, seconds: float | None = None) -> float:
        """A transfer that somebody waits for; returns when it arrives. ``seconds``: what is left of it."""
        if self._waiting:
            self._advance()
        if seconds is None:
            seconds = self._copy[flat]
        begin = self._clock if self._clock > self.now else self.now
        self._clock = end = begin + seconds
        self.busy_seconds += seconds
        if self.span is not None:
            self.span(Busy(self._track, "copy", begin, end, (flat,)))
        return end if self._delay is None else end + self._delay[flat]

    def promote(self, flat: int) -> None:
        self._advance()
        left = self._waiting.pop(flat, None)
        if left is None:  # its last chunk is under way
            end = next(end for end, other in self._landed if other == flat)
            self._landed = [entry for entry in self._landed if entry[1] != flat]
            self.arrives_at[flat] = end
        else:
            self._begun.discard(flat)
            self.arrives_at[flat] = self.demand(flat, left)

    def cancel(self, flat: int) -> bool:
        self._advance()
        if flat in self._begun or flat not in self._waiting:
            return False
        del self._waiting[flat]
        return True

    def poll(self) -> Sequence[int]:
        if self._waiting:
            self._advance()
        if not self._landed:
            return ()
        arrived = [flat for end, flat in self._landed if end <= self.now]
        if arrived:
            self._landed = [entry for entry in self._landed if entry[0] > self.now]
        return arrived

    def failed(self) -> Sequence[int]:
        return ()

    def _advance(self) -> None:
        """Give the link's idle time up to now to speculation, in order."""
        waiting, now = self._waiting, self.now
        while waiting and self._clock < now:
            flat = next(iter(waiting))
            left = waiting[flat]
            begin = self._clock
            chunks = -(-(now - begin) // self._chunk)
            ran = min(left, chunks * self._chunk)
            self._clock = begin + ran
            self.busy_seconds += ran
            if self.span is not None:
                self.span(Busy(self._track, "copy", begin, self._clock, (flat,)))
            if ran < left:
                waiting[flat] = left - ran
                self._begun.add(flat)
            else:
                del waiting[flat]
                self._begun.discard(flat)
                self._landed.append((self._clock + (self._delay[flat] if self._delay else 0.0), flat))
