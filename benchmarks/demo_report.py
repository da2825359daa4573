"""Measures the demo's model on held-out text and writes its card (README.md beside the weights).

Held-out loss against bigram models, how evenly each layer's experts are used, and how much their use
differs between domains, compared with how much it differs between two halves of one domain.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_card
import numpy as np
import torch
from demo_train import EXPERTS_NAME, register_experts
from numpy.typing import NDArray
from torch.nn import functional

WINDOW = 512
WINDOWS = 64  # scored per domain at most
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One domain: sums over its scored tokens, and expert choices in each half, [2, L, E]."""

    nats: float
    tokens: int
    byte_count: int
    choices: NDArray[np.float64]


def windows(stream: NDArray[np.uint16]) -> NDArray[np.int64]:
    """[n, WINDOW+1] consecutive pieces of a stream; each is scored without what came before it."""
    count = min(WINDOWS, (len(stream) - 1) // WINDOW)
    starts = np.arange(count) * WINDOW
    return np.stack([stream[s : s + WINDOW + 1].astype(np.int64) for s in starts])


def measure(model: Any, ids: NDArray[np.int64], token_bytes: NDArray[np.int64]) -> Measured:
    config = model.config
    shape = (2, config.num_hidden_layers, config.num_experts)
    nats, choices = 0.0, np.zeros(shape)
    for start in range(0, len(ids), BATCH):
        rows = torch.from_numpy(ids[start : start + BATCH])
        with torch.no_grad():
            out = model(input_ids=rows[:, :-1], output_router_logits=True, use_cache=False)
        target = rows[:, 1:].flatten()
        nats += float(functional.cross_entropy(out.logits.flatten(0, 1), target, reduction="sum"))
        half = int(start + BATCH / 2 > len(ids) / 2)
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.topk(config.num_experts_per_tok).indices.flatten()
            choices[half, layer] += torch.bincount(chosen, minlength=config.num_experts).numpy()
    scored = ids[:, 1:]
    return Measured(nats=nats, tokens=scored.size, byte_count=int(token_bytes[scored].sum()), choices=choices)


class Bigram:
    """p(b|a) = (c(a,b) + beta p(b)) / (c(a) + beta), with p(b) add-one smoothed."""

    def __init__(self, streams: list[NDArray[np.uint16]], vocabulary: int) -> None:
        size = vocabulary * vocabulary
        pairs = np.zeros(size, dtype=np.int64)
        for stream in streams:
            ids = np.asarray(stream, dtype=np.int64)
            pairs += np.bincount(ids[:-1] * vocabulary + ids[1:], minlength=size)
        self.pairs = pairs.reshape(vocabulary, vocabulary)
        self.firsts = self.pairs.sum(1)
        self.unigram = (self.pairs.sum(0) + 1) / (self.pairs.sum() + vocabulary)

    def nats(self, ids: NDArray[np.int64]) -> float:
        """Sum over the tokens of ``ids`` [n, S+1], beta the best of a few for these very tokens: the
        comparison favours the bigram."""
        a, b = ids[:, :-1].ravel(), ids[:, 1:].ravel()
        return min(
            -float(np.log((self.pairs[a, b] + beta * self.unigram[b]) / (self.firsts[a] + beta)).sum())
            for beta in (1, 3, 10, 30, 100, 300, 1000)
        )


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Jensen-Shannon divergence in bits of two sets of counts, over the last axis: 0 alike, 1 disjoint."""
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    middle = (p + q) / 2

    def kl(x: NDArray[np.float64]) -> NDArray[np.float64]:
        ratio = np.divide(x, middle, out=np.ones_like(x), where=x > 0)
        total: NDArray[np.float64] = (x * np.log2(ratio)).sum(-1)
        return total

    return (kl(p) + kl(q)) / 2


def loss_table(
    measured: dict[str, Measured], data: dict[str, dict[str, Any]], vocabulary: int
) -> list[dict[str, Any]]:
    """One row per domain and a mean: the model, a bigram fitted on all domains, one on this domain."""
    pooled = Bigram(list(data["train"].values()), vocabulary)
    rows: list[dict[str, Any]] = []
    for domain, result in measured.items():
        ids = windows(data["heldout"][domain])
        own = Bigram([data["train"][domain]], vocabulary)
        row: dict[str, Any] = {"domain": domain, "tokens": result.tokens}
        scores = {"model": result.nats, "bigram": pooled.nats(ids), "own_bigram": own.nats(ids)}
        for name, nats in scores.items():
            row[f"{name}_nats_per_token"] = round(nats / result.tokens, 3)
            row[f"{name}_bits_per_byte"] = round(nats / result.byte_count / math.log(2), 3)
        rows.append(row)
    mean: dict[str, Any] = {"domain": "mean", "tokens": sum(row["tokens"] for row in rows)}
    for key in list(rows[0])[2:]:
        mean[key] = round(float(np.mean([row[key] for row in rows])), 3)
    return [*rows, mean]


def expert_table(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Per layer: busiest and idlest expert's share of all choices (every domain counting the same), the
    same in the domain where it is greatest, and the divergence between domains and within them."""
    choices = np.stack([result.choices for result in measured.values()])  # [D, 2, L, E]
    by_domain = choices.sum(1)
    by_domain /= by_domain.sum(-1, keepdims=True)  # [D, L, E]
    overall = by_domain.mean(0)
    between = [divergence(p, q) for p, q in itertools.combinations(by_domain, 2)]
    within = [divergence(halves[0], halves[1]) for halves in choices]
    return [
        {
            "layer": layer,
            "busiest": round(float(overall[layer].max()), 4),
            "idlest": round(float(overall[layer].min()), 4),
            "busiest_in_a_domain": round(float(by_domain[:, layer].max()), 4),
            "top_quarter": round(float(np.sort(overall[layer])[-overall.shape[1] // 4 :].sum()), 4),
            "top_quarter_of_domain": round(
                float(np.sort(by_domain[:, layer])[:, -overall.shape[1] // 4 :].sum(-1).mean()), 4
            ),
            "js_between_domains": round(float(np.mean([d[layer] for d in between])), 4),
            "js_within_domain": round(float(np.mean([d[layer] for d in within])), 4),
        }
        for layer in range(overall.shape[0])
    ]


def sample(model: Any, tokenizer: Any, prompts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Completions of two prompts, sampled with a fixed seed: what came first, not the best of several."""
    texts = []
    for row in (prompts[0], prompts[3]):
        torch.manual_seed(0)
        ids = tokenizer(row["prompt"], return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=80, do_sample=True, temperature=0.7, top_p=0.95, top_k=0)
        text = tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
        texts.append({"prompt": row["prompt"], "completion": text})
    return texts


def main(work: Path, out: Path, checkpoint: Path, data: dict[str, dict[str, Any]]) -> None:
    """Measure the model in ``out``, print tables and a line of JSON, write the card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, experts_implementation=EXPERTS_NAME
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    # In byte-level BPE each character of a token's name stands for a byte; special tokens are no text.
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    token_bytes = np.array([0 if name in special else len(name) for name in names])
    measured = {
        domain: measure(model, windows(stream), token_bytes) for domain, stream in data["heldout"].items()
    }
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text("utf-8").splitlines()]
    report = {
        "training": demo_card.training(checkpoint),
        "loss": loss_table(measured, data, model.config.vocab_size),
        "experts": expert_table(measured),
    }
    tables = [demo_card.table(report[key]) for key in ("loss", "experts")]  # type: ignore[arg-type]
    print("\n\n".join(tables))
    card = demo_card.card(work, model, report, sample(model, tokenizer, prompts), prompts)
    (out / "README.md").write_text(card, encoding="utf-8")
    print(json.dumps(report))
