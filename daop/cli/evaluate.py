"""``daop evaluate``: how well saved predictors do on a trace, and how far they fell since training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from daop.cli.bars import bars
from daop.cli.inputs import check_file
from daop.cli.output import Output
from daop.cli.train import leaderboard


def evaluate(
    predictors: Annotated[
        str, typer.Argument(help="A folder that `daop train` wrote, one predictor's folder, or a name.")
    ],
    trace: Annotated[Path, typer.Option(help="The trace to score on.")],
    predictor: Annotated[
        str | None, typer.Option(help="Only this one of the folder; also allows module:Class.")
    ] = None,
    train_on: Annotated[
        Path | None,
        typer.Option(help="With a name: the trace to fit it on first (default: most of --trace)."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Score on at most about so many tokens.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of sampling.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
) -> None:
    """Score predictors on a trace they have not seen."""
    out = Output(json)
    check_file("--train-on", train_on)
    from daop.training.report import evaluate_saved

    document = evaluate_saved(
        predictors,
        trace,
        only=predictor,
        train_on=train_on,
        max_tokens=max_tokens,
        seed=seed,
        progress=out.say,
    )
    for table in leaderboard(document):
        out.table(table)
    for name, report in document["predictors"].items():
        if report["kind"] == "next":
            _details(out, name, report)
    for name, drift in document.get("drift", {}).items():
        falls = ", ".join(f"{key} {value:+.3f}" for key, value in drift["figures"].items())
        out.say(f"{name} since training: {falls}")
        if drift.get("worst_layers"):
            worst = ", ".join(f"{layer} ({fall:+.3f})" for layer, fall in drift["worst_layers"])
            out.say(f"  layers that changed most, recall@k: {worst}")
    out.json(document)


def _details(out: Output, name: str, report: dict[str, Any]) -> None:
    """Recall of every layer, and how often what was forecast with a chance came true."""
    recalls = [r for r in report["per_layer"]["recall_at_k"] if r is not None]
    if recalls:
        out.say(f"{name}, recall@k by layer: {bars(recalls)}  {min(recalls):.3f} to {max(recalls):.3f}")
    out.say(f"{name}, reliability (bar: came true, |: said; calibrated where they meet):")
    for row in report["reliability"]:
        length, mark = round(30 * row["observed"]), round(30 * row["forecast"])
        line = ("█" * length).ljust(31)
        line = line[:mark] + "|" + line[mark + 1 :]
        times = f"{row['chances']:.0f} times"
        out.say(f"  said {row['forecast']:.2f}  true {row['observed']:.2f}  {line}  {times}")
