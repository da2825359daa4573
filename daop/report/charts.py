"""The report's figures: each function draws one question's answer onto an axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry
from daop.report.svg import FAINT, INK, MARKERS, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from daop.runtime.history import History

Rows = Sequence[Mapping[str, Any]]
CAUSES = ("demand", "late", "host", "forecast")
FATES = ("demand", "useful", "late", "wasted")
STALL_CAPTION = "Time in which a layer had nothing to do but wait, and for what."
BYTES_CAPTION = (
    "Demand: asked for by the running layer. Useful: a prefetch that arrived in time. Late: it was still "
    "under way. Wasted: given up before any use."
)
ROWS, COLUMNS = 768, 240
"""Cells of a heat map at most, down and across; larger ones are averaged."""


def colors(policies: Sequence[str]) -> dict[str, str]:
    """One colour per policy for the whole report."""
    return {name: SERIES[n % len(SERIES)] for n, name in enumerate(dict.fromkeys(policies))}


def speed(ax: Axes, rows: Rows, color: Mapping[str, str]) -> None:
    """Tokens per second by budget, one line per policy, with the optimum and the best static one."""
    shares = sorted({float(row["ecr"]) for row in rows})
    for n, (name, shade) in enumerate(color.items()):
        mine = {float(row["ecr"]): row for row in rows if row["policy"] == name}
        if not mine:
            continue
        at = sorted(mine)
        ys = [float(mine[share]["tokens_per_second"]) for share in at]
        dashes = "--" if name == "optimum" else "-"
        ax.plot(at, ys, dashes, color=shade, marker=MARKERS[n % len(MARKERS)], label=name)
        spread = [mine[share].get("spread") for share in at]
        if all(spread):
            ax.fill_between(at, *zip(*spread, strict=True), color=shade, alpha=0.15, linewidth=0)
    for ratio, name, style in (
        ("ratio_to_best_static", "best static", ":"),
        ("ratio_to_optimum", "optimum", "--"),
    ):
        bound = {float(r["ecr"]): r["tokens_per_second"] / r[ratio] for r in rows if r.get(ratio)}
        if bound and (name != "optimum" or name not in color):
            ax.plot(sorted(bound), [bound[share] for share in sorted(bound)], style, color=INK, label=name)
    ax.set_xlabel("ECR (share of the experts in fast memory)")
    ax.set_ylabel("tokens/s")
    ax.set_xticks(shares, [f"{share:g}" for share in shares])
    ax.set_ylim(bottom=0)
    ax.legend(ncols=2)


def stacked(ax: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> None:
    """Horizontal bars, one per policy, of parts that add up."""
    places = np.arange(len(names))[::-1]
    left = np.zeros(len(names))
    for n, (part, values) in enumerate(parts.items()):
        ax.barh(places, values, left=left, color=SERIES[n], label=part, height=0.7)
        left += np.asarray(values)
    ax.set_yticks(places, names)
    ax.set_xlabel(unit)
    ax.grid(axis="y", visible=False)
    ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 1.0), columnspacing=1, handlelength=1)


def stall_parts(rows: Rows) -> dict[str, list[float]]:
    """Milliseconds a token, by cause."""
    return {
        cause: [float(row["stall_ms"].get(cause, 0.0)) / max(1, tokens_of(row)) for row in rows]
        for cause in CAUSES
    }


def byte_parts(rows: Rows) -> tuple[dict[str, list[float]], str]:
    """What was moved while running, by what became of it, and the unit that suits it."""
    most = max(sum(row["bytes"].get(fate, 0) for fate in FATES) for row in rows)
    unit, name = (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    return {fate: [float(row["bytes"].get(fate, 0)) / unit for row in rows] for fate in FATES}, name


def tokens_of(row: Mapping[str, Any]) -> int:
    """Tokens that a row's totals are for."""
    tokens = row.get("tokens", 0)
    return int(sum(tokens.values()) if isinstance(tokens, Mapping) else tokens)


def hit_rates(ax: Axes, rows: Rows, color: Mapping[str, str]) -> None:
    """Hit rate of each MoE layer in decode."""
    for row in rows:
        rates = row["hit_rate_by_layer"]
        ax.plot(range(len(rates)), rates, color=color[row["policy"]], label=row["policy"])
    ax.set_xlabel("MoE layer")
    ax.set_ylabel("hit rate in decode")
    ax.set_ylim(0, 1.02)
    ax.legend(ncols=2)


def residency(ax: Axes, history: History, color: str = SERIES[0]) -> None:
    """Which experts were resident when: a cell is the share of its experts and samples that were."""
    shares = shrink(history.resident.T.astype(np.float32), ROWS, COLUMNS)
    _heat(ax, shares, color, history.geometry)
    _token_ticks(ax, history.tokens, shares.shape[1])
    ax.set_xlabel("tokens run")


def heat_of_use(ax: Axes, uses: NDArray[np.int64], geometry: Geometry, color: str = SERIES[1]) -> None:
    """How often each expert was used: a row per layer, experts by falling use; white is none."""
    widest = max(geometry.experts)
    grid = np.zeros((geometry.layers, widest), dtype=np.float32)
    for layer, count in enumerate(geometry.experts):
        mine = uses[geometry.offsets[layer] : geometry.offsets[layer] + count]
        grid[layer, :count] = np.sort(mine)[::-1] / max(1, int(mine.max()))
    small = shrink(grid, ROWS, COLUMNS)
    _image(ax, small, color, (0, widest, geometry.layers, 0))
    ax.set_xlabel("experts of the layer, most used first")
    ax.set_ylabel("MoE layer")


def reuse(ax: Axes, history: History) -> None:
    """Share of all uses whose expert was used at most so many passes before."""
    counts = history.reuse
    total = int(counts.sum()) + history.first_uses
    last = max(int(np.flatnonzero(counts).max(initial=0)), 3)
    edges = [2**n for n in range(last + 1)]
    ax.plot(edges, np.cumsum(counts[: last + 1]) / max(1, total), color=SERIES[0], marker="o")
    ax.set_xscale("log", base=2)
    ax.set_xticks(
        edges[:: max(1, len(edges) // 8)], [str(edge) for edge in edges[:: max(1, len(edges) // 8)]]
    )
    ax.minorticks_off()
    ax.set_xlabel("reuse distance (forward passes)")
    ax.set_ylabel("share of uses, cumulated")
    ax.set_ylim(0, 1.02)


def reliability(ax: Axes, histories: Mapping[str, History], color: Mapping[str, str]) -> None:
    """Mean forecast against what happened, in tenths of the forecast; on the diagonal it is honest."""
    ax.plot([0, 1], [0, 1], ":", color=FAINT, label="as forecast")
    for name, history in histories.items():
        some = history.forecasts > 0
        seen = history.forecasts[some]
        ax.plot(
            history.scores[some] / seen,
            history.came_true[some] / seen,
            color=color[name],
            marker="o",
            label=name if history.recall is None else f"{name} (recall {history.recall:.2f})",
        )
    ax.set_xlabel("chance forecast")
    ax.set_ylabel("share that came true")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    ax.legend()


# -- heat maps -----------------------------------------------------------------------------------


def shrink(grid: FloatArray, rows: int, columns: int) -> FloatArray:
    """Average neighbouring cells until there are at most so many each way."""
    for axis, limit in ((0, rows), (1, columns)):
        size = grid.shape[axis]
        if size > limit:
            starts = np.unique(np.linspace(0, size, limit, endpoint=False).astype(np.int64))
            widths = np.diff([*starts.tolist(), size])
            sums = np.add.reduceat(grid, starts, axis=axis)
            grid = (sums / (widths[:, None] if axis == 0 else widths)).astype(np.float32)
    return grid


def _heat(ax: Axes, shares: FloatArray, color: str, geometry: Geometry) -> None:
    height = geometry.total
    _image(ax, shares, color, (0, shares.shape[1], height, 0))
    step = max(1, geometry.layers // 8)
    layers = range(0, geometry.layers, step)
    ax.set_yticks([geometry.offsets[layer] for layer in layers], [str(layer) for layer in layers])
    ax.set_ylabel("MoE layer, its experts below")


def _image(ax: Axes, shares: FloatArray, color: str, extent: tuple[float, float, float, float]) -> None:
    """The colour where the share is 1, nothing where it is 0, so that any background serves."""
    from matplotlib.colors import to_rgb

    cells = np.zeros((*shares.shape, 4), dtype=np.float32)
    cells[..., :3] = to_rgb(HEAT[SERIES.index(color)])
    cells[..., 3] = shares
    ax.imshow(cells, extent=extent, aspect="auto", interpolation="nearest")
    ax.grid(visible=False)


HEAT = ("#2f7fd0", "#d9741b")
"""Colours of heat maps are part of a bitmap, so they must do on light and dark alike."""


def _token_ticks(ax: Axes, tokens: Sequence[int], columns: int) -> None:
    if not tokens:
        return
    places = np.unique(np.linspace(0, len(tokens) - 1, 5).astype(int))
    scale = columns / len(tokens)
    ax.set_xticks([float(place * scale) for place in places], [f"{tokens[place]:,}" for place in places])
