"""Costs by rule of thumb, for a machine that nobody has calibrated.

Only their ratios matter to a policy, and only until measurements replace them.
"""

from __future__ import annotations

from daop.core import Geometry

DISK = 1e9  # bytes per second of an SSD under random reads
MEMORY = 10e9  # bytes per second that computing an expert reads
LAYER = 1e-3  # seconds of attention and router per layer
ROW = 1e-5  # and for every further row


class RoughCosts:
    """``policies.base.Costs`` of the device ``host`` before calibration."""

    host_beside = False

    def __init__(self, geometry: Geometry) -> None:
        self._bytes_of = geometry.bytes_of

    def copy(self, flat: int) -> float:
        return float(self._bytes_of[flat]) / DISK

    def host(self, flat: int, tokens: int) -> float:
        return self.copy(flat) + self.device(flat, tokens)

    def device(self, flat: int, tokens: int) -> float:
        return float(self._bytes_of[flat]) / MEMORY * max(1.0, tokens / 16)

    def layer(self, rows: int) -> float:
        return LAYER + ROW * rows
