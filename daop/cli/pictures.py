"""What ``daop run`` writes for looking at: the report and the timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer import Context

from daop.cli.output import whole_file, write_whole
from daop.runtime.history import History
from daop.runtime.timeline import Timeline
from daop.runtime.watching import Watcher


class RunPictures:
    """Watches the run for whatever was asked for, and writes it afterwards."""

    def __init__(self, html: Path | None, timeline: Path | None) -> None:
        self._html, self._trace_file = html, timeline
        self._history = None if html is None else History()
        self._timeline = None if timeline is None else Timeline()
        self.watchers: list[Watcher] = [w for w in (self._history, self._timeline) if w is not None]

    def write(self, context: Context, model: str, figures: dict[str, Any]) -> None:
        from daop.report.about import about, command_line

        command = command_line(context)
        if self._trace_file is not None and self._timeline is not None:
            from daop.runtime.chrome_trace import write_chrome_trace

            with whole_file(self._trace_file) as file:
                write_chrome_trace(self._timeline, file, {"command": command, "model": model})
        if self._html is not None and self._history is not None:
            from daop.report.run_page import run_page

            write_whole(self._html, run_page(figures, self._history, about(command), model))
