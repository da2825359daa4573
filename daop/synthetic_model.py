"""A small MoE model of random numbers whose experts have a given size: what is calibrated without a model."""

from __future__ import annotations

from pathlib import Path

from daop.core import DaopError

BYTES = 512 << 20  # of experts in all, if the fewest do not take more
LAYERS, FEWEST, MOST = 2, 4, 12  # of layers, and of experts in each
STEP = 32  # sizes are multiples of it, as kernels like them


def synthetic(folder: Path, expert_bytes: int) -> int:
    """Save a bfloat16 model of about so large experts in ``folder``; returns the bytes of one.

    As wide as experts of that size commonly are: 2048, or for small ones a square.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    width = min(2048, _multiple((expert_bytes / 6) ** 0.5))
    inner = _multiple(expert_bytes / 6 / width)
    size = 6 * width * inner
    count = max(FEWEST, min(MOST, BYTES // LAYERS // size))
    if not 0.25 <= size / expert_bytes <= 4:
        raise DaopError(f"--expert-bytes {expert_bytes} is too small to calibrate with: give 16KiB or more")
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=width,
        moe_intermediate_size=inner,
        intermediate_size=STEP,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        num_experts=count,
        num_experts_per_tok=min(4, count),
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return size


def _multiple(size: float) -> int:
    return max(STEP, round(size / STEP) * STEP)
