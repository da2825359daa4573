"""Small plots made of text, for terminals."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def bars(values: Sequence[float]) -> str:
    """A row of small bars, from 0 to the largest value."""
    top = max(values) or 1.0
    return "".join(BLOCKS[round(max(v, 0.0) / top * (len(BLOCKS) - 1))] for v in values)
