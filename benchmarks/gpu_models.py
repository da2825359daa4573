"""Random checkpoints in which routing has topics, written straight to safetensors; for ``gpu_check.py``.

A token's embedding leans towards its topic's direction, so that tokens of one topic choose similar experts,
as tokens of one text do. It is made-up traffic: what it says about placement holds for it alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

TOPICS = 16
LEAN = 0.8  # how much of an embedding is its topic's direction
QUIET = 0.3  # experts and attention add little to the residual, so that topics stay visible in deep layers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model; ``family`` is qwen3_moe or mixtral."""

    family: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 32000

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * 2

    @property
    def bytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes


LARGE = {
    "qwen3_moe": Shape(
        family="qwen3_moe",
        layers=14,
        experts=64,
        top_k=8,
        hidden=2048,
        intermediate=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
    ),
    "mixtral": Shape(
        family="mixtral",
        layers=8,
        experts=8,
        top_k=2,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
    ),
}
TINY = {
    name: Shape(
        family=name,
        layers=2,
        experts=8,
        top_k=2,
        hidden=64,
        intermediate=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=256,
    )
    for name in LARGE
}


def write_model(shape: Shape, folder: Path, device: torch.device, seed: int) -> Path:
    """A bf16 checkpoint of the shape: one file for each layer, one for the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(rows, columns, device=device, generator=generator)
        return torch.mul(numbers, scale / columns**0.5).bfloat16().cpu()

    files: dict[str, dict[str, torch.Tensor]] = {"rest.safetensors": dict(_rest(shape, random))}
    place: dict[str, str] = {}
    for layer in range(-1, shape.layers):
        name = "rest.safetensors" if layer < 0 else f"layer-{layer:02}.safetensors"
        tensors = files.pop(name, None) or dict(_layer(shape, layer, random))
        place |= dict.fromkeys(tensors, name)
        save_file(tensors, folder / name, {"format": "pt"})
    index = {"metadata": {"total_size": shape.bytes}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    return folder


def _rest(shape: Shape, random: Any) -> Iterator[tuple[str, torch.Tensor]]:
    topics = random(TOPICS, shape.hidden).float() * shape.hidden**0.5
    own = random(shape.vocabulary, shape.hidden).float() * shape.hidden**0.5
    of_topic = topics[torch.arange(shape.vocabulary) % TOPICS]
    yield "model.embed_tokens.weight", (LEAN**0.5 * of_topic + (1 - LEAN) ** 0.5 * own).bfloat16()
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)
    yield "lm_head.weight", random(shape.vocabulary, shape.hidden)


def _layer(shape: Shape, layer: int, random: Any) -> Iterator[tuple[str, torch.Tensor]]:
    at = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{norm}.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)
    width, kept = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, rows in (("q", width), ("k", kept), ("v", kept)):
        yield f"{at}.self_attn.{name}_proj.weight", random(rows, shape.hidden)
    yield f"{at}.self_attn.o_proj.weight", random(shape.hidden, width, QUIET)
    if shape.family == "qwen3_moe":
        for name in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{name}.weight", torch.ones(shape.head_dim, dtype=torch.bfloat16)
    block = "mlp" if shape.family == "qwen3_moe" else "block_sparse_moe"
    names = ("gate_proj", "up_proj", "down_proj") if shape.family == "qwen3_moe" else ("w1", "w3", "w2")
    yield f"{at}.{block}.gate.weight", random(shape.experts, shape.hidden, 4.0)
    for expert in range(shape.experts):
        for name in names[:2]:
            yield f"{at}.{block}.experts.{expert}.{name}.weight", random(shape.intermediate, shape.hidden)
        down = random(shape.hidden, shape.intermediate, QUIET)
        yield f"{at}.{block}.experts.{expert}.{names[2]}.weight", down


def _config(shape: Shape) -> dict[str, Any]:
    qwen = shape.family == "qwen3_moe"
    own: dict[str, Any] = (
        {
            "moe_intermediate_size": shape.intermediate,
            "intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if qwen
        else {"intermediate_size": shape.intermediate, "num_local_experts": shape.experts}
    )
    return {
        "model_type": shape.family,
        "architectures": ["Qwen3MoeForCausalLM" if qwen else "MixtralForCausalLM"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        **own,
    }


def topical_tokens(shape: Shape, count: int, seed: int, stay: float = 0.97) -> list[int]:
    """Token ids of one topic, which changes now and then."""
    random = Random(seed)
    topic, out = random.randrange(TOPICS), []
    per_topic = shape.vocabulary // TOPICS
    for _ in range(count):
        if random.random() > stay:
            topic = random.randrange(TOPICS)
        out.append(topic + TOPICS * random.randrange(1, per_topic))
    return out
