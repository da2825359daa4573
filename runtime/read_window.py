"""How long the disk would idle before the next layer asks, and what may be read meanwhile.

For machines whose misses are read by the processor that computes them (tier ``host``): reads and computing
overlap, and what was read early is not waited for. Times are learnt from what the layers took.

Of a read that is needed with chance p, ``early`` seconds fall into the idle time and ``beyond`` do not. If it
is needed, the early part is saved, and the rest would have been read anyway; if it is not, the rest delays
the next layer's reads. So it pays while

    p * early > (1 - p) * beyond

What the next layer more likely needs than not is asked for in any case: the reads that were not begun when it
asks are joined or dropped, and neither costs anything.
"""

from __future__ import annotations

from daop.core import Geometry

from .policies.base import Costs, Outcome

PACE = 0.1
SURE = 0.5
LEAST = 0.25  # chance from which a read in idle time is worth the bytes and the slot


class ReadWindow:
    """Seconds, as learnt: to ``read`` one expert, to ``compute`` one, and what lies ``between`` a layer's
    experts and the next router."""

    def __init__(self, geometry: Geometry, costs: Costs) -> None:
        self.read = costs.copy(0)
        self.compute = costs.device(0, 1)
        self.between = [costs.layer(1)] * geometry.layers
        self._left: tuple[int, float] | None = None  # layer that was finished, and when, by its own account
        self._looked = 0.0

    def planned(self, now: float) -> None:
        """The next layer's router is known."""
        if self._left is not None:
            layer, ended = self._left
            self.between[layer] += PACE * (max(0.0, now - ended) - self.between[layer])
            self._left = None

    def interrupted(self) -> None:
        """Something else comes before the next layer: a prefill."""
        self._left = None

    def looked(self, now: float, queued: float, missing: int) -> None:
        """The layer's misses, and nothing else, wait to be read, for ``queued`` seconds."""
        self._looked = now
        if missing and queued > 0.0:
            self.read += PACE * (queued / missing - self.read)

    def finished(self, outcome: Outcome) -> None:
        """A single token's layer was computed."""
        spent = outcome.stall_seconds + outcome.compute_seconds
        self._left = outcome.step.layer, self._looked + spent
        each = outcome.compute_seconds / max(1, len(outcome.step.experts))
        self.compute += PACE * (each - self.compute)

    def idle(self, layer: int, hits: int, missing: int, queued: float) -> float:
        """Seconds from the end of what is ``queued`` now until the next layer asks."""
        busy = max(hits * self.compute, queued) + min(missing, 1) * self.compute
        return busy + self.between[layer] - queued

    def pays(self, chance: float, idle: float, soon: bool) -> bool:
        """Whether to read another expert, ``idle`` seconds being left; ``soon``: for the next layer."""
        if soon and chance >= SURE:
            return True
        early = min(self.read, max(0.0, idle))
        return chance > LEAST and chance * early > (1.0 - chance) * (self.read - early)
