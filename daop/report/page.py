"""One self-contained HTML page: sections of facts, tables and figures, under a limit of bytes.

Nothing is fetched and nothing runs: no scripts, no fonts, no links out. What does not fit under ``LIMIT``
is left out from the end, and the page says what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources

from daop.core import DaopError

LIMIT = 5_000_000
"""Bytes of a page at most: small enough to be sent by mail."""

RESERVE = 20_000  # for the section that says what was left out


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table; the rows of these numbers are emphasised."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Part:
    """A figure; ``key`` is unique in the page, ``svg`` trusted markup."""

    key: str
    title: str
    svg: str
    caption: str
    table: Grid | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    key: str
    title: str
    text: str = ""
    facts: Sequence[tuple[str, str]] = ()
    table: Grid | None = None
    parts: Sequence[Part] = field(default_factory=tuple)


def render(title: str, lead: str, sections: Sequence[Section], limit: int = LIMIT) -> str:
    """The page as text of at most ``limit`` bytes."""
    page = _write(title, lead, sections)
    if len(page.encode()) <= limit:
        return page
    kept, left_out = _fit(
        sections, limit - RESERVE - len(_write(title, lead, [_bare(s) for s in sections]).encode())
    )
    note = Section(
        key="left-out",
        title="Left out",
        text=f"The page would exceed {limit / 1e6:g} MB; these are not in it: {', '.join(left_out)}.",
    )
    return _write(title, lead, [*kept, note])


def _bare(section: Section) -> Section:
    return replace(section, parts=(), table=None)


def _fit(sections: Sequence[Section], room: int) -> tuple[list[Section], list[str]]:
    """Tables and figures in order, as long as they fit."""
    kept: list[Section] = []
    left_out: list[str] = []
    for section in sections:
        size = 0 if section.table is None else _size_of(section.table)
        table = section.table if size <= room else None
        if table is None and section.table is not None:
            left_out.append(section.table.title)
        room -= size if table is not None else 0
        parts: list[Part] = []
        for part in section.parts:
            size = len(part.svg.encode()) + (0 if part.table is None else _size_of(part.table)) + 1000
            if size <= room:
                parts.append(part)
                room -= size
            else:
                left_out.append(f"{section.title}: {part.title}")
        kept.append(replace(section, table=table, parts=parts))
    return kept, left_out[:100] + (["and more"] if len(left_out) > 100 else [])


def _size_of(table: Grid) -> int:
    return sum(len(cell.encode()) + 40 for row in table.rows for cell in row) + 1000


def _write(title: str, lead: str, sections: Sequence[Section]) -> str:
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise DaopError("--html needs jinja2: pip install 'daop[report]'") from error
    import daop

    here = resources.files("daop.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    marked = [
        replace(section, parts=[replace(part, svg=Markup(part.svg)) for part in section.parts])
        for section in sections
    ]
    style = Markup((here / "page.css").read_text(encoding="utf-8"))
    return template.render(title=title, lead=lead, sections=marked, style=style, version=daop.__version__)
