"""Trains the demo's model on the CPU: data parallel over single-threaded processes.

transformers' own Qwen3Moe is what is trained; only the loop over experts is replaced, by one that sorts
the tokens by expert. A step takes one sequence per domain, so that within a sequence the text is of one
kind. The load-balancing loss is per layer, over the whole step (all domains together) and weak: experts
may specialise in a domain, but none may starve.

Checkpoints are safetensors (weights and both Adam moments) with the progress in the header.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import demo_start
import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# T tokens, H hidden, E experts, K experts per token, I intermediate size
EXPERTS_NAME = "sorted_loop"
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Exactly one of ``minutes`` and ``tokens`` limits the run and sets the decay."""

    minutes: float | None
    tokens: int | None
    checkpoint: Path
    start: Path
    workers: int = 2
    sequence: tuple[tuple[float, int], ...] = ((0.0, 128), (0.4, 256), (0.8, 512))  # from when, how long
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    balance: tuple[tuple[float, float], ...] = ((0.0, 0.1), (0.5, 0.02))  # weight of that loss
    seed: int = 0


def sorted_experts(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts' part of an MoE layer, [T, H] and two [T, K] to [T, H]: tokens sorted by expert, a
    matrix product for each. The signature is that of transformers' experts implementations."""
    chosen = index.reshape(-1)  # [T K]
    order = torch.argsort(chosen, stable=True)
    token = order // index.shape[1]
    counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
    parts = torch.split(hidden[token], counts)
    gate_up = torch.cat([x @ w.T for x, w in zip(parts, self.gate_up_proj.unbind(), strict=True)])
    gate, up = gate_up.chunk(2, dim=-1)
    parts = torch.split(functional.silu(gate) * up, counts)
    down = torch.cat([x @ w.T for x, w in zip(parts, self.down_proj.unbind(), strict=True)])
    scaled = down * weights.reshape(-1)[order, None]
    return torch.zeros_like(hidden).index_add(0, token, scaled)


def register_experts() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, sorted_experts)


def build(config: Any) -> Any:
    """A fresh float32 model that uses ``sorted_experts``."""
    from transformers import AutoModelForCausalLM

    register_experts()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=EXPERTS_NAME)
    depth = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():  # residual branches start small, as in GPT-2
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(depth)
    return model


class Loss(torch.nn.Module):
    """Cross-entropy and the load-balancing term of a batch of token ids [B, S+1]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> cross-entropy, balance term (1 when even), share of choices per layer and expert [L, E]."""
        config = self.model.config
        out = self.model.model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
        logits = self.model.lm_head(out.last_hidden_state)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        probabilities = torch.stack([x.softmax(-1) for x in out.router_logits])  # [L, T, E]
        chosen = probabilities.topk(config.num_experts_per_tok).indices.flatten(1)  # [L, T K]
        share = functional.one_hot(chosen, config.num_experts).float().mean(1)  # [L, E]
        if dist.is_initialized():
            dist.all_reduce(share, dist.ReduceOp.SUM)
            share /= dist.get_world_size()
        balance = config.num_experts * (share * probabilities.mean(1)).sum(-1).mean()
        return loss, balance, share


def batch(
    tokens: list[np.ndarray[Any, Any]], recipe: Recipe, step: int, length: int, rank: int
) -> torch.Tensor:
    """This worker's share of step ``step``: windows [domains/workers, length+1], one per domain. A function
    of seed and step alone, so that a resumed run continues as if it had not stopped."""
    rng = np.random.default_rng((recipe.seed, step))
    starts = [int(rng.integers(len(stream) - length - 1)) for stream in tokens]
    mine = list(zip(tokens, starts, strict=True))[rank :: recipe.workers]
    rows = [stream[start : start + length + 1].astype(np.int64) for stream, start in mine]
    return torch.from_numpy(np.stack(rows))


def optimizer_for(model: Any, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; no decay for vectors, and the layers that were fitted beforehand move at a third of the rate."""
    tables = [model.model.embed_tokens.weight, model.lm_head.weight]
    fitted = {id(table) for table in tables}
    matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in fitted]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
        {"params": tables, "weight_decay": 0.0, "scale": 1 / 3},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def save_progress(path: Path, model: Any, optimizer: torch.optim.AdamW, progress: dict[str, float]) -> None:
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"weight.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    partial = path.with_suffix(".partial")
    save_file(state, partial, metadata={"progress": json.dumps(progress)})
    os.replace(partial, path)


def load_progress(path: Path, model: Any, optimizer: torch.optim.AdamW | None = None) -> dict[str, float]:
    """Fill the model (and optimizer) from a checkpoint; -> steps, tokens and seconds so far."""
    with safe_open(path, framework="pt") as file:
        progress: dict[str, float] = json.loads(file.metadata()["progress"])
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.copy_(file.get_tensor(f"weight.{name}"))
            if optimizer is not None:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(progress["steps"])),
                    "exp_avg": file.get_tensor(f"exp_avg.{name}"),
                    "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}"),
                }
    return progress


def rate(recipe: Recipe, done: float) -> float:
    """Learning rate when ``done`` (0..1) of the run is over: linear warm-up, cosine decay to 2 %."""
    if done < recipe.warmup:
        return recipe.learning_rate * max(done / recipe.warmup, 0.02)
    phase = (done - recipe.warmup) / (1 - recipe.warmup)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))


def scheduled(schedule: tuple[tuple[float, Number], ...], done: float) -> Number:
    """The value of the last entry that has begun, of entries (from which share of the run, value)."""
    return [value for start, value in schedule if done >= start][-1]


def worker(rank: int, config: Any, tokens: list[np.ndarray[Any, Any]], recipe: Recipe, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    if recipe.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=recipe.workers)
    model = build(config)
    optimizer = optimizer_for(model, recipe)
    progress = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0}
    if recipe.checkpoint.exists():
        progress = load_progress(recipe.checkpoint, model, optimizer)
    else:
        start = load_file(recipe.start)
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(start["embedding"])
            model.lm_head.weight.copy_(start["head"])
    loss_of: torch.nn.Module = Loss(model)
    if recipe.workers > 1:
        loss_of = DistributedDataParallel(loss_of)
    _loop(rank, model, loss_of, optimizer, tokens, recipe, progress)
    if recipe.workers > 1:
        dist.destroy_process_group()


def _loop(
    rank: int,
    model: Any,
    loss_of: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    tokens: list[np.ndarray[Any, Any]],
    recipe: Recipe,
    progress: dict[str, float],
) -> None:
    began, before, saved = time.monotonic(), dict(progress), time.monotonic()
    recent: list[float] = []
    while True:
        progress["seconds"] = before["seconds"] + time.monotonic() - began
        done = torch.tensor(
            progress["seconds"] / (60 * recipe.minutes)
            if recipe.minutes is not None
            else progress["tokens"] / (recipe.tokens or 1)
        )
        if recipe.workers > 1:
            dist.broadcast(done, 0)  # the clocks differ, the decision must not
        if rank == 0 and (done >= 1 or time.monotonic() - saved > 120):
            save_progress(recipe.checkpoint, model, optimizer, progress)
            saved = time.monotonic()
        if done >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, float(done)) * group["scale"]
        length = scheduled(recipe.sequence, float(done))
        weight = scheduled(recipe.balance, float(done))
        loss, balance, share = loss_of(batch(tokens, recipe, int(progress["steps"]), length, rank))
        optimizer.zero_grad(set_to_none=True)
        (loss + weight * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress["steps"] += 1
        progress["tokens"] += len(tokens) * length
        recent.append(float(loss.detach()))
        if rank == 0 and progress["steps"] % 20 == 0:
            seconds = time.monotonic() - began
            speed = (progress["tokens"] - before["tokens"]) / seconds
            remaining = progress["seconds"] * (1 / max(float(done), 1e-6) - 1)
            print(
                f"step {progress['steps']:6.0f}  tokens {progress['tokens'] / 1e6:6.2f} M  "
                f"loss {np.mean(recent[-20:]):.3f}  balance {float(balance.detach()):.2f}  "
                f"share {float(share.min()):.4f}..{float(share.max()):.3f}  "
                f"{speed:5.0f} tokens/s  {done:4.0%}  {remaining / 60:4.0f} min to go",
                flush=True,
            )


def train(config: Any, tokens: list[np.ndarray[Any, Any]], recipe: Recipe) -> None:
    """Run or resume until the limit; the checkpoint then holds the final state."""
    if (recipe.minutes is None) == (recipe.tokens is None):
        raise ValueError("give either minutes or tokens")
    if len(tokens) % recipe.workers:
        raise ValueError(f"{recipe.workers} workers do not divide {len(tokens)} domains")
    recipe.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if not recipe.start.exists():
        demo_start.fit(tokens, config.vocab_size, config.hidden_size, recipe.start)
    store = recipe.checkpoint.with_suffix(f".store{os.getpid()}")
    arguments = (config, tokens, recipe, str(store.absolute()))
    try:
        if recipe.workers == 1:
            worker(0, *arguments)
        else:
            spawn(worker, arguments, nprocs=recipe.workers)  # type: ignore[no-untyped-call]
    finally:
        store.unlink(missing_ok=True)
