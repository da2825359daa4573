"""What a format of weights owes: how many bytes of which kind a weight takes, and what they mean.

A codec describes one weight matrix of an expert, out x in. In a slot it is one or more *pieces*: the
weights themselves under the matrix's role ("gate", "up", "gate_up", "down"), whatever else it takes (scales)
under the role with a suffix. Store, residency and transfers see only the sum of the bytes. Biases belong to
no codec: they are plain tensors in every format.

Adding a format is one file here; if checkpoints come in it, an entry in ``stored.py``; if native kernels
compute it, a ``kernel`` number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

TYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""What pieces are made of, by safetensors' names."""
SCALE = "_scale"  # the usual suffix beside "" (the weights)
Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Shape of one piece for one expert, and the dtypes it may have; daop itself writes the first."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Codec(ABC):
    """One format. Instances with the same settings are equal, since slots of equal layouts are shared."""

    name: str
    by_rows: bool = True
    """Whether a weight lies [out, in], row by row, whatever the model's family does; a plain tensor lies as
    the family stores it."""
    kernel: int | None = None
    """The number under which native kernels know it (``Dtype`` of csrc/experts.h), or None."""
    suffixes: tuple[str, ...] = (SCALE,)
    """Of the pieces beside the weights."""
    block: int = 1
    """Inputs that share a scale."""

    @abstractmethod
    def pieces(self, rows: int, columns: int) -> dict[str, Piece]:
        """The pieces of a weight of ``rows`` outputs and ``columns`` inputs, by suffix, the weights first."""

    @abstractmethod
    def decode(self, parts: Parts, role: str, columns: int, first: int, last: int) -> torch.Tensor:
        """Rows first..last-1 of a weight as float32 [rows, columns], exactly what the bytes mean."""

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [n, in] as this format multiplies them, in float32: unchanged, or rounded."""
        return x.float()

    def settings(self) -> dict[str, int | str]:
        """What tells this instance from another of the same class, as JSON."""
        return {}
