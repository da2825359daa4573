"""What was hit, missed, late, wasted and waited for. Counters only: no clock of its own.

Definitions (they stand in the documentation too):
    request     one distinct expert needed by one MoE layer of one forward pass
    hit         its bytes were readable in fast memory when the router's choice became known
    late        its prefetch was still under way then; what remained was waited for
    miss        neither
    useful      bytes of prefetches whose expert was used after arriving in time
    wasted      bytes moved by prefetches whose expert was given up, or cut off, before any use
    approximate calls (one expert for one token, in decode) under a policy that is not exact: in all, on an
                announced input, added a layer late, of an expert that the router did not choose, any of these
    stall       time in which a layer's computation had nothing to do but wait, by cause
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import Geometry, Phase

CAUSES = ("demand", "late", "host", "forecast")
APPROXIMATE = ("calls", "early", "late", "replaced", "approximated")


@dataclass
class Bytes:
    """Bytes moved into fast memory, by what became of them; ``pending``: not used yet."""

    start: int = 0
    demand: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    pending: int = 0

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


@dataclass
class Statistics:
    """Counters of one run; ``[2, L]`` arrays have a row per phase (prefill, decode)."""

    geometry: Geometry
    bytes: Bytes = field(default_factory=Bytes)
    prefetches: dict[str, int] = field(
        default_factory=lambda: {"issued": 0, "useful": 0, "late": 0, "wasted": 0, "dropped": 0}
    )
    stall_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    compute_seconds: float = 0.0
    policy_seconds: float = 0.0
    steps: int = 0
    failed_prefetches: int = 0
    host_experts: int = 0
    streamed_experts: int = 0
    approximate: dict[str, int] = field(default_factory=lambda: dict.fromkeys(APPROXIMATE, 0))

    def __post_init__(self) -> None:
        # lists of numbers per phase: a layer's step adds to three, and an array is slow at single numbers
        self._counts = [[[0] * self.geometry.layers for _ in range(3)] for _ in range(2)]

    @property
    def hits(self) -> NDArray[np.int64]:
        """[2, L] requests that were hits."""
        return np.asarray([phase[0] for phase in self._counts], dtype=np.int64)

    @property
    def misses(self) -> NDArray[np.int64]:
        """[2, L] requests that were misses."""
        return np.asarray([phase[1] for phase in self._counts], dtype=np.int64)

    @property
    def lates(self) -> NDArray[np.int64]:
        """[2, L] requests that were late."""
        return np.asarray([phase[2] for phase in self._counts], dtype=np.int64)

    def count(self, phase: Phase, layer: int, hits: int, misses: int, late: int) -> None:
        self.steps += 1
        of_hits, of_misses, of_lates = self._counts[phase is not Phase.PREFILL]
        of_hits[layer] += hits
        of_misses[layer] += misses
        of_lates[layer] += late

    def end_prefetch(self, fate: str, nbytes: int) -> None:
        """A prefetch of so many bytes was useful, late, wasted, or dropped: then nothing was moved."""
        self.prefetches[fate] += 1
        if fate != "dropped":
            setattr(self.bytes, fate, getattr(self.bytes, fate) + nbytes)

    def hit_rate(self, phase: Phase | None = None) -> float:
        """Hits over requests, of one phase or of both; 0 if there was no request."""
        rows = slice(None) if phase is None else slice(0, 1) if phase is Phase.PREFILL else slice(1, 2)
        hits = int(self.hits[rows].sum())
        requests = hits + int(self.misses[rows].sum()) + int(self.lates[rows].sum())
        return hits / requests if requests else 0.0

    def hit_rate_by_layer(self) -> list[float]:
        """Decode hit rate of each MoE layer."""
        requests = self.hits[1] + self.misses[1] + self.lates[1]
        return [float(h / r) if r else 0.0 for h, r in zip(self.hits[1], requests, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "hit_rate": self.hit_rate(Phase.DECODE)
            if (self.hits[1] + self.misses[1] + self.lates[1]).any()
            else self.hit_rate(),
            "hit_rate_prefill": self.hit_rate(Phase.PREFILL),
            "hit_rate_by_layer": self.hit_rate_by_layer(),
            "requests": {
                "hits": int(self.hits.sum()),
                "misses": int(self.misses.sum()),
                "late": int(self.lates.sum()),
            },
            "bytes": self.bytes.as_dict(),
            "prefetches": dict(self.prefetches),
            "failed_prefetches": self.failed_prefetches,
            "experts_computed_in_place": self.host_experts,
            "experts_streamed": self.streamed_experts,
            "approximate": dict(self.approximate),
            "stall_ms": {cause: seconds * 1e3 for cause, seconds in self.stall_seconds.items()},
            "compute_ms": self.compute_seconds * 1e3,
            "policy_us_per_layer": self.policy_seconds / self.steps * 1e6 if self.steps else 0.0,
        }
