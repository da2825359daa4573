"""Tiny checkpoints as publishers of FP8 and MXFP4 write them, made from the families' tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from daop.runtime.codecs.fp8 import BLOCK

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # what publishers leave in BF16


def save_fp8(family: str, folder: Path, **changes: Any) -> Path:
    """Linear layers, shared and routed experts in FP8 with block scales, where sizes are multiples of 128 as
    transformers' reader wants them."""
    tiny_models.save_tiny(family, folder, dtype=torch.bfloat16, **changes)
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2 or any(n % BLOCK for n in tensor.shape) or any(word in name for word in KEPT):
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        out[name] = (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    rewrite(folder, out, FP8)
    return folder


def save_mxfp4(folder: Path, **changes: Any) -> Path:
    """gpt_oss with random blocks and scales in the place of its experts' weights."""
    tiny_models.save_tiny("gpt_oss", folder, dtype=torch.bfloat16, **changes)
    generator = torch.Generator().manual_seed(3)
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = tensor
            continue
        experts, columns, rows = tensor.shape  # [E, in, out]
        shape = (experts, rows, columns // 32)
        out[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        out[f"{name}_scales"] = torch.randint(119, 125, shape, generator=generator, dtype=torch.uint8)
    rewrite(folder, out, {"quant_method": "mxfp4"})
    return folder


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantisation: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    configuration(folder, quantisation)


def configuration(folder: Path, quantisation: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))


def dequantised(folder: Path, plain: Path) -> Path:
    """A float32 copy of such a checkpoint, by transformers' own functions."""
    plain.mkdir()
    tensors = load_file(folder / "model.safetensors")
    out = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"]
            out[name] = Fp8Dequantize(None)._dequantize_one(tensor, scale, torch.float32)
        elif name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            weight = convert_moe_packed_tensors(tensor, tensors[f"{base}_scales"], dtype=torch.float32)
            out[base] = weight.contiguous()
        elif not name.endswith(("_scale_inv", "_scales")):
            out[name] = tensor.float()
    save_file(out, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return plain
