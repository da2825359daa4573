"""Rows of a comparison of policies: tables for people, CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.table import Table

from daop.report.tables import moved

FIRST = (
    *("policy", "hardware", "ecr", "batch", "tokens_per_second", "hit_rate", "ratio_to_best_static"),
    *("ratio_to_optimum", "ttft_ms"),
)
"""Columns of the CSV that stand before all others."""

LEGEND = "x static, x opt.: of the best static, of the optimum; stall: ms a token; GB: moved"


def ranking(rows: list[dict[str, Any]]) -> Iterator[Table]:
    """A table for each machine and budget, one line per policy; fits a terminal of 80 columns."""
    groups = [list(group) for _, group in groupby(rows, lambda row: (row["hardware"], row["ecr"]))]
    width = max((len(str(row["policy"])) for row in rows), default=0)
    for group in groups:
        title = f"{group[0]['hardware']}, ECR {group[0]['ecr']:g}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("policy", min_width=min(width, 24), overflow="fold")
        for name in ("tok/s", "x static", "x opt.", "hits", "stall", "GB"):
            table.add_column(name, justify="right", no_wrap=True, min_width=7)
        for row in group:
            tokens = max(1, int(row["tokens"]))
            table.add_row(
                str(row["policy"]),
                f"{row['tokens_per_second']:.1f}",
                _ratio(row["ratio_to_best_static"]),
                _ratio(row["ratio_to_optimum"]),
                f"{row['hit_rate']:.3f}",
                f"{sum(row['stall_ms'].values()) / tokens:.2f}",
                f"{moved(row) / 1e9:.1f}",
            )
        yield table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """One line per row; nested figures get dotted names."""
    flat = [_flatten(row) for row in rows]
    names = list(dict.fromkeys([*FIRST, *(name for row in flat for name in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            out.update(_flatten(value, f"{prefix}{name}."))
        elif not isinstance(value, list):
            out[prefix + name] = value
    return out
