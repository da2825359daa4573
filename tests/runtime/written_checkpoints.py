"""Checkpoints written as a test wants them, right or wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from daop.runtime.safetensors_index import INDEX

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
Tensors = dict[str, torch.Tensor]


def write(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], **changes: Any) -> None:
    """A safetensors file with the tensors in this order; ``changes`` replaces header entries by name."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    header.update(changes)
    raw = json.dumps(header).encode()
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in tensors)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
