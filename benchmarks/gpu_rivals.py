"""What daop is compared with on a GPU: transformers, everything on it, and with accelerate's offload."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Driven, drive
from transformers import AutoModelForCausalLM

from daop.runtime.cuda.streams import Gpu

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


def run_whole(
    path: Path, device: torch.device, tokens: list[int], steps: int, synchronize: Callable[[], None]
) -> tuple[dict[str, Any], Driven]:
    """transformers' own experts implementations, the whole model on the device; and the fastest one's
    logits."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
    found: dict[str, Any] = {}
    truth: Driven | None = None
    for name in IMPLEMENTATIONS:
        model.set_experts_implementation(name)
        try:
            drive(model, tokens[: len(tokens) - steps + 2], 2, synchronize)  # warms up
            driven = drive(model, tokens, steps, synchronize)
        except (RuntimeError, NotImplementedError) as error:  # one that this GPU or torch does not have
            found[name] = {"decode": 0.0, "prefill": 0.0, "failed": str(error)[:200]}
            continue
        found[name] = {
            "decode": driven.tokens_per_second,
            "prefill": driven.prefill_tokens_per_second,
        }
        if truth is None or name == "eager":
            truth = driven
    del model
    gc.collect()
    if truth is None:
        raise RuntimeError(f"none of transformers' implementations runs: {found}")
    return {"whole": found}, truth


def run_offload(
    path: Path, gpu: Gpu, tokens: list[int], steps: int, budget: int, folder: Path
) -> dict[str, Any]:
    """accelerate's CPU offload with ``budget`` bytes on the device, for a few tokens: it is slow."""
    if importlib.util.find_spec("accelerate") is None:
        return {"skipped": "accelerate is not installed"}
    if gpu.device.type != "cuda":
        return {"skipped": "needs a GPU"}
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={0: budget, "cpu": 1 << 40},
        offload_folder=str(folder / "offload"),
    ).eval()
    short = tokens[: len(tokens) - 48 + steps] if len(tokens) > 64 else tokens
    driven = drive(model, short, steps, gpu.synchronize)
    del model
    gc.collect()
    return {"decode": driven.tokens_per_second, "prefill": driven.prefill_tokens_per_second, "steps": steps}
