"""One expert computed by torch: what there always is.

Weights in a codec are decoded to float32 a block at a time. Without bf16 arithmetic in the CPU, products of
bf16 are several times slower than products of float32, so these are converted a block at a time, too. Two
paths are faster as stored, and there an expert's inner values are rounded to bf16, as in transformers: a
single row, and many rows on a CPU with bf16 arithmetic.

Shape legend: n rows of one expert, H hidden size, I intermediate size.
"""

from __future__ import annotations

from functools import cache

import torch

from .codecs.base import Codec
from .codecs.plain import PLAIN
from .layout import ExpertForm

BLOCK_VALUES = 1 << 18  # weights converted at a time: 1 MiB of float32, which a core's caches hold


@cache
def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bf16 in hardware; torch's products of bf16 are slow where it does not."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class TorchExperts:
    """Computes experts of one form, one at a time; owns scratch memory for one thread."""

    def __init__(self, form: ExpertForm, codec: Codec = PLAIN) -> None:
        self.form = form
        self.codec = codec
        self._scratch = torch.empty(0)

    @torch.no_grad()
    def __call__(self, parts: dict[str, torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[n, H] float32 of rows x [n, H], router weights [n] applied."""
        if self.form.scales_input:
            return self._expert(parts, x.float() * weight[:, None])
        return self._expert(parts, x).mul_(weight[:, None])

    def _expert(self, parts: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        form = self.form
        as_stored = self.codec == PLAIN and _multiplies_as_stored(parts["down"].dtype, x)
        roles = [role for role in ("gate_up", "gate", "up") if role in parts]
        inner = [self._linear(parts, role, x, form.transposed, as_stored) for role in roles]
        act = form.apply_gate(inner[0] if len(inner) == 1 else torch.cat(inner, dim=-1))
        out = self._linear(parts, "down", act, form.down_is_transposed, as_stored)
        return out if form.post_norm is None else form.post_norm(out).float()

    def _linear(
        self, parts: dict[str, torch.Tensor], role: str, x: torch.Tensor, transposed: bool, as_stored: bool
    ) -> torch.Tensor:  # [n, in] -> [n, out] float32
        weight, bias = parts[role], parts.get(f"{role}_bias")
        if transposed and self.codec == PLAIN:  # any other lies row by row
            weight = weight.T
        if as_stored:
            out = torch.mm(weight, x.to(weight.dtype).T).T.float()
        elif self.codec == PLAIN:
            out = self._convert_and_multiply(weight, x.float(), transposed)
        else:
            out = self._decode_and_multiply(parts, role, self.codec.inputs(x))
        return out if bias is None else out.add_(bias.float())

    def _convert_and_multiply(self, weight: torch.Tensor, x: torch.Tensor, transposed: bool) -> torch.Tensor:
        """x [n, in] times weight [out, in] in float32, a block of the weight converted at a time."""
        height, width = weight.shape
        rows = max(1, min(height, BLOCK_VALUES // width))
        if self._scratch.numel() < rows * width:
            self._scratch = torch.empty(rows * width)
        out = torch.empty(height, x.shape[0])
        for top in range(0, height, rows):
            part = weight[top : top + rows]
            flat = self._scratch[: part.numel()]
            block = flat.view(width, -1).T if transposed else flat.view(-1, width)
            torch.mm(block.copy_(part), x.T, out=out[top : top + rows])
        return out.T

    def _decode_and_multiply(
        self, parts: dict[str, torch.Tensor], role: str, x: torch.Tensor
    ) -> torch.Tensor:
        height, width = len(parts[role]), x.shape[1]
        rows = max(1, min(height, BLOCK_VALUES // width))
        out = torch.empty(height, x.shape[0])
        for top in range(0, height, rows):
            block = self.codec.decode(parts, role, width, top, min(top + rows, height))
            torch.mm(block, x.T, out=out[top : top + rows])
        return out.T


def _multiplies_as_stored(dtype: torch.dtype, x: torch.Tensor) -> bool:
    if dtype == torch.bfloat16 and x.dtype == torch.bfloat16:
        return x.shape[0] == 1 or has_bf16_arithmetic()
    return dtype == torch.float32
