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
    ("decode", lambda run: f"{run['tokens_per_second']:.2f} tokens/s"),
    ("first token (TTFT)", lambda run: _milliseconds(run["ttft_ms"])),
    ("later token (TPOT), p50", lambda run: _milliseconds(run["tpot_ms"]["p50"])),
    ("  p95", lambda run: _milliseconds(run["tpot_ms"]["p95"])),
    ("  p99", lambda run: _milliseconds(run["tpot_ms"]["p99"])),
    ("hit rate in decode", lambda run: f"{run['hit_rate']:.1%}"),
    ("experts read", lambda run: format_size(moved(run))),
    ("  by prefetch: useful", lambda run: format_size(run["bytes"]["useful"])),
    ("  late", lambda run: format_size(run["bytes"]["late"])),
    ("  wasted", lambda run: format_size(run["bytes"]["wasted"])),
    ("stalled", lambda run: _milliseconds(sum(run["stall_ms"].values()))),
    ("experts resident", lambda run: f"{format_size(run['memory_bytes']['experts'])}, ECR {run['ecr']:.2f}"),
    ("peak memory", lambda run: format_size(run["memory_bytes"]["peak"])),
)
"""Label and text of every row; rows in which no run has anything to say are left out."""


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
        cells = [show(run) for run in runs]
        if any(cell != "0 B" for cell in cells):
            table.add_row(name, *cells)
    return table
