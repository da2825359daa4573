"""The same traffic with experts in other formats, for a simulated comparison side by side.

A format changes two things: the bytes of an expert, and with them the time to move or read it, and how many
fit. The memory stays the same: the ECR that is asked for is that of the format the trace was recorded in, and
a format of half the bytes gets twice the share. The arithmetic of an expert stays what it was, and computing
is bound by the same bandwidth; a machine whose kernels for a format are slower than its memory is to be
calibrated with a packed model instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from daop.core import DaopError

if TYPE_CHECKING:
    from daop.comparison import Recorded, Setting

KEEP = "keep"
BITS = {"int8": 8.25, "int4": 4.5, "fp8": 8.0, "mxfp4": 4.25, "bf16": 16.0}
"""Bits of a weight, scales included, with the groups that ``daop pack`` chooses."""


def formats_of(text: str) -> list[str]:
    """Formats of a comma-separated list."""
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in chosen:
        if name != KEEP and name not in BITS:
            raise DaopError(f"--format {name} is not known; known: {', '.join((KEEP, *BITS))}")
    if not chosen:
        raise DaopError("--format names no format")
    return chosen


def in_formats(
    formats: Sequence[str], recorded: Recorded, settings: Sequence[Setting]
) -> Iterator[tuple[str, Recorded, list[Setting]]]:
    """For each format, the traffic with experts of its size, and the settings with the share that fits."""
    for name in formats:
        if name == KEEP:
            yield name, recorded, list(settings)
            continue
        bits = {setting.weight_bits for setting in settings}
        if len(bits) != 1:
            raise DaopError("--format needs one --weight-bits for all machines: give it")
        share = BITS[name] / bits.pop()
        geometry = recorded.traffic.geometry
        sizes = tuple(max(1, round(size * share)) for size in geometry.expert_bytes)
        traffic = dataclasses.replace(
            recorded.traffic, geometry=dataclasses.replace(geometry, expert_bytes=sizes)
        )
        fitting = [
            dataclasses.replace(setting, ecr=min(1.0, setting.ecr / share), weight_bits=BITS[name])
            for setting in settings
        ]
        yield name, dataclasses.replace(recorded, traffic=traffic), fitting
