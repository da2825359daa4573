"""What things cost on a machine: a described machine (``Hardware``) and its cost of one expert.

All figures are seconds, bytes and bytes per second; profiles are written in GB/s (1e9 bytes) and
microseconds. The model is deliberately small:

    copy(e)       latency + bytes / link bandwidth; of ``link_parallel`` transfers the latencies overlap
    host(e, n)    activation there and back + overhead + max(bytes / host bandwidth, flops(n) / host rate)
    device(e, n)  overhead + max(bytes / device bandwidth, flops(n) / device rate)
                  where the processor was measured in the experts' format (``Hardware.curves``), the
                  measured time for n tokens stands in the place of overhead and maximum
    layer(n, c)   all of one layer but its experts, for n rows that see c tokens of context in all
    forward(n)    what a forward pass takes outside its layers: embedding, head, choice of the next token

While the link is busy, what computes beside it on the same memory takes ``link_slows`` times as long.

On the tier ``device`` fast memory is the GPU's, the link is PCIe, and the host computes what it holds.
On the tier ``host`` fast memory is RAM, the link is the disk, and there is one processor: a miss that
is computed "where it lies" is read and then computed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from daop.core import DaopError, Geometry

from .format_costs import CpuCosts, Curve

TIERS = ("device", "host")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine, as placement sees it. Zero stands for "no such cost" only where a figure is a delay."""

    name: str
    tier: str = "device"
    link_gbs: float
    link_latency_us: float = 0.0
    link_pageable_gbs: float | None = None
    link_chunk_mib: float = 1.0
    link_parallel: float = 1.0
    link_slows: float = 1.0
    host_gbs: float
    host_gflops: float
    host_overhead_us: float = 0.0
    activation_us: float = 0.0
    device_gbs: float
    device_gflops: float
    device_overhead_us: float = 0.0
    layer_us: float
    layer_us_per_row: float = 0.0
    layer_us_per_context: float = 0.0
    forward_us: float = 0.0
    forward_us_per_row: float = 0.0
    forecast_us: float = 0.0
    disk_gbs: float | None = None
    disk_latency_us: float = 0.0
    curves: tuple[Curve, ...] = ()
    """What computing experts on the CPU was measured to take, one for each format."""

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise DaopError(f"hardware {self.name!r}: tier is {self.tier!r}, but must be one of {TIERS}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "tier", "curves") or value is None:
                continue
            self._check(field.name, value)

    def curve(self, format_: str | None) -> Curve | None:
        """What was measured in a format, if it was."""
        return next((curve for curve in self.curves if curve.format == format_), None)

    def _check(self, name: str, value: float) -> None:
        delay = "_us" in name
        bad = not isinstance(value, (int, float)) or value != value or value < 0 or (value == 0 and not delay)
        if bad or value > 1e9:
            kind = "a delay of zero or more microseconds" if delay else "a positive number"
            raise DaopError(f"hardware {self.name!r}: {name} is {value!r}, but must be {kind} below 1e9")
        if name in ("link_parallel", "link_slows") and value < 1:
            raise DaopError(f"hardware {self.name!r}: {name} is {value!r}, but must be at least 1")


ROUGH = Hardware(
    name="rule of thumb",
    tier="host",
    link_gbs=1.0,
    host_gbs=10.0,
    host_gflops=160.0,
    device_gbs=10.0,
    device_gflops=160.0,
    layer_us=1000.0,
    layer_us_per_row=10.0,
)
"""A PC with an SSD that nobody has calibrated. Only the ratios matter; ``daop calibrate`` measures them."""


class HardwareCosts:
    """``policies.base.Costs`` of a machine for a model's experts; one table per expert for speed.

    ``weight_bits``: bits of one stored weight, from which the arithmetic per expert follows. ``format_``: the
    format of the experts, if known: one that the machine was measured with costs what was measured.
    """

    def __init__(
        self, hardware: Hardware, geometry: Geometry, weight_bits: float = 16.0, format_: str | None = None
    ) -> None:
        if 0 in geometry.expert_bytes:
            raise DaopError(
                "the size of an expert is not known: the trace's source does not imply it; "
                "give it with --expert-bytes"
            )
        self.hardware = hardware
        self.geometry = geometry
        sizes = [int(n) for n in geometry.bytes_of]
        link, latency = hardware.link_gbs * 1e9, hardware.link_latency_us * 1e-6
        self.copy_seconds = [latency + size / link for size in sizes]
        # what a transfer takes of the link's time; the rest of its latency passes while others are served
        self.link_seconds = [
            max(size / link, copy / hardware.link_parallel)
            for size, copy in zip(sizes, self.copy_seconds, strict=True)
        ]
        self.link_delay = [c - own for c, own in zip(self.copy_seconds, self.link_seconds, strict=True)]
        self.link_slows = hardware.link_slows
        self._device_bytes = [size / (hardware.device_gbs * 1e9) for size in sizes]
        self._host_bytes = [size / (hardware.host_gbs * 1e9) for size in sizes]
        flops = [
            2.0 * 8.0 * size / weight_bits for size in sizes
        ]  # per token: a product and a sum per weight
        self._device_flops = [f / (hardware.device_gflops * 1e9) for f in flops]
        self._host_flops = [f / (hardware.host_gflops * 1e9) for f in flops]
        self._device_overhead = hardware.device_overhead_us * 1e-6
        self._host_overhead = (hardware.host_overhead_us + hardware.activation_us) * 1e-6
        self.host_beside = hardware.tier == "device"
        curve = hardware.curve(format_)
        self._cpu = None if curve is None else CpuCosts(curve, sizes)
        self._activation = hardware.activation_us * 1e-6
        self._layer = hardware.layer_us * 1e-6
        self._row = hardware.layer_us_per_row * 1e-6
        self._context = hardware.layer_us_per_context * 1e-6
        self._forward = hardware.forward_us * 1e-6
        self._forward_row = hardware.forward_us_per_row * 1e-6
        self.chunk_seconds = hardware.link_chunk_mib * 2**20 / link
        self.forecast_seconds = hardware.forecast_us * 1e-6

    def copy(self, flat: int) -> float:
        return self.copy_seconds[flat]

    def device(self, flat: int, tokens: int) -> float:
        if self._cpu is not None and not self.host_beside:  # the only processor there is
            return self._cpu(flat, tokens)
        return self._device_overhead + max(self._device_bytes[flat], tokens * self._device_flops[flat])

    def host(self, flat: int, tokens: int) -> float:
        if not self.host_beside:
            return self.copy_seconds[flat] + self.device(flat, tokens)
        if self._cpu is not None:
            return self._activation + self._cpu(flat, tokens)
        return self._host_overhead + max(self._host_bytes[flat], tokens * self._host_flops[flat])

    def layer(self, rows: int, context: int = 0) -> float:
        return self._layer + self._row * max(0, rows - 1) + self._context * context

    def forward(self, rows: int) -> float:
        """Seconds of a forward pass outside its layers."""
        return self._forward + self._forward_row * max(0, rows - 1)


def stretched(seconds: float, slows: float, busy: float) -> float:
    """A computation of ``seconds`` that takes ``slows`` times as long for the first ``busy`` seconds."""
    if busy <= 0:
        return seconds
    return seconds * slows if seconds * slows <= busy else seconds + busy - busy / slows
