"""The names of number formats, and how many bits of a weight each takes."""

from __future__ import annotations

GROUPS = {"int8": 64, "int4": 32}
"""Inputs per scale that ``daop pack`` chooses."""
BITS = {"bf16": 16.0, "f16": 16.0, "f32": 32.0, "fp8": 8.0, "int8": 8.25, "int4": 4.5, "mxfp4": 4.25}
"""Bits of a weight, scales included, in these groups; FP8's one scale for 128 x 128 weights is left out."""
PAGE = 4096
"""``daop pack`` writes INT8 and INT4 experts in multiples of so many bytes."""


def format_of_bits(bits: float) -> str | None:
    """The format whose weights take about so many bits; 16 is BF16. None: no format of daop's does."""
    name = min(BITS, key=lambda name: abs(BITS[name] - bits))
    return name if abs(BITS[name] - bits) < 0.02 * bits else None


def format_of_fingerprint(fingerprint: str) -> str | None:
    """What ``daop pack`` made of a model, by the end of its fingerprint: "...+int8-g64"."""
    name = fingerprint.rpartition("+")[2].partition("-")[0] if "+" in fingerprint else ""
    return name if name in GROUPS else None
