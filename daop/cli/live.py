"""``daop run --live``: what placement is doing, in the terminal, while text streams.

The figures are read a few times a second by rich's own thread; nothing is computed in the model's thread
but a count of passes. A finished answer stays in the terminal, the figures below it go.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from daop.cli.output import Output, printable
from daop.core import Phase
from daop.generation import OnText
from daop.runtime.watching import Watcher

if TYPE_CHECKING:
    from daop.runtime.conductor import Conductor

PER_SECOND = 4
WINDOW = 32
"""Decode passes over which tokens per second is averaged."""

BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"


class LiveView(Watcher):
    """Figures of a running model; ``show`` draws them while a batch of answers is made."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._passes: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._tokens = 0
        self._texts: list[str] = []
        self._titles: Sequence[str] = ()
        self._conductor: Conductor | None = None
        unicode = (output.console.encoding or "").lower().startswith("utf")
        self._bars = BARS if unicode else PLAIN_BARS

    def attach(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def reset(self) -> None:
        self._tokens = 0

    def begin(self, phase: Phase, rows: int) -> None:
        if phase is Phase.DECODE:
            self._passes.append((time.perf_counter(), rows))
            self._tokens += rows
        else:
            self._passes.clear()

    @contextmanager
    def show(self, titles: Sequence[str]) -> Iterator[OnText]:
        """Draw until the block ends, whatever ends it; takes the text of each answer as it comes."""
        self._titles, self._texts = titles, [""] * len(titles)

        def on_text(row: int, text: str) -> None:
            self._texts[row] += printable(text)

        console = self._output.console
        with Live(console=console, get_renderable=self._draw, refresh_per_second=PER_SECOND, transient=True):
            yield on_text

    # -- drawing ---------------------------------------------------------------------------------

    def _draw(self) -> Group:
        height, width = self._output.console.height, self._output.console.width
        room = max(1, (height - 14) // max(1, len(self._texts)))
        parts: list[Text | Panel] = []
        for title, text in zip(self._titles, self._texts, strict=True):
            parts.append(Text(title, style="bold cyan", no_wrap=True, overflow="ellipsis"))
            parts.append(Text(tail(text, room, width)))
        parts.append(Panel(self.figures(), title="daop", title_align="left", border_style="dim"))
        return Group(*parts)

    def figures(self) -> Table:
        """The panel's rows."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        if self._conductor is None:
            return table
        conductor = self._conductor
        statistics, residency = conductor.statistics, conductor.residency
        table.add_row("decode", f"{self.tokens_per_second():.1f} tokens/s, {self._tokens} tokens")
        table.add_row("hit rate", f"{statistics.hit_rate(Phase.DECODE):.1%} in decode")
        stalls = statistics.stall_seconds
        total = sum(stalls.values())
        told = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in stalls.items() if seconds >= 0.05)
        table.add_row("stalled", f"{total:.1f} s" + (f": {told}" if told else ""))
        fates = statistics.prefetches
        on = "on" if conductor.policy.prefetching else "off"
        told = ", ".join(f"{fates[fate]} {fate}" for fate in ("useful", "late", "wasted", "dropped"))
        table.add_row("prefetching", f"{on}; {told}")
        experts = residency.geometry.experts
        held = f"{residency.used_slots} of {residency.capacity} slots in use"
        table.add_row("resident", f"{held}, by layer:")
        shares = [count / total for count, total in zip(residency.held, experts, strict=True)]
        table.add_row("", Text("".join(self._bar(share) for share in shares), overflow="fold"))
        return table

    def tokens_per_second(self) -> float:
        """Of the last passes; 0 while there are fewer than two."""
        passes = list(self._passes)
        if len(passes) < 2:
            return 0.0
        seconds = passes[-1][0] - passes[0][0]
        return sum(rows for _, rows in passes[1:]) / seconds if seconds else 0.0

    def _bar(self, share: float) -> str:
        """Empty only at 0, full only at 1."""
        if share <= 0:
            return self._bars[0]
        return self._bars[min(len(self._bars) - 1, 1 + int(share * (len(self._bars) - 2)))]


def tail(text: str, lines: int, width: int) -> str:
    """The end of a text, as it fits into so many lines."""
    out: list[str] = []
    for line in text.split("\n"):
        out += [line[at : at + width] for at in range(0, max(1, len(line)), max(1, width))]
    return "\n".join(out[-lines:])
