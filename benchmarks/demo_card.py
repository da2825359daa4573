"""The demo model's card: fills the template beside it with what was measured or read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import demo_corpus
from safetensors import safe_open

TEMPLATE = Path(__file__).with_name("demo_card.md")


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table; figures aligned right, column names with blanks for underscores."""
    keys = list(rows[0])
    text = [[str(row[key]) for key in keys] for row in rows]
    head = [key.replace("_", " ") for key in keys]
    widths = [max(len(line[i]) for line in [head, *text]) for i in range(len(keys))]
    number = [not isinstance(rows[0][key], str) for key in keys]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, number, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - 1) + ":" if n else "-" * w for w, n in zip(widths, number, strict=True)]
    return "\n".join([line(head), line(rule), *map(line, text)])


def training(checkpoint: Path) -> dict[str, float]:
    """Steps, tokens and seconds of the run that made the checkpoint."""
    with safe_open(checkpoint, framework="pt") as file:
        progress: dict[str, float] = json.loads(file.metadata()["progress"])
    return progress


def sources(work: Path) -> list[dict[str, Any]]:
    """What was taken from each package, with its version and licence."""
    versions = demo_corpus.fetch(work)
    sizes: dict[tuple[str, str], dict[str, float]] = {}
    for document in demo_corpus.documents(work):
        size = sizes.setdefault((document.domain, document.source), {"train": 0.0, "heldout": 0.0})
        size["heldout" if document.heldout else "train"] += len(document.text) / 1e6
    return [
        {
            "domain": source.domain,
            "package": f"{source.package} {versions[source.package]}",
            "licence": source.licence,
            "training": round(sizes[source.domain, source.package]["train"], 2),
            "held out": round(sizes[source.domain, source.package]["heldout"], 2),
        }
        for source in demo_corpus.SOURCES
    ]


def processor() -> str:
    """This machine's processor, as /proc/cpuinfo has it, and the number of cores."""
    info = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return f"{len(names)} cores of an {names[0]}"


def quoted(sample: dict[str, str]) -> str:
    blocks = [f"````text\n{sample[part].strip()}\n````" for part in ("prompt", "completion")]
    return "Prompt:\n\n{}\n\nCompletion:\n\n{}".format(*blocks)


def card(
    work: Path,
    model: Any,
    report: dict[str, Any],
    samples: list[dict[str, str]],
    prompts: list[dict[str, str]],
) -> str:
    config = model.config
    total = sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
    progress = report["training"]
    return TEMPLATE.read_text("utf-8").format(
        parameters=total / 1e6,
        active=(total - idle - model.model.embed_tokens.weight.numel()) / 1e6,
        layers=config.num_hidden_layers,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        kv_heads=config.num_key_value_heads,
        context=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        cpus=processor(),
        tokens=progress["tokens"] / 1e6,
        steps=int(progress["steps"]),
        minutes=progress["seconds"] / 60,
        sources=table(sources(work)),
        prompt_count=len(prompts),
        loss=table(report["loss"]),
        even=1 / config.num_experts,
        quarter=config.num_experts // 4,
        expert_table=table(report["experts"]),
        samples="\n\n".join(map(quoted, samples)),
    )
