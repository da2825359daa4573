"""Writes the README's table of measured figures from the outputs in ``benchmarks/results/``.

    python benchmarks/readme_figures.py [--check]

Every row comes from one output; a row whose output is not there is left out. The table stands between two
marks in README.md and is replaced there; ``--check`` changes nothing and fails if it has to be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: written by benchmarks/readme_figures.py -->", "<!-- end of figures -->"
HEAD = (
    "| what | daop | beside it | command (`python benchmarks/...`) |",
    "| --- | --- | --- | --- |",
)
Row = tuple[str, str, str, str]


def read(name: str) -> Any:
    """A JSON file, or the last line of JSON in a text; None if there is no such file or line."""
    path = RESULTS / name
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8").strip()
    if path.suffix == ".json":
        return json.loads(text)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def resident(found: Any) -> Row:
    speeds = dict(found["tokens_per_second"])
    ours = speeds.pop("daop")
    rivals = sorted(((v, k) for k, v in speeds.items() if "nothing" not in k), reverse=True)
    beside = ", ".join(f"{name} {speed:.1f}" for speed, name in rivals)
    what = "decode, all experts resident (12 layers x 64 experts, hidden 1024, top-8)"
    return what, f"{ours:.1f} tokens/s", f"transformers: {beside}", "`decode_resident.py`"


def llama_model(found: Any) -> Row:
    def speeds(side: str) -> str:
        return ", ".join(f"{row['format']} {row[f'{side}_tokens_per_s']:.1f}" for row in found["results"])

    what = "the same model and equal weights on llama.cpp; `docs/speed.md` says what separates the two"
    return what, f"{speeds('daop')} tokens/s", f"llama.cpp: {speeds('llama')}", "`llama_cpp_model.py`"


def llama_experts(found: Any) -> Row:
    said: dict[str, list[str]] = {}
    for row in found["results"]:
        said.setdefault(row["format"], []).append(f"{row['times_ggml']:.2f}")
    ours = "; ".join(f"{name} {', '.join(ratios)} x" for name, ratios in said.items())
    shape = found["results"][0]["shape"].replace("x", " x ").replace(":", ", ").replace("/", " of ")
    what = f"experts alone ({shape}), 1, 4 and 16 tokens each, equal weights"
    return (
        what,
        ours,
        "ggml's speed in the same run (MXFP4: activations rounded to 8 bits, daop's to 22)",
        ("`llama_cpp_experts.py`"),
    )


def disk(found: Any) -> Row:
    said = []
    for name, row in sorted(found["rows"].items()):
        low, high = row["spread"]
        said.append(f"`{name}` {row['share_of_disk_bound']:.0%} ({low:.0%} to {high:.0%})")
    what = f"experts on disk, ECR {found['ecr']:g}, direct reads: share of the disk's bandwidth for misses"
    return what, ", ".join(said), "the same reads, nothing computed", "`disk_share.py`"


def measured(found: Any) -> Row:
    rows = sorted(found["rows"], key=lambda row: -float(row["tokens_per_second"]))
    texts = {
        row["policy"]: f"`{row['policy']}` {row['tokens_per_second']:.1f} tokens/s "
        f"({row['spread'][0]:.1f} to {row['spread'][1]:.1f}), hits {row['hit_rate']:.0%}"
        for row in rows
    }
    ours = texts.pop("adaptive")
    where = f"the demo's model widened to 2.2 GiB, ECR {rows[0]['ecr']:g}, direct reads"
    what = f"{where}, held-out prompts, equal tokens"
    return what, ours, ", ".join(texts.values()), "`daop compare --model`"


def gpt_oss(found: Any) -> Row:
    what = "simulated: gpt-oss-20b's routing on four consumer GPUs, ECR 0.125 to 0.375, geometric mean"
    return (
        what,
        f"`adaptive` on `visits` {found['geomean_to_best_static']:.2f} x the best static placement",
        f"{found['geomean_to_balanced']:.2f} x `balanced`; `docs/policies.md` says what bounds it",
        "`compare_gpt_oss.py`",
    )


def agreement(found: Any) -> Row:
    ratios = {f"`{row['policy']}` at ECR {row['ecr']:g}": float(row["ratio"]) for row in found["rows"]}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    equal = sum(bool(row["hits_equal"]) for row in found["rows"])
    return (
        f"simulator against executor, same machine and traffic, {len(ratios)} policies and budgets",
        f"simulated speed {min(ratios.values()):.2f} to {max(ratios.values()):.2f} x the measured one",
        f"worst: {worst}; hits equal to the last one in {equal}",
        "`agreement.py`",
    )


def recorder(found: Any) -> Row:
    row = found["rows"][0]
    low, high = row["interval"]
    return (
        "what `--timeline` costs decode, all experts resident",
        f"{row['ratio'] - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})",
        f"the same run, not recorded ({row['ms_per_token']:.1f} ms a token)",
        "`timeline_cost.py`",
    )


SOURCES: tuple[tuple[str, Callable[[Any], Row]], ...] = (
    ("decode_resident.txt", resident),
    ("llama_cpp_model.txt", llama_model),
    ("llama_cpp_experts.txt", llama_experts),
    ("disk_share.txt", disk),
    ("measured_host.json", measured),
    ("compare_gpt_oss_visits.txt", gpt_oss),
    ("agreement.txt", agreement),
    ("timeline_cost.txt", recorder),
)


def block() -> str:
    """The table between the marks."""
    rows = [make(found) for name, make in SOURCES if (found := read(name)) is not None]
    return "\n".join((BEGIN, *HEAD, *(f"| {' | '.join(row)} |" for row in rows), END))


def replaced(text: str) -> str:
    """The README with the table of today's outputs."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise SystemExit(f"README.md has no lines {BEGIN!r} and {END!r} to write between")
    return before + block() + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = replaced(text)
    if parser.parse_args().check:
        sys.exit(0 if new == text else "README.md is not what benchmarks/results says")
    readme.write_text(new, encoding="utf-8")
    print(block())
    print(json.dumps({"benchmark": "readme_figures", "changed": new != text}))


if __name__ == "__main__":
    main()
