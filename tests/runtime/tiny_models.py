"""Tiny random checkpoints of every tested family, saved by transformers' own ``save_pretrained``.

Sizes are chosen so that no two of them can be mistaken for each other (hidden, intermediate, experts and
heads all differ), and every number is random: norms, biases and correction biases too, so that none of them
can be forgotten without a difference. ``SQUARE`` families also exist with hidden == intermediate, where
swapped or transposed weights would not show in a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 89
H, I, SHARED, DENSE, E, K = 48, 20, 28, 36, 6, 3  # noqa: E741

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": H,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
WIDE: dict[str, Any] = {"intermediate_size": DENSE, "moe_intermediate_size": I, "head_dim": 12}
MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": I, "num_local_experts": E},
    "phimoe": {
        "intermediate_size": I,
        "num_local_experts": E,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    },
    "qwen2_moe": {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "shared_expert_intermediate_size": SHARED,
        "num_experts": E,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"intermediate_size": DENSE, "moe_intermediate_size": I, "num_experts": E, "head_dim": 16},
    "qwen3_next": {
        "moe_intermediate_size": I,
        "shared_expert_intermediate_size": SHARED,
        "num_experts": E,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "olmoe": {"intermediate_size": I, "num_experts": E},
    "flex_olmo": {"intermediate_size": I, "num_experts": E},
    "deepseek_v2": MLA
    | {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "n_routed_experts": E,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "deepseek_v3": MLA
    | {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe": {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "n_routed_experts": E,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "head_dim": 12,
    },
    "ernie4_5_moe": {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "moe_num_experts": E,
        "moe_k": K,
        "moe_num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {"intermediate_size": I, "num_experts": E, "moe_topk": K, "head_dim": 12},
    "dots1": {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "n_routed_experts": E,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "head_dim": 12,
    },
    "jamba": MAMBA
    | {
        "intermediate_size": I,
        "num_experts": E,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "granitemoe": {"intermediate_size": I, "num_local_experts": E, "residual_multiplier": 0.7},
    "granitemoeshared": {"intermediate_size": I, "num_local_experts": E, "shared_intermediate_size": SHARED},
    "granitemoehybrid": MAMBA
    | {
        "intermediate_size": I,
        "num_local_experts": E,
        "shared_intermediate_size": SHARED,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_chunk_size": 8,
        "position_embedding_type": "rope",
    },
    "gpt_oss": {"intermediate_size": I, "num_local_experts": E, "head_dim": 12, "sliding_window": 8},
    "minimax": {
        "intermediate_size": I,
        "num_local_experts": E,
        "head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 8,
    },
    "lfm2_moe": {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "num_experts": E,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "num_hidden_layers": 4,
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "moe_shared_expert_intermediate_size": SHARED,
        "n_routed_experts": E,
        "head_dim": 12,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "chunk_size": 8,
        "routed_scaling_factor": 1.5,
        "use_mamba_kernels": False,
    },
    "llama4_text": {
        "intermediate_size": I,
        "intermediate_size_mlp": DENSE,
        "num_local_experts": E,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "attention_chunk_size": 8,
        "moe_layers": [0, 2],
    },
    "gemma4_text": {
        "intermediate_size": DENSE,
        "moe_intermediate_size": I,
        "num_experts": E,
        "top_k_experts": K,
        "enable_moe_block": True,
        "head_dim": 12,
        "global_head_dim": 12,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "afmoe": {**WIDE, "num_experts": E, "num_local_experts": E, "num_dense_layers": 1},
    "cohere2_moe": {**WIDE, "num_experts": E, "num_local_experts": E},
    "deepseek_v32": MLA
    | {**WIDE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "exaone_moe": {
        **WIDE,
        "num_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "first_k_dense_replace": 1,
        "is_moe_layer": [0, 1, 1],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "glm4_moe_lite": MLA | {**WIDE, "n_routed_experts": E, "first_k_dense_replace": 1},
    "granitemoe_swa": {"intermediate_size": I, "num_local_experts": E},
    "hy_v3": {**WIDE, "num_experts": E},
    "laguna": {**WIDE, "num_experts": E},
    "mellum": {**WIDE, "num_experts": E},
    "mimo_v2_flash": {**WIDE, "n_routed_experts": E},
    "minimax_m2": {"intermediate_size": I, "num_local_experts": E, "head_dim": 12},
    "solar_open": {**WIDE, "n_routed_experts": E},
    "dbrx": {
        "d_model": H,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": H, "ffn_hidden_size": I, "moe_num_experts": E, "moe_top_k": K},
    },
}
"""Configuration of each family, beyond ``COMMON``."""
FAMILIES["qwen3_5_moe_text"] = FAMILIES["qwen3_next"]

SQUARE: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": H},
    "qwen3_moe": {"moe_intermediate_size": H},
    "gpt_oss": {"intermediate_size": H},
    "nemotron_h": {"moe_intermediate_size": H},
    "llama4_text": {"intermediate_size": H},
    "dbrx": {"ffn_config": {"hidden_size": H, "ffn_hidden_size": H, "moe_num_experts": E, "moe_top_k": K}},
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The family's tiny configuration."""
    common = {} if family == "dbrx" else dict(COMMON)
    if family == "dbrx":
        common = {key: COMMON[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    if family == "nemotron_h":
        common.pop("num_hidden_layers")
    settings = common | FAMILIES[family] | overrides
    if family == "nemotron_h":
        settings.pop("num_hidden_layers")
    return AutoConfig.for_model(family, **settings)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter and persistent buffer random values of a sensible size."""
    generator = torch.Generator().manual_seed(seed)
    persistent = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in persistent or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if "A_log" in name or name.endswith((".A", ".D", "dt_bias", "layer_scalar")):
                tensor.add_(0.1 * noise)
            elif "norm" in name and tensor.dim() == 1:
                tensor.copy_(1 + 0.2 * noise if not name.endswith("bias") else 0.1 * noise)
            elif tensor.dim() < 2 or name.endswith(("bias", "scale")):
                tensor.copy_(0.3 * noise if not name.endswith("scale") else 1 + 0.2 * noise)
            else:
                inputs = tensor.shape[-1] if tensor.dim() < 4 else tensor[0].numel()
                tensor.copy_(noise * 1.2 / inputs**0.5)


def save_tiny(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard: str | int = "5GB",
    adjust: Callable[[Any], None] | None = None,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint of the family into ``folder`` and return it. ``adjust`` may change the model
    before it is saved; ``shard`` is save_pretrained's ``max_shard_size``."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    randomise(model, seed)
    if adjust is not None:
        adjust(model)
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
