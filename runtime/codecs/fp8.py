"""FP8 (E4M3) with one scale for each block of 128 x 128 weights, as DeepSeek and Qwen publish.

    weight = scale[row // 128, column // 128] * value[row, column]

E4M3 without infinities (1 sign, 4 exponent, 3 mantissa bits, exponent bias 7; 0x7f and 0xff are NaN), which
is torch's ``float8_e4m3fn``. Blocks at the right and lower edge may be cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import SCALE, Codec, Parts, Piece

BLOCK = 128


@dataclass(frozen=True)
class Fp8(Codec):
    name = "fp8"
    kernel = 5
    block = BLOCK

    def pieces(self, rows: int, columns: int) -> dict[str, Piece]:
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        return {
            "": Piece(shape=(rows, columns), dtypes=("F8_E4M3",)),
            SCALE: Piece(shape=grid, dtypes=("F32", "BF16")),
        }

    def decode(self, parts: Parts, role: str, columns: int, first: int, last: int) -> torch.Tensor:
        values, scale = parts[role][first:last].float(), parts[role + SCALE].float()
        by_row = scale[torch.arange(first, last, device=values.device) // BLOCK]  # [rows, blocks]
        values *= by_row.repeat_interleave(BLOCK, dim=1)[:, :columns]
        return values
