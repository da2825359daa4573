"""Matplotlib figures as inline SVG that takes its colours and fonts from the page around it.

Colours are drawn as stand-ins and replaced by CSS variables, so that light and dark need one drawing.
Text stays text: it can be selected, searched and read aloud.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from daop.core import DaopError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, LINE = "#010101", "#010102", "#010103"
SERIES = tuple(f"#0102{n:02x}" for n in range(8))
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", LINE: "var(--line)"} | {
    color: f"var(--s{n})" for n, color in enumerate(SERIES)
}
MARKERS = "osD^vPX*"
WIDTH = 4.4
"""Inches. Narrow on purpose: a telephone shows it at full size, a wide page puts several side by side."""

STYLE: dict[str, Any] = {
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "daop",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
}


def figure(key: str, alt: str, draw: Callable[[Axes], object], height: float = 2.8) -> str:
    """An ``<svg>`` of what ``draw`` puts on the axes. ``key`` is unique in the page, ``alt`` says what is
    seen to who cannot see it."""
    matplotlib, figures = _matplotlib()
    with matplotlib.rc_context(STYLE):
        canvas = figures.Figure(figsize=(WIDTH, height), layout="constrained")
        draw(canvas.add_subplot())
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), key, alt)


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib import figure as figures
    except ImportError as error:
        raise DaopError("--html draws with matplotlib: pip install 'daop[report]'") from error
    return matplotlib, figures


def _inline(text: str, key: str, alt: str) -> str:
    from markupsafe import escape

    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r"url\(#", f"url(#{key}-", body)
    body = re.sub(r'href="#', f'href="#{key}-', body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, variable)
    head, _, rest = body.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    start = f'<svg {box.group() if box else ""} role="img" aria-label="{escape(alt)}"'
    links = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return re.sub(r">\s+<", "><", f"{start} {links}>{rest}").strip()
