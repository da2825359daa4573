"""All experts in memory: is decode at least as fast as transformers' own experts implementations?

    python benchmarks/decode_resident.py [MODEL] [--tokens 24] [--repeats 5] [--threads N]

MODEL is a Hugging Face directory; by default a random bf16 qwen3_moe is made in a temporary folder (hidden
1024, 12 layers, 64 experts, top-8, intermediate 512, vocabulary 32000). In every repeat, one after the
other: each of transformers' implementations, daop, and daop's model with experts that do nothing, so that
attention, routers and sampling are left. Medians over all tokens but the first of each answer; ratios within
each repeat. DAOP_NATIVE=0 measures daop without native kernels. Prints a table and, last, a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import daop
from daop.generation import Generation, generate
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.model import build_model
from daop.runtime.native import native_status

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
Run = Callable[[list[int], int], Generation]


def random_model(folder: str) -> Path:
    """A random qwen3_moe of a size at which experts are most of the work."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return Path(folder)


@contextlib.contextmanager
def contenders(path: Path, implementations: tuple[str, ...]) -> Iterator[dict[str, Run]]:
    """Everything that is compared, ready to generate: name -> (prompt, new tokens) -> answer."""
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    nothing: Any = build_model(open_checkpoint(path), lambda layer, hidden, ids, weights: hidden).model

    def transformers(name: str) -> Run:
        def run(prompt: list[int], tokens: int) -> Generation:
            reference.set_experts_implementation(name)
            return generate(reference, None, [prompt], max_new_tokens=tokens)[0]

        return run

    with daop.load(path, policy="static", ecr=1.0) as runtime:
        runs = {name: transformers(name) for name in implementations}
        runs["daop"] = lambda prompt, tokens: runtime.generate([prompt], tokens)[0]
        runs["experts that do nothing"] = lambda prompt, tokens: generate(
            nothing, None, [prompt], max_new_tokens=tokens
        )[0]
        yield runs


def compare(
    runs: dict[str, Run], prompt: list[int], tokens: int, repeats: int, figure: Callable[[Generation], float]
) -> dict[str, list[float]]:
    """Tokens/s of every contender in every repeat; the first round only warms up."""
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            gc.collect()
            value = figure(run(prompt, tokens))
            if repeat:
                figures[name].append(value)
    return figures


def report(figures: dict[str, list[float]], rivals: tuple[str, ...], conditions: dict[str, object]) -> None:
    print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    repeats = range(len(figures["daop"]))
    best = [max(figures[name][i] for name in rivals) for i in repeats]
    for name, values in figures.items():
        ratio = statistics.median(values[i] / best[i] for i in repeats)
        spread = f"({min(values):.1f} .. {max(values):.1f})"
        print(f"{name:26} {statistics.median(values):8.1f} tokens/s {spread:20} {ratio:6.2f} x fastest rival")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratio = statistics.median(figures["daop"][i] / best[i] for i in repeats)
    print(json.dumps({**conditions, "tokens_per_second": medians, "times_fastest_rival": ratio}))


def arguments(doc: str | None, tokens: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def main() -> None:
    options = arguments(__doc__, 24)
    conditions = {"native": native_status()[1] or "none", "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or random_model(folder)
        with contenders(path, IMPLEMENTATIONS) as runs:
            figures = compare(
                runs,
                list(range(100, 132)),
                options.tokens,
                options.repeats,
                lambda answer: 1 / statistics.median(answer.tpot_s),
            )
    report(figures, IMPLEMENTATIONS, {**conditions, "new_tokens": options.tokens, "repeats": options.repeats})


if __name__ == "__main__":
    main()
