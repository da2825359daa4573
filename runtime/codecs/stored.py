"""The formats that checkpoints come in: which one a configuration names, and which tensors make a weight.

``find_format`` reads config.json's ``quantization_config``; None stands for plain numbers. What is not known
is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daop.core import DaopError

from .base import SCALE, Codec
from .fp8 import BLOCK, Fp8
from .mxfp4 import Mxfp4

READ = (
    "BF16, F16 and F32; FP8 (E4M3) with scales for blocks of 128 x 128 (quant_method fp8); MXFP4 "
    "(quant_method mxfp4); and what `daop pack` writes (INT8, INT4)"
)


@dataclass(frozen=True)
class StoredFormat:
    """A codec, and how a checkpoint names its pieces: ``weight`` and ``scale`` are what the two tensors'
    names add to the parameter's."""

    codec: Codec
    weight: str
    scale: str

    def pieces(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Of the names that belong to quantised weights: (the parameter's name, the piece's suffix)."""
        out = {}
        for name in names:
            if name.endswith(self.scale):
                base = name.removesuffix(self.scale)
                if base + self.weight in names:
                    out[name] = (base, SCALE)
                    out[base + self.weight] = (base, "")
        return out


PACKED = "daop-pack"  # the quant_method of folders that daop packed
FP8 = StoredFormat(Fp8(), "", "_scale_inv")
MXFP4 = StoredFormat(Mxfp4(), "_blocks", "_scales")


def find_format(path: Path, config: dict[str, Any]) -> StoredFormat | None:
    """The format that config.json (at ``path``) says; ``DaopError`` for one that daop does not read."""
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        said = part.get("quantization_config")
        if said:
            return _known(path, said)
    return None


def _known(path: Path, said: Any) -> StoredFormat:
    method = said.get("quant_method", "unnamed") if isinstance(said, dict) else said
    if method == "mxfp4":
        return MXFP4
    if method == PACKED:
        raise DaopError(
            f"{path} is of a folder that `daop pack` wrote, but its manifest is missing: fetch it again"
        )
    if method != "fp8":
        raise DaopError(
            f"{path} says that the weights are quantised ({method}); daop reads {READ}: use a copy of the "
            "model in one of these"
        )
    blocks, kind = said.get("weight_block_size"), said.get("fmt", "e4m3")
    if blocks != [BLOCK, BLOCK] or kind not in ("e4m3", "float8_e4m3fn"):
        raise DaopError(
            f"{path} says that the weights are FP8 of kind {kind!r} with weight_block_size {blocks}; of FP8 "
            f"daop reads E4M3 with weight_block_size [{BLOCK}, {BLOCK}]: use a copy of the model in that, or "
            "in BF16"
        )
    return FP8
