"""What the device waited for, known only when its marks have been reached."""

from __future__ import annotations

from daop.runtime.conductor import Conductor

from .streams import Gpu, Mark


class Waits:
    """Stalls by cause, booked a layer late."""

    def __init__(self, gpu: Gpu, conductor: Conductor) -> None:
        self._gpu = gpu
        self._conductor = conductor
        self._open: list[tuple[str, Mark, Mark]] = []

    def add(self, cause: str, since: Mark) -> None:
        """The stream of computation waits from that timed mark until now."""
        self._open.append((cause, since, self._gpu.mark_compute(timed=True)))

    def read_off(self) -> float:
        """Book the waits of layers that have ended; returns their sum, seconds."""
        total = 0.0
        for cause, first, last in self._open:
            waited = self._gpu.seconds(first, last)
            self._conductor.statistics.stall_seconds[cause] += waited
            total += waited
        self._open.clear()
        return total

    def clear(self) -> None:
        """Nobody will ask for them."""
        self._open.clear()
