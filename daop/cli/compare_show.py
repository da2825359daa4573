"""What ``daop compare`` shows and writes: tables, footnotes, CSV, and the report's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Context

from daop.cli.output import Output, write_whole
from daop.core import Geometry
from daop.report.about import about, command_line
from daop.report.ranking import (
    LEGEND,
    QUALITY_LEGEND,
    as_csv,
    beyond_optimum,
    footnotes,
    formats_table,
    quality_table,
    ranking,
)

if TYPE_CHECKING:
    from daop.runtime.history import History
    from daop.runtime.watching import Watcher


class Pictures:
    """Watches every run for the report."""

    def __init__(self) -> None:
        self.histories: dict[tuple[str, float, str], History] = {}

    def __call__(self, machine: str, share: float, policy: str) -> Sequence[Watcher]:
        from daop.runtime.history import History

        history = self.histories[machine, share, policy] = History()
        return [history]

    @property
    def geometry(self) -> Geometry | None:
        return next((history.geometry for history in self.histories.values()), None)


def show(output: Output, document: dict[str, Any]) -> None:
    """A table for each format, machine and budget; the formats side by side, and what their costs rest on."""
    rows = document["rows"]
    formats = list(dict.fromkeys(row.get("format") for row in rows))
    for name in formats:
        if name is not None:
            output.say(f"experts in format {name}", style="bold")
        for table in ranking([row for row in rows if row.get("format") == name]):
            output.table(table)
    output.say(LEGEND, style="dim")
    if len(formats) > 1:
        output.table(formats_table(rows))
    for line in (*footnotes(document.get("format_costs", [])), *beyond_optimum(rows)):
        output.say(line, style="dim")
    approximate = quality_table(rows)
    if approximate is not None:
        output.table(approximate)
        output.say(QUALITY_LEGEND, style="dim")


def write(
    ctx: Context, document: dict[str, Any], pictures: Pictures | None, csv: Path | None, html: Path | None
) -> None:
    """The files that were asked for; ``document`` learns about the command."""
    document["about"] = about(command_line(ctx))
    if csv is not None:
        write_whole(csv, as_csv(document["rows"]))
    if html is not None and pictures is not None:
        from daop.report.compare_page import compare_page

        write_whole(html, compare_page(document, pictures.geometry, pictures.histories))
