"""What one simulated run gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .statistics import Statistics


@dataclass
class Run:
    """Figures of one run; times are the virtual clock's, in seconds."""

    statistics: Statistics
    seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    tpot: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    link_busy_seconds: float = 0.0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    layer_seconds: float = 0.0
    forward_seconds: float = 0.0
    decision_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        if self.decode_seconds:
            return self.decode_tokens / self.decode_seconds
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        tpot = np.asarray(self.tpot or [0.0]) * 1e3
        return {
            "tokens_per_second": self.tokens_per_second,
            "tokens": self.tokens,
            "ttft_ms": float(np.median(self.ttft) * 1e3) if self.ttft else 0.0,
            "tpot_ms": {f"p{q}": float(np.percentile(tpot, q)) for q in (50, 95, 99)},
            **self.statistics.as_dict(),
            "busy_ms": {
                "layers": self.layer_seconds * 1e3,
                "outside_layers": self.forward_seconds * 1e3,
                "decisions": self.decision_seconds * 1e3,
                "device": self.device_seconds * 1e3,
                "host": self.host_seconds * 1e3,
                "link": self.link_busy_seconds * 1e3,
                "total": self.seconds * 1e3,
            },
        }
