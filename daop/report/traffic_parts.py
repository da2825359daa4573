"""Parts that are drawn from a ``History``: residency, use and reuse of experts, forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from daop.report import charts
from daop.report.page import Grid, Part, Section
from daop.report.svg import figure

if TYPE_CHECKING:
    from daop.runtime.history import History

HOT = 20
TENTHS = 10


def traffic_section(history: History) -> Section:
    """What the traffic itself is like, whatever the policy."""
    return Section(key="traffic", title="Traffic", parts=[_use_part(history), _reuse_part(history)])


def residency_part(key: str, policy: str, history: History) -> Part:
    """The heat map of one run."""
    samples, total = history.resident.shape
    notes = [f"sampled: every {history.stride} forward passes"] if history.stride > 1 else []
    notes += [f"{total} experts averaged to {charts.ROWS} rows"] if total > charts.ROWS else []
    on = float(np.mean(history.prefetching)) if samples else 0.0
    prefetch = "never" if on == 0 else "always" if on == 1 else f"in {on:.0%} of the samples"
    first, last = history.resident[:1], history.resident[-1:]
    kept = float((first & last).sum() / max(1, int(first.sum())))
    return Part(
        key=key,
        title=f"Residency under {policy}",
        svg=figure(
            key,
            f"Heat map: which experts were resident over the run under {policy}.",
            lambda ax: charts.residency(ax, history),
            4.2,
        ),
        caption=f"Coloured: resident. {kept:.0%} of what was resident at the start still was at the end. "
        f"Prefetching was on: {prefetch}. {' '.join(f'({note})' for note in notes)}".strip(),
    )


def forecast_part(key: str, histories: Mapping[str, History], color: Mapping[str, str]) -> Part:
    rows = [
        [
            name,
            f"{(low := tenth / TENTHS):.1f} to {low + 0.1:.1f}",
            f"{history.forecasts[tenth]:,}",
            f"{history.scores[tenth] / history.forecasts[tenth]:.3f}",
            f"{history.came_true[tenth] / history.forecasts[tenth]:.3f}",
        ]
        for name, history in histories.items()
        for tenth in np.flatnonzero(history.forecasts)
    ]
    return Part(
        key=key,
        title="Reliability of forecasts",
        svg=figure(
            key,
            "Line chart: chance forecast against the share that came true, a line per policy.",
            lambda ax: charts.reliability(ax, histories, color),
            3.4,
        ),
        caption="Forecast for a layer just before it is reached. On the diagonal a forecast of 30 % comes "
        "true in 30 of 100 cases. Recall: of the experts used, the share among as many of highest forecast.",
        table=Grid(
            title="Forecasts by tenth",
            head=("policy", "forecast", "pairs", "mean forecast", "came true"),
            rows=rows,
        ),
    )


def _use_part(history: History) -> Part:
    geometry, uses = history.geometry, history.uses
    hottest = np.argsort(-uses, kind="stable")[:HOT]
    total = max(1, int(uses.sum()))
    rows = []
    for flat in hottest:
        layer, expert = geometry.pair(int(flat))
        rows.append([f"{layer}.{expert}", f"{uses[flat]:,}", f"{uses[flat] / total:.2%}"])
    return Part(
        key="use",
        title="Which experts are hot",
        svg=figure(
            "use",
            "Heat map: use of experts, a row per layer, the layer's most used experts on the left.",
            lambda ax: charts.heat_of_use(ax, uses, geometry),
        ),
        caption="A row per layer; full colour is the layer's most used expert. The sooner a row fades, the "
        "more a static placement can catch.",
        table=Grid(title=f"The {len(rows)} most used", head=("layer.expert", "uses", "share"), rows=rows),
    )


def _reuse_part(history: History) -> Part:
    counts = history.reuse
    total = max(1, int(counts.sum()) + history.first_uses)
    rows = [
        [
            f"{1 if n == 0 else 2 ** (n - 1) + 1} to {2**n}",
            f"{counts[n]:,}",
            f"{counts[: n + 1].sum() / total:.3f}",
        ]
        for n in range(int(np.flatnonzero(counts).max(initial=0)) + 1)
    ]
    rows.append(["first use", f"{history.first_uses:,}", "1.000"])
    return Part(
        key="reuse",
        title="Reuse distance",
        svg=figure(
            "reuse",
            "Line chart: share of uses whose expert was last used at most so many forward passes before.",
            lambda ax: charts.reuse(ax, history),
        ),
        caption="How many forward passes ago the expert was used last. A steep start rewards keeping what "
        "was just used.",
        table=Grid(title="Reuse distances", head=("passes", "uses", "cumulated share"), rows=rows),
    )
