"""INT8 and INT4, symmetric, one scale for each group of inputs of each output.

    weight = scale[row, column // group] * q[row, column]

``q`` is -127..127 or -8..7; scales are BF16, so that a weight of any magnitude keeps its precision. Rows are
padded with zeros to whole groups and whole blocks of 64. INT8 is one byte each. INT4 goes by blocks of 64
values in 32 bytes: byte i holds value i in its low and value 32 + i in its high half, each plus 8, so that
either half of a vector register is a run of values.

Activations are rounded the same way, to -127..127 with one float32 scale per group of a token, so that the
products are of integers and exact: see ``round_groups``. That is part of the format: whoever computes it,
with native kernels or without, rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from daop.core import DaopError

from .base import SCALE, Codec, Parts, Piece

GROUPS = (32, 64, 128)
BLOCK = 64
TINY = 1e-30  # below this, a group counts as zero: its scale would not be invertible
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the largest magnitude, tried as the end of INT4's scale


@dataclass(frozen=True)
class Integers(Codec):
    """INT8 or INT4 with groups of 32, 64 or 128."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group not in GROUPS:
            raise DaopError(
                f"INT{self.bits} in groups of {self.group} is not a format of daop's: bits must be 4 or 8, "
                f"groups one of {', '.join(map(str, GROUPS))}"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"int{self.bits}"

    @property
    def kernel(self) -> int:  # type: ignore[override]
        return 3 if self.bits == 8 else 4

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.group

    def settings(self) -> dict[str, int | str]:
        return {"group": self.group}

    def width(self, columns: int) -> int:
        """Values of a stored row."""
        step = max(self.group, BLOCK)
        return -(-columns // step) * step

    def pieces(self, rows: int, columns: int) -> dict[str, Piece]:
        width = self.width(columns)
        weights = Piece(shape=(rows, width), dtypes=("I8",))
        if self.bits == 4:
            weights = Piece(shape=(rows, width // 2), dtypes=("U8",))
        return {"": weights, SCALE: Piece(shape=(rows, width // self.group), dtypes=("BF16",))}

    def decode(self, parts: Parts, role: str, columns: int, first: int, last: int) -> torch.Tensor:
        stored = parts[role][first:last]
        if self.bits == 4:
            halves = stored.view(last - first, -1, BLOCK // 2)
            stored = torch.cat((halves & 15, halves >> 4), dim=-1).to(torch.int8) - 8
        values = stored.reshape(last - first, -1, self.group).float()
        values *= parts[role + SCALE][first:last].float().unsqueeze(-1)
        return values.view(last - first, -1)[:, :columns]

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = round_groups(x.float(), self.group)
        return (q * scale.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A finite weight [out, in] as pieces, by suffix."""
        rows, columns = weight.shape
        padded = functional.pad(weight.float(), (0, self.width(columns) - columns))
        groups = padded.view(rows, -1, self.group)
        q, scale = self._round8(groups) if self.bits == 8 else self._round4(groups)
        if self.bits == 4:
            halves = (q.view(rows, -1, 2, BLOCK // 2) + 8).to(torch.uint8)
            q = halves[:, :, 0] | halves[:, :, 1] << 4
        return {"": q.reshape(rows, -1).contiguous(), SCALE: scale.contiguous()}

    def _round8(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = _to_bf16(groups.abs().amax(-1) / 127)
        return _divide(groups, scale).clamp_(-127, 127).to(torch.int8), scale

    def _round4(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale of least squared error among a few: all of the range is used on the side of the largest
        magnitude, which becomes -8 or is clipped a little."""
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        best = torch.full(largest.shape, torch.inf)
        chosen, scale = torch.zeros(groups.shape, dtype=torch.int8), torch.zeros_like(largest).bfloat16()
        for share in SHRINK:
            tried = (largest * (share / -8)).bfloat16()
            q = _divide(groups, tried).clamp_(-8, 7)
            error = (q * tried.float().unsqueeze(-1) - groups).square_().sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scale = torch.where(better, tried, scale)
            chosen = torch.where(better.unsqueeze(-1), q.to(torch.int8), chosen)
        return chosen, scale


def round_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [n, in] as whole numbers in float32 [n, groups, group] and scales [n, groups].

    Half-way cases go to the even number. A group with a value that is not finite has the scale NaN, so that
    every product with it shows.
    """
    padded = functional.pad(x, (0, -x.shape[1] % group))
    groups = padded.view(x.shape[0], padded.shape[1] // group, group)
    largest = groups.abs().amax(-1)
    whole = largest.isfinite()
    inverse = torch.where(whole & (largest > TINY), 127 / largest, torch.zeros(()))
    q = torch.where(whole.unsqueeze(-1), groups * inverse.unsqueeze(-1), torch.zeros(()))
    return q.round_(), torch.where(whole, largest / 127, torch.full((), torch.nan))


def _to_bf16(scale: torch.Tensor) -> torch.Tensor:
    """Rounded up, so that nothing lies beyond the end of the scale."""
    rounded = scale.bfloat16()
    return torch.where(
        rounded.float() < scale, torch.nextafter(rounded, torch.full_like(rounded, 1e38)), rounded
    )


def _divide(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale.float().abs() > TINY, 1 / scale.float(), torch.zeros(()))
    return (groups * inverse.unsqueeze(-1)).round_()
