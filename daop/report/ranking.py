"""Rows of a comparison of policies: tables for people, CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
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
                marked(row),
                f"{row['tokens_per_second']:.1f}",
                _ratio(row["ratio_to_best_static"]),
                _ratio(row["ratio_to_optimum"]),
                f"{row['hit_rate']:.3f}",
                f"{sum(row['stall_ms'].values()) / tokens:.2f}",
                f"{moved(row) / 1e9:.1f}",
            )
        yield table


BEATEN = 1.02  # a policy may be a little ahead of the optimum, which knows routing but not the clock
KINDS = {"measured": "", "assumed": " *", "unknown": " ?"}


def formats_table(rows: list[dict[str, Any]]) -> Table:
    """A line for each format on each machine and memory: its fastest policy that can be run."""
    table = Table(
        title="formats in the same memory (its ECR in the first format), the fastest policy of each",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column("machine", overflow="fold")
    table.add_column("format", no_wrap=True)
    for name in ("ECR", "fits", "MB/expert", "tok/s", "x first"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    first: dict[tuple[str, float], float] = {}
    for best in best_by_format(rows):
        place = best["hardware"], best["memory_ecr"]
        first.setdefault(place, best["tokens_per_second"])
        table.add_row(
            str(best["hardware"]),
            str(best["format"]) + KINDS.get(best.get("costs", "measured"), ""),
            f"{best['memory_ecr']:g}",
            f"{best['ecr']:.3g}",
            f"{best['expert_bytes'] / 1e6:.2f}",
            f"{best['tokens_per_second']:.1f}",
            f"{best['tokens_per_second'] / first[place]:.2f}",
            marked(best),
        )
    return table


def best_by_format(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest policy of every machine, memory and format but the optimum; formats side by side."""
    best: dict[tuple[str, float, str], dict[str, Any]] = {}
    for row in rows:
        key = row["hardware"], row["memory_ecr"], row["format"]
        known = best.get(key)
        if row["policy"] != "optimum" and (
            known is None or row["tokens_per_second"] > known["tokens_per_second"]
        ):
            best[key] = row
    places = list(dict.fromkeys((machine, memory) for machine, memory, _ in best))
    return [row for place in places for key, row in best.items() if key[:2] == place]


def footnotes(costs: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """What the formats' costs of computing rest on, a line for each machine and reason; nothing of what was
    measured."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for cost in costs:
        if cost["kind"] != "measured":
            key = cost["machine"], cost["kind"], cost["why"]
            said.setdefault(key, []).append(f"{cost['format']} {cost['text']}")
    for (machine, kind, why), formats in said.items():
        yield f"{KINDS[kind].strip()} computing on {machine} is {kind}: {'; '.join(formats)}. {why}"


def beyond_optimum(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the optimum is no bound, why not: it keeps what will be wanted, and never computes a resident
    expert on the host, though that may be faster."""
    beaten = [row for row in rows if (row.get("ratio_to_optimum") or 0) > BEATEN]
    for machine, name in dict.fromkeys((row["hardware"], row.get("format")) for row in beaten):
        where = machine if name is None else f"{machine} in {name}"
        yield (
            f"x opt. above 1 on {where}: computing a resident expert takes longer than leaving it where it "
            "lies, and the optimum keeps all it can"
        )


def marked(row: dict[str, Any]) -> str:
    """A policy's name, with a mark if its output is approximate."""
    return str(row["policy"]) if row.get("exact", True) else f"{row['policy']} ~"


QUALITY_LEGEND = (
    "~: the output is approximate. KL: of the next token from the exact run's, nats, [95 %]; p99: its 99th "
    "percentile; changed: greedy tokens; calls: approximated expert calls; ppl: perplexity of exact run's"
)


def quality_table(rows: list[dict[str, Any]]) -> Table | None:
    """Quality beside speed, a line for each row that is not exact; None if all are."""
    chosen = [row for row in rows if not row.get("exact", True)]
    if not chosen:
        return None
    table = Table(
        title="not exact", title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold"
    )
    table.add_column("policy", overflow="fold")
    for name in ("ECR", "tok/s", "KL", "p99", "changed", "calls", "ppl"):
        table.add_column(name, justify="right")
    for row in chosen:
        table.add_row(marked(row), f"{row['ecr']:g}", f"{row['tokens_per_second']:.1f}", *_quality_cells(row))
    return table


def _quality_cells(row: dict[str, Any]) -> list[str]:
    quality, counts = row.get("quality"), row.get("approximate") or {}
    if quality is None:  # no model at hand: only the simulator's count of calls is known
        calls = counts["approximated"] / counts["calls"] if counts.get("calls") else None
        return ["-", "-", "-", "-" if calls is None else f"{calls:.1%}", "-"]
    kl = quality["mean_kl"]
    ends = "" if kl["low"] is None else f" [{kl['low']:.1e}, {kl['high']:.1e}]"
    change = quality["perplexity"]["value"] / quality["perplexity_reference"]["value"]
    return [
        f"{kl['value']:.1e}{ends}",
        f"{quality['p99_kl']['value']:.3f}",
        f"{quality['changed_tokens']['value']:.1%}",
        f"{quality['approximated']['value']:.1%}",
        f"x{change:.3f}",
    ]


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
