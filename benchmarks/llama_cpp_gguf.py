"""Writes a qwen3_moe checkpoint, or a packed one, as GGUF for llama.cpp: equal numbers, no tokenizer.

Experts become the type of ggml's that holds their format's numbers (``llama_cpp_common``); attention,
embeddings and the output layer stay BF16; norms and routers become F32, as with llama.cpp's own converter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_cpp_common import GGML_TYPES, Bytes, bindings, expert_blocks
from numpy.typing import NDArray

from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.reference import read_expert
from daop.runtime.safetensors_index import read_json

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
Tensor = tuple[str, NDArray[Any], int | None]  # name, values (or bytes), ggml's type of bytes


def write_gguf(model: Path, path: Path) -> None:
    """``model``: a folder that daop runs; ``path``: the file to write."""
    gguf = bindings("gguf")
    checkpoint, config = open_checkpoint(model), read_json(model / "config.json")
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen3moe")
    add_settings(writer, config)
    writer.add_expert_count(checkpoint.geometry.experts[0])
    writer.add_expert_used_count(checkpoint.geometry.top_k)
    for name, array, kind in tensors(checkpoint, model):
        raw = None if kind is None else gguf.GGMLQuantizationType(kind)
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, array, _ in tensors(checkpoint, model):  # read twice: all at once would not fit everywhere
        writer.write_tensor_data(array)
    writer.close()
    part.replace(path)


def add_settings(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def tensors(checkpoint: Checkpoint, model: Path) -> Iterator[Tensor]:
    bf16 = GGML_TYPES["bf16"]
    index = checkpoint.index
    for name in sorted(checkpoint.other_tensors):
        info = index.tensors[name]
        with index.files[info.file].open("rb") as file:
            file.seek(info.offset)
            data = torch.frombuffer(bytearray(file.read(info.nbytes)), dtype=torch.bfloat16).view(info.shape)
        if name in OUTER:
            to = OUTER[name]
        else:
            _, _, number, inside = name.removesuffix(".weight").split(".", 3)
            to = f"blk.{number}.{INNER[inside]}.weight"
        if "norm" in to or "ffn_gate_inp" in to:
            yield to, data.float().numpy(), None
        else:
            yield to, data.view(torch.uint8).numpy(), bf16
    for layer, layout in enumerate(checkpoint.layouts):
        kind = GGML_TYPES.get(layout.codec.name, bf16)
        blocks: list[dict[str, Bytes]] = []
        for expert in range(checkpoint.geometry.experts[layer]):
            slot = read_expert(checkpoint, checkpoint.geometry.flat(layer, expert))
            blocks.append(expert_blocks(layout.codec, layout.views(slot)))
        of_model = checkpoint.geometry.layer_to_model_layer[layer]
        for role in ("gate", "up", "down"):
            whole = np.stack([expert[role] for expert in blocks])
            yield f"blk.{of_model}.ffn_{role}_exps.weight", whole, kind
