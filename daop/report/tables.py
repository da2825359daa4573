"""Tables of runs: one run, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from daop.units import format_size

Figures = dict[str, Any]


def _milliseconds(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 10_000 else f"{value:.1f} ms"


ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("tokens/s (decode)", lambda run: f"{run['tokens_per_second']:.2f}"),
    ("time to first token", lambda run: _milliseconds(run["ttft_ms"])),
    (
        "time per token  p50 / p95 / p99",
        lambda run: " / ".join(f"{run['tpot_ms'][p]:.1f}" for p in ("p50", "p95", "p99")) + " ms",
    ),
    ("hit rate (decode)", lambda run: f"{run['hit_rate']:.1%}"),
    ("read from behind fast memory", lambda run: format_size(moved(run))),
    (
        "  on demand / useful / late / wasted",
        lambda run: " / ".join(
            format_size(run["bytes"][kind]) for kind in ("demand", "useful", "late", "wasted")
        ),
    ),
    ("stall", lambda run: _milliseconds(sum(run["stall_ms"].values()))),
    ("resident experts", lambda run: f"{format_size(run['memory_bytes']['experts'])} (ECR {run['ecr']:.2f})"),
    ("peak memory of the process", lambda run: format_size(run["memory_bytes"]["peak"])),
)


def moved(run: Figures) -> int:
    """Bytes of experts read while the run went on, for whatever reason."""
    counts = run["bytes"]
    if "read" in counts:
        return int(counts["read"])
    return sum(int(counts[kind]) for kind in ("demand", "useful", "late", "wasted"))


def run_table(runs: Sequence[Figures], title: str | None = None) -> Table:
    """A column for each run, headed by its policy."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run["policy"], justify="right")
    for name, show in ROWS:
        table.add_row(name, *(show(run) for run in runs))
    return table
