"""``daop train``: fit predictors on traces and say which one to use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from daop.cli.output import Output


def train(
    traces: Annotated[list[Path], typer.Argument(help="Traces to learn from, of one model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for predictors and leaderboard.")],
    predictor: Annotated[str, typer.Option(help="A predictor's name, module:Class, or all.")] = "all",
    target: Annotated[
        str | None, typer.Option(help="next: coming layers; reuse: what to keep. Default: both.")
    ] = None,
    test_share: Annotated[float, typer.Option(help="Share of the sequences to hold out.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of every fit.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Fit on at most about so many tokens.")] = 200_000,
    update: Annotated[
        Path | None, typer.Option(help="Folder of predictors that go on learning from these traces.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the leaderboard as JSON; - for standard output.")
    ] = None,
) -> None:
    """Train activation predictors on traces, and rank them on held-out sequences."""
    from daop.training.train import Options
    from daop.training.train import train as run

    out = Output(json)
    options = Options(
        predictor=predictor, target=target, test_share=test_share, seed=seed, max_tokens=max_tokens
    )
    with _log_lines(out):
        document = run(traces, output, options, update=update, progress=out.say)
    for table in leaderboard(document):
        out.table(table)
    _save_profile(traces, output, options.test_share, seed, out)
    out.say(f"written to {output}")
    out.json(document)


def _save_profile(traces: list[Path], folder: Path, test_share: float, seed: int, out: Output) -> None:
    """What policies learn from the same sequences that the predictors were fitted on (``--profile``)."""
    from daop.comparison import fitted
    from daop.training.dataset import read_traces
    from daop.training.trace import CountsTrace

    trace = read_traces(traces)
    if isinstance(trace, CountsTrace):
        return
    out.say("learning a profile for placement policies (daop run --profile)")
    trace = trace.grouped()
    profile, _ = fitted(trace, trace.geometry, seed=seed, share=test_share)
    correction = _input_correction(traces)
    if correction:
        out.say("with what the next layer sees, told from this one's input (for the policy bounded)")
        profile = replace(profile, arrays=(profile.arrays or {}) | correction)
    profile.save(folder)


def _input_correction(traces: list[Path]) -> dict[str, Any]:
    """Fitted on the traces that have features beside them; empty if none has."""
    import numpy as np

    from daop.runtime.input_correction import fit
    from daop.training.features import read_features
    from daop.training.parquet import read_trace

    found = [read_features(path, read_trace(path, columns=()).grouped()) for path in traces]
    known = [hidden for hidden in found if hidden is not None and len(hidden.values)]
    if not known:
        return {}
    return dict(fit(np.concatenate([hidden.values for hidden in known]), known[0].gates.norms))


class _log_lines:
    """Progress of the fits, which they log, as lines for the person who waits."""

    def __init__(self, out: Output) -> None:
        import logging

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                out.say(f"  {record.getMessage()}")

        self._loggers = [logging.getLogger(n) for n in ("daop.predictors", "daop.training")]
        self._handler = Handler(logging.INFO)

    def __enter__(self) -> None:
        import logging

        for logger in self._loggers:
            logger.addHandler(self._handler)
            logger.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self._handler)


def leaderboard(document: dict[str, Any]) -> list[Table]:
    """Tables of a leaderboard document, best predictor first; they fit a terminal of 80 columns."""
    found = document["predictors"]
    following = {n: r for n, r in found.items() if r["kind"] == "next" and "recall_at_k" in r}
    waiting = {n: r for n, r in found.items() if r["kind"] == "reuse" and "pools" in r}
    tables = []
    if following:
        tables.append(_following(following, document["geometry"]["top_k"]))
    if waiting:
        tables.append(_waiting(waiting))
    return tables


def _table(title: str, *columns: str) -> Table:
    """No lines, numbers to the right; what is too long for its column is folded, never cut."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("predictor", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _following(reports: dict[str, Any], k: int) -> Table:
    title = f"Next layer, held-out sequences (k = {k}; all figures, defined: leaderboard.json)"
    table = _table(title, "recall@k", "95 %", "whole set", "Brier", "4 ahead", "µs", "MB")
    for name, r in sorted(reports.items(), key=lambda item: -(item[1]["recall_at_k"] or 0)):
        ahead = {h: v["recall_at_k"] for h, v in r["by_horizon"].items()}
        table.add_row(
            name,
            _share(r["recall_at_k"]),
            _range(r["recall_at_k_interval"]),
            _share(r["whole_set"]),
            _share(r["brier"]),
            _share(ahead.get("4")),
            _cost(r["microseconds_per_forecast"]),
            f"{r['model_bytes'] / 1e6:.1f}",
        )
    return table


def _waiting(reports: dict[str, Any]) -> Table:
    pools = next(iter(reports.values()))["pools"]
    title = "Reuse as victim rule, one pool, held-out sequences: hit rate (gap to optimum closed)"
    table = _table(title, *(f"ECR {float(ecr):.1%}" for ecr in pools), "wait error", "µs", "MB")
    for name, r in sorted(reports.items(), key=lambda item: -item[1]["hit_rate"]):
        cells = []
        for ecr in pools:
            pool = r["pools"][ecr]
            closed = "-" if pool["gap_closed"] is None else f"{pool['gap_closed']:.0%}"
            cells.append(f"{pool['hit_rate']:.3f} ({closed})")
        error = "-" if r["wait_error"] is None else f"{r['wait_error']:.2f}"
        cost = _cost(r["microseconds_per_forecast"])
        table.add_row(name, *cells, error, cost, f"{r['model_bytes'] / 1e6:.1f}")
    for rule in ("lru", "lfu", "optimum"):
        table.add_row(f"({rule})", *(f"{pools[e][rule]:.3f}" for e in pools), "", "", "")
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _range(interval: list[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}"


def _cost(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
