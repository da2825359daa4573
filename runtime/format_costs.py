"""What computing an expert costs on a CPU in one number format: measured by tokens, or assumed by shares.

Kernels of different formats reach different shares of the memory's bandwidth, and for several tokens
different rates of arithmetic, so that no single pair of figures serves them all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from daop.core import DaopError

if TYPE_CHECKING:
    from daop.runtime.costs import Hardware


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured: ``microseconds[i]`` to compute one expert of ``nbytes`` for ``tokens[i]`` tokens, the first
    of which is 1."""

    format: str
    nbytes: int
    tokens: tuple[int, ...]
    microseconds: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        where = f"the costs of format {self.format!r}"
        counts = self.tokens
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (self.nbytes, *counts))
        if not whole or self.nbytes < 1 or len(counts) < 2 or counts[0] != 1:
            raise DaopError(f"{where}: bytes and tokens must be whole numbers, tokens two or more from 1 on")
        if list(counts) != sorted(set(counts)) or len(counts) != len(self.microseconds):
            raise DaopError(f"{where}: tokens must ascend, with one time for each")
        if not all(_is_number(us) and 0 < us < 1e9 for us in self.microseconds):
            raise DaopError(f"{where}: times must be positive microseconds below 1e9")

    def seconds(self, tokens: int) -> float:
        """On the line between the two measured counts around; beyond the last, as the last two rise."""
        counts, times = self.tokens, self.microseconds
        at = min(max(bisect_left(counts, tokens), 1), len(counts) - 1)
        slope = (times[at] - times[at - 1]) / (counts[at] - counts[at - 1])
        if tokens > counts[-1]:
            return (times[-1] + max(0.0, slope) * (tokens - counts[-1])) * 1e-6
        return (times[at - 1] + slope * (tokens - counts[at - 1])) * 1e-6


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Assumed: what computing in a format reaches of a machine's figures, which are those of BF16.

    ``host`` and ``device`` of the bytes per second, the weights being read once; ``host_rate`` and
    ``device_rate`` of the arithmetic.
    """

    host: float
    host_rate: float
    device: float
    device_rate: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not _is_number(value) or not 0 < value <= 100:
                raise DaopError(f"{name} of a format's shares is {value!r}, but must be a positive number")

    def of(self, hardware: Hardware) -> Hardware:
        """The machine as computing in this format sees it."""
        return replace(
            hardware,
            host_gbs=hardware.host_gbs * self.host,
            host_gflops=hardware.host_gflops * self.host_rate,
            device_gbs=hardware.device_gbs * self.device,
            device_gflops=hardware.device_gflops * self.device_rate,
        )


class CpuCosts:
    """A curve for experts of given sizes: one of half the bytes takes half the time."""

    def __init__(self, curve: Curve, sizes: Sequence[int]) -> None:
        self._curve = curve
        self._scale = [size / curve.nbytes for size in sizes]
        self._seconds: dict[int, float] = {}

    def __call__(self, flat: int, tokens: int) -> float:
        seconds = self._seconds.get(tokens)
        if seconds is None:
            seconds = self._seconds[tokens] = self._curve.seconds(tokens)
        return self._scale[flat] * seconds


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
