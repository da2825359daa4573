"""MXFP4 as gpt-oss publishes it: E2M1 values in blocks of 32 inputs, each block with a power of two.

    weight = 2 ** (scale - 127) * VALUES[nibble]

(OCP Microscaling Formats, version 1.0.) Byte i of a block's 16 holds value 2i in its low and value 2i + 1 in
its high half. A scale of 255 is NaN in the format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from daop.core import DaopError

from .base import SCALE, Codec, Parts, Piece

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Mxfp4(Codec):
    name = "mxfp4"
    kernel = 6
    block = BLOCK

    def pieces(self, rows: int, columns: int) -> dict[str, Piece]:
        if columns % BLOCK:
            raise DaopError(f"MXFP4 goes by blocks of {BLOCK} inputs, but there are {columns}")
        blocks = columns // BLOCK
        return {
            "": Piece(shape=(rows, blocks, BLOCK // 2), dtypes=("U8",)),
            SCALE: Piece(shape=(rows, blocks), dtypes=("U8",)),
        }

    def decode(self, parts: Parts, role: str, columns: int, first: int, last: int) -> torch.Tensor:
        stored, scale = parts[role][first:last], parts[role + SCALE][first:last]
        values = torch.tensor(VALUES, device=stored.device)
        nibbles = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).int()  # [rows, blocks, 32]
        power = torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127))
        return (values[nibbles] * power.unsqueeze(-1)).view(last - first, columns)
