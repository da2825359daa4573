"""Compare daop's models with transformers' own, family by family, and write docs/families.md.

    python tests/runtime/family_parity.py            print the table
    python tests/runtime/family_parity.py --write    and write it to docs/families.md

``measure`` is what test_model_families.py asserts about.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from transformers import AutoModelForCausalLM

from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.experts import ExpertsFn
from daop.runtime.model import BuiltModel, build_model
from daop.runtime.reference import reference_experts

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
STEPS = 16
LENGTHS = (13, 9, 5)  # of the prompts; batch 1 is the first, batch 3 all of them, padded on the left


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What was compared. Differences are of logits; ``bf16_ours`` and ``bf16_theirs`` are median distances
    from the float32 logits of the same bf16 weights."""

    family: str
    layout: str
    prefill: float
    decode: float
    greedy_equal: bool
    bf16_ours: float
    bf16_theirs: float
    routers_agree: bool


def load(folder: Path, dtype: torch.dtype | None = None, agrees: list[bool] | None = None) -> BuiltModel:
    """The folder's model on the reference experts. ``agrees`` gets an entry per MoE layer that runs: whether
    ``router_logits`` of what the router saw ranks exactly the chosen experts first."""
    checkpoint = open_checkpoint(folder)
    holder: list[tuple[BuiltModel, ExpertsFn]] = []  # the experts need the model's forms

    def experts(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        built, run = holder[0]
        if agrees is not None:
            seen = built.router_input(layer)
            assert seen is not None
            scores = built.router_logits(layer, seen)
            assert scores is not None
            best = scores.topk(ids.shape[1]).indices
            agrees.append(torch.equal(best.sort().values, ids.sort().values))
        return run(layer, hidden, ids, weights)

    built = build_model(checkpoint, experts, dtype=dtype)
    holder.append((built, reference_experts(checkpoint, built.forms)))
    return built


def load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Token ids and attention mask [batch, max length], padded on the left."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.zeros(batch, max(LENGTHS[:batch]), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS[:batch]):
        ids[row, -length:] = torch.randint(3, tiny_models.VOCABULARY, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def measure(family: str, folder: Path, **overrides: Any) -> Parity:
    """Save a tiny checkpoint of the family in float32 and one in bf16, and compare the two models on each."""
    tiny_models.save_tiny(family, folder / "f32", **overrides)
    agrees: list[bool] = []
    ours = load(folder / "f32", torch.float32, agrees)
    theirs = load_theirs(folder / "f32", torch.float32)
    prefill, decode, equal = 0.0, 0.0, True
    for batch in (1, 3):
        inputs = prompts(batch)
        real = inputs["attention_mask"].bool()
        a, b = (model(**inputs).logits[real] for model in (ours.model, theirs))
        prefill = max(prefill, float((a - b).abs().max()))
        mine, other = (
            model.generate(
                **inputs,
                max_new_tokens=STEPS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for model in (ours.model, theirs)
        )
        equal &= torch.equal(mine.sequences, other.sequences)
        decode = max(
            decode, *(float((x - y).abs().max()) for x, y in zip(mine.logits, other.logits, strict=True))
        )

    tiny_models.save_tiny(family, folder / "bf16", dtype=torch.bfloat16, **overrides)
    inputs = prompts(3)
    real = inputs["attention_mask"].bool()
    truth = load_theirs(folder / "bf16", torch.float32)(**inputs).logits[real]
    mine16 = load(folder / "bf16").model(**inputs).logits[real].float()
    theirs16 = load_theirs(folder / "bf16", torch.bfloat16)(**inputs).logits[real].float()
    return Parity(
        family=family,
        layout=describe_layout(ours.checkpoint),
        prefill=prefill,
        decode=decode,
        greedy_equal=equal,
        bf16_ours=float((mine16 - truth).abs().median()),
        bf16_theirs=float((theirs16 - truth).abs().median()),
        routers_agree=bool(agrees) and all(agrees),
    )


def describe_layout(checkpoint: Checkpoint) -> str:
    """The names of an expert's tensors in the files, numbers as N, and whether one tensor holds them all."""
    names = {re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in checkpoint.expert_tensors}
    names = {re.sub(r"^.*?(layers|blocks)\.N\.", "", name) for name in names}
    stem = next(iter(names))
    while not all(name.startswith(stem) for name in names):
        stem = stem[:-1]
    stem = stem[: stem.rindex(".") + 1]
    leaves = ", ".join(sorted(name.removeprefix(stem).removesuffix(".weight") for name in names))
    kind = "per expert" if ".N." in stem else "fused"
    return f"{kind}: `{stem}` {leaves}"


def table(rows: list[Parity]) -> str:
    heads = ("family", "experts in the files", "prefill", "decode", "greedy tokens", "bf16, daop")
    lines = [
        f"| {' | '.join(heads)} | bf16, transformers |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.family} | {row.layout} | {row.prefill:.1e} | {row.decode:.1e} | "
        f"{'equal' if row.greedy_equal else 'DIFFER'} | {row.bf16_ours:.1e} | {row.bf16_theirs:.1e} |"
        for row in rows
    ]
    return "\n".join(lines)


def document(rows: list[Parity]) -> str:
    return f"""# Model families

Written by `python tests/runtime/family_parity.py --write`; `tests/runtime/test_model_families.py` asserts the
same comparison on every run, and that this table lists the families it covers.

For each family a tiny random checkpoint (3 or 4 layers, hidden size {tiny_models.H}, 6 to 8 experts; norms,
biases and correction biases random too) is saved by transformers and run twice: by transformers alone
(`experts_implementation="eager"`), and by daop with each expert read from its byte ranges in the files.
Prefill and decode: largest difference of the logits in float32, over batch 1 and batch 3 (prompts of
{", ".join(map(str, LENGTHS))} tokens, padded on the left), decode over {STEPS} greedy steps with the KV
cache.
bf16: median distance of the bf16 logits from the float32 logits of the same weights, for daop and for
transformers; daop adds up experts in float32, so either may be the nearer one.
Versions: torch {torch.__version__}, transformers {transformers.__version__}.

{table(rows)}

## Not in the table

Other families whose experts module follows transformers' `use_experts_implementation`, and whose experts
are stored as the model uses them, load and run the same way, but are not compared here. Refused, with an
error that says so:

- weights that are quantised in a way that docs/formats.md does not list (AWQ, GPTQ, GGUF, ...);
- files that transformers transposes or interleaves as it loads them: experts have to be usable as they are
  stored;
- families with experts modules of their own, such as longcat_flash (some experts are the identity) and
  jetmoe;
- vision and audio models that transformers does not have as a causal language model. Of a multimodal
  llama4 checkpoint the language model is loaded.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    parser.add_argument("families", nargs="*", default=sorted(tiny_models.FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are far too small for more
    rows = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(family, Path(folder)))
        print(rows[-1], flush=True)
    if arguments.write:
        DOCUMENT.write_text(document(rows))


if __name__ == "__main__":
    main()
