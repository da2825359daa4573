"""The report of ``daop compare``: one page about all machines, budgets and policies of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from daop.core import Geometry
from daop.report import charts
from daop.report.about import facts
from daop.report.page import Grid, Part, Section, render
from daop.report.ranking import footnotes
from daop.report.svg import figure
from daop.report.tables import moved
from daop.report.traffic_parts import forecast_part, residency_part, traffic_section
from daop.units import format_size

if TYPE_CHECKING:
    from daop.runtime.history import History

Row = Mapping[str, Any]
Histories = Mapping[tuple[str, float, str], "History"]
"""By machine, ECR and policy."""

MAPS = 4
"""Policies whose residency is drawn, of each machine and budget: the fastest, and the best static one."""


def compare_page(document: Mapping[str, Any], geometry: Geometry | None, histories: Histories) -> str:
    """HTML. ``document`` is what ``daop compare --json`` writes; ``histories`` may lack any."""
    rows: Sequence[Row] = document["rows"]
    color = charts.colors([row["policy"] for row in rows])
    simulated = bool(document["simulated"])
    sections = [
        Section(key="what", title="What was run", facts=_facts(document, geometry)),
        Section(key="result", title="Result", table=_result(rows)),
        Section(
            key="speed",
            title="Speed by policy and budget",
            text="The dotted line is the best static placement at the same budget; the optimum knows the "
            "future and bounds what any policy could reach.",
            parts=list(_speeds(rows, color)),
        ),
        *_quality(rows),
    ]
    if histories:
        sections.append(traffic_section(next(iter(histories.values()))))
    for number, group in enumerate(_groups(rows)):
        sections.append(_setting(number, group, color, histories))
    title = "Comparison of expert placement: " + ("simulated" if simulated else "measured")
    return render(title, verdict(rows), sections)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one machine, number format and budget together, in their order."""
    return [list(group) for _, group in groupby(rows, lambda row: (_machine(row), row["ecr"]))]


def _machine(row: Row) -> str:
    """The machine, and the format of the experts where several were compared."""
    return str(row["hardware"]) + (f", {row['format']}" if row.get("format") else "")


def verdict(rows: Sequence[Row]) -> str:
    """The result in a sentence per machine and budget."""
    said = []
    for group in _groups(rows):
        if not (real := _real(group)):
            continue
        best = max(real, key=_speed)
        place = f"{_machine(best)}, ECR {best['ecr']:g}"
        ratio, bound = best.get("ratio_to_best_static"), best.get("ratio_to_optimum")
        more = [] if ratio is None else [f"{ratio:.2f} times the best static placement"]
        more += [] if bound is None else [f"{bound:.2f} of the optimum"]
        changed = "" if best.get("exact", True) else ", and it changes the model's output"
        also = f" ({', '.join(more)})" if more else ""
        speed = f"{best['tokens_per_second']:.1f} tokens/s"
        said.append(f"{place}: {best['policy']} is fastest at {speed}{also}{changed}.")
    return " ".join(said[:6]) + (" More in the table." if len(said) > 6 else "")


def _facts(document: Mapping[str, Any], geometry: Geometry | None) -> list[tuple[str, str]]:
    more: list[tuple[str, str]] = []
    if document["simulated"]:
        for name, machine in document["hardware"].items():
            derived = (
                f"; derived, not measured: {', '.join(machine['derived'])}" if machine["derived"] else ""
            )
            more.append(("simulated machine", f"{name}: {machine['about']}{derived}"))
        more += [("costs of formats", line) for line in footnotes(document.get("format_costs", []))]
        more.append(("policies learnt from", document["learnt_from"] or "nothing"))
    more += [(name, str(value)) for name, value in document.get("subject", {}).items() if value]
    if geometry is not None:
        more += geometry_facts(geometry)
    return facts(document["about"], more)


def geometry_facts(geometry: Geometry) -> list[tuple[str, str]]:
    counts = sorted(set(geometry.experts))
    experts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [
        ("model", f"{geometry.layers} MoE layers of {experts} experts, top-{geometry.top_k}"),
        ("model's fingerprint", geometry.fingerprint or "not known"),
        ("one expert", f"{max(geometry.expert_bytes) / 1e6:.2f} MB as stored"),
    ]


def _result(rows: Sequence[Row]) -> Grid:
    head = (
        *(
            "policy",
            "machine",
            "ECR",
            "tokens/s",
            "x best static",
            "x optimum",
            "hit rate",
            "stall, ms/token",
        ),
        *("moved", "useful", "late", "wasted", "output"),
    )
    best = {id(max(real, key=_speed)) for group in _groups(rows) if (real := _real(group))}
    marked = frozenset(number for number, row in enumerate(rows) if id(row) in best)
    title = "Every run; the fastest that can be run is in bold"
    return Grid(title=title, head=head, rows=[_cells(row) for row in rows], marked=marked)


def _real(rows: Sequence[Row]) -> list[Row]:
    """Without the bound that knows the future."""
    return [row for row in rows if row["policy"] != "optimum"]


def _speed(row: Row) -> float:
    return float(row["tokens_per_second"])


def _cells(row: Row) -> list[str]:
    spread = row.get("spread")
    speed = f"{row['tokens_per_second']:.1f}" + (f" ({spread[0]:.1f} to {spread[1]:.1f})" if spread else "")
    return [
        str(row["policy"]),
        _machine(row),
        f"{row['ecr']:g}",
        speed,
        *(
            "-" if row.get(name) is None else f"{row[name]:.2f}"
            for name in ("ratio_to_best_static", "ratio_to_optimum")
        ),
        f"{row['hit_rate']:.3f}",
        f"{sum(row['stall_ms'].values()) / max(1, charts.tokens_of(row)):.2f}",
        format_size(moved(dict(row))),
        *(format_size(int(row["bytes"][fate])) for fate in ("useful", "late", "wasted")),
        "exact" if row.get("exact", True) else "changed",
    ]


def _speeds(rows: Sequence[Row], color: Mapping[str, str]) -> Iterator[Part]:
    for number, machine in enumerate(dict.fromkeys(map(_machine, rows))):
        mine = [row for row in rows if _machine(row) == machine]
        key = f"speed-{number}"
        alt = f"Line chart: tokens per second by ECR on {machine}, a line per policy."
        yield Part(
            key=key,
            title=machine,
            svg=figure(key, alt, lambda ax, mine=mine: charts.speed(ax, mine, color), 3.4),  # type: ignore[misc]
            caption="Decode speed. Bands: slowest to fastest repeat."
            if "spread" in mine[0]
            else "Decode speed.",
        )


def _quality(rows: Sequence[Row]) -> list[Section]:
    scored = [row for row in rows if row.get("quality")]
    if not scored:
        return []
    names = [name for name, value in scored[0]["quality"].items() if isinstance(value, Mapping)]
    grid = Grid(
        title="Against the exact run of the same text",
        head=("policy", "ECR", *(name.replace("_", " ") for name in names)),
        rows=[
            [str(row["policy"]), f"{row['ecr']:g}", *(_estimate(row["quality"][name]) for name in names)]
            for row in scored
        ],
    )
    text = "What the approximate policies change in the model's output, with 95 % intervals."
    return [Section(key="quality", title="Quality", text=text, table=grid)]


def _estimate(value: Mapping[str, Any]) -> str:
    if value.get("low") is None:
        return f"{value['value']:.4g}"
    return f"{value['value']:.4g} [{value['low']:.4g}, {value['high']:.4g}]"


def _setting(number: int, rows: Sequence[Row], color: Mapping[str, str], histories: Histories) -> Section:
    machine, share = str(rows[0]["hardware"]), float(rows[0]["ecr"])
    if rows[0].get("format"):
        histories = {}  # they are kept for one format only
    names = [str(row["policy"]) for row in rows]
    stalls, (moves, unit) = charts.stall_parts(rows), charts.byte_parts(rows)
    parts = [
        bars(f"stall-{number}", "Stalls by cause", names, stalls, "ms a token", charts.STALL_CAPTION),
        bars(f"bytes-{number}", "Bytes moved", names, moves, unit, charts.BYTES_CAPTION),
        hit_part(f"hits-{number}", rows, color),
    ]
    watched = {name: histories[machine, share, name] for name in names if (machine, share, name) in histories}
    judged = {name: history for name, history in watched.items() if history.forecasts.sum()}
    if judged:
        parts.append(forecast_part(f"forecast-{number}", judged, color))
    drawn = _drawn(rows)
    for place, name in enumerate(drawn):
        if name in watched:
            parts.append(residency_part(f"map-{number}-{place}", name, watched[name]))
    return Section(key=f"at-{number}", title=f"{_machine(rows[0])}, ECR {share:g}", parts=parts)


def _drawn(rows: Sequence[Row]) -> list[str]:
    """The fastest policies, the best static one among them."""
    names = [str(row["policy"]) for row in sorted(_real(rows), key=_speed, reverse=True)]
    static = [name for name in names if name.startswith("static")][:1]
    return list(dict.fromkeys([*[n for n in names if n not in static][: MAPS - 1], *static]))


def bars(
    key: str, title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str, caption: str
) -> Part:
    alt = f"Stacked bars, one per policy: {title.lower()} in {unit}. The numbers are in the table below."
    rows = [[name, *(f"{parts[part][n]:.3f}" for part in parts)] for n, name in enumerate(names)]
    return Part(
        key=key,
        title=title,
        svg=figure(key, alt, lambda ax: charts.stacked(ax, names, parts, unit), 1.1 + 0.26 * len(names)),
        caption=caption,
        table=Grid(title=f"{title}, {unit}", head=("policy", *parts), rows=rows),
    )


def hit_part(key: str, rows: Sequence[Row], color: Mapping[str, str]) -> Part:
    layers = len(rows[0]["hit_rate_by_layer"])
    cells = [[str(row["policy"]), *(f"{rate:.3f}" for rate in row["hit_rate_by_layer"])] for row in rows]
    return Part(
        key=key,
        title="Hit rate per layer",
        svg=figure(
            key,
            "Line chart: hit rate by MoE layer, a line per policy.",
            lambda ax: charts.hit_rates(ax, rows, color),
        ),
        caption="Share of the experts asked for that were readable in fast memory when the router chose.",
        table=Grid(title="Hit rate by layer", head=("policy", *map(str, range(layers))), rows=cells),
    )
