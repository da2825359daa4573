"""The report of ``daop run``: one page about one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from daop.report import charts
from daop.report.about import facts
from daop.report.compare_page import bars, geometry_facts, hit_part
from daop.report.page import Grid, Part, Section, render
from daop.report.tables import ROWS
from daop.report.traffic_parts import forecast_part, residency_part, traffic_section

if TYPE_CHECKING:
    from daop.runtime.history import History


def run_page(figures: Mapping[str, Any], history: History, about: dict[str, Any], model: str) -> str:
    """HTML. ``figures`` as ``run_figures`` gives them."""
    policy = str(figures["policy"])
    color = charts.colors([policy])
    rows = [[name.strip(), show(dict(figures))] for name, show in ROWS]
    stalls, (moves, unit) = charts.stall_parts([figures]), charts.byte_parts([figures])
    parts: list[Part] = [
        bars("stall", "Stalls by cause", [policy], stalls, "ms a token", charts.STALL_CAPTION),
        bars("bytes", "Bytes moved", [policy], moves, unit, charts.BYTES_CAPTION),
        hit_part("hits", [figures], color),
    ]
    if history.forecasts.sum():
        parts.append(forecast_part("forecast", {policy: history}, color))
    parts.append(residency_part("map", policy, history))
    prefetches = ", ".join(f"{count:,} {fate}" for fate, count in figures["prefetches"].items())
    lead = (
        f"{figures['tokens']['generated']:,} tokens at {figures['tokens_per_second']:.1f} tokens/s with "
        f"policy {policy}. {figures['ecr']:.0%} of the experts fit in fast memory, and "
        f"{figures['hit_rate']:.1%} of those asked for in decode were there."
    )
    more = [("model", model), *geometry_facts(history.geometry), ("prefetches", prefetches)]
    sections = [
        Section(key="what", title="What was run", facts=facts(about, more)),
        Section(
            key="result", title="Result", table=Grid(title="The run", head=("figure", policy), rows=rows)
        ),
        Section(key="placement", title="Placement", parts=parts),
        traffic_section(history),
    ]
    return render("A run of " + model, lead, sections)
