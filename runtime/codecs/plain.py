"""BF16, F16 and F32: numbers as they are, in the family's own arrangement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Codec, Parts, Piece


@dataclass(frozen=True)
class Plain(Codec):
    """Any of the three; which one, the parts' own dtype says."""

    name = "plain"
    by_rows = False
    suffixes = ()

    def pieces(self, rows: int, columns: int) -> dict[str, Piece]:
        return {"": Piece(shape=(rows, columns), dtypes=("BF16", "F16", "F32"))}

    def decode(self, parts: Parts, role: str, columns: int, first: int, last: int) -> torch.Tensor:
        return parts[role][first:last].float()


PLAIN = Plain()
