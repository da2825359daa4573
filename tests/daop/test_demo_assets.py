"""The shipped model is what its card says: complete, trained, and routed by what the text is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import daop.assets

FOLDER = Path(daop.assets.__file__).parent / "demo"
LAYERS, EXPERTS, TOP_K = 8, 32, 4


def prompts() -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def routed() -> dict[str, Any]:
    """Loss in nats per token and choices [L, E] of every prompt, by the plain implementation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, experts_implementation="eager")
    losses, choices = [], []
    for row in prompts():
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        with torch.no_grad():
            out = model(input_ids=ids, output_router_logits=True)
        losses.append(float(torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])))
        chosen = [logits.topk(TOP_K).indices.flatten() for logits in out.router_logits]
        choices.append(np.stack([torch.bincount(c, minlength=EXPERTS).numpy() for c in chosen]))
    return {"losses": losses, "choices": np.stack(choices), "tokenizer": tokenizer}


def test_weights_are_complete_small_and_per_expert() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 20_000_000
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert config["num_hidden_layers"] == LAYERS
    assert config["num_experts_per_tok"] == TOP_K
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {"gate_proj": [inner, hidden], "up_proj": [inner, hidden], "down_proj": [hidden, inner]}
    with safe_open(path, framework="pt") as file:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for name, shape in shapes.items():
                    part = file.get_slice(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight")
                    assert (part.get_shape(), part.get_dtype()) == (shape, "BF16")
        assert not any(f".experts.{EXPERTS}." in name for name in file.keys())  # noqa: SIM118 (not a dict)


def test_prompts_come_from_several_domains_with_their_licence() -> None:
    rows = prompts()
    assert len(rows) >= 12
    assert len({row["domain"] for row in rows}) >= 6
    assert all(row["prompt"].count("\n") > 1 and row["licence"] and row["source"] for row in rows)


def test_tokenizer_round_trip(routed: dict[str, Any]) -> None:
    tokenizer = routed["tokenizer"]
    text = 'def f(x):\n\treturn "é"  # ≤ 3\n\nForall n, n + 0 = n.'
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == 0
    assert tokenizer.chat_template is None


def test_model_has_learned(routed: dict[str, Any]) -> None:
    """A uniform guess takes 8.3 nats per token, a bigram model 4.7; from so short a context it is harder."""
    assert np.mean(routed["losses"]) < 4.6


def test_routing_is_neither_collapsed_nor_alike_in_all_domains(routed: dict[str, Any]) -> None:
    domains = [row["domain"] for row in prompts()]
    share = routed["choices"] / routed["choices"].sum(-1, keepdims=True)  # [prompts, L, E]
    overall = share.mean(0)
    assert overall.max() < 0.25 * 0.9  # 0.25: every token of a layer takes the same expert
    assert (overall > 0).mean() > 0.9
    distance = np.abs(share[:, None] - share[None]).sum((-1, -2))  # [prompts, prompts]
    same = np.equal.outer(domains, domains) & ~np.eye(len(domains), dtype=bool)
    different = ~np.equal.outer(domains, domains)
    assert distance[different].mean() > 1.2 * distance[same].mean()


def test_card_names_sources_and_licences() -> None:
    card = (FOLDER / "README.md").read_text("utf-8")
    for word in ("license: apache-2.0", "manpages-fr", "GPL-3+", "js between domains", "prompts.jsonl"):
        assert word in card
