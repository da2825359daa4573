"""The HTML report: what is in it, and how it looks and works in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, chromium, missing
from typer.testing import CliRunner, Result

from daop.cli.main import app
from daop.cli.output import whole_file
from daop.core import DaopError, Geometry
from daop.report.about import about
from daop.report.charts import shrink
from daop.report.compare_page import compare_page
from daop.report.page import LIMIT, Grid, Part, Section, render
from daop.report.svg import figure
from daop.training.trace import DECODE, Trace
from daop.training.writer import TraceWriter

EXCERPT = Path(__file__).parents[1] / "data" / "gpt-oss-20b-excerpt.npz"
DEMO = Path(__file__).parents[2] / "daop" / "assets" / "demo"


def daop(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def complaint(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "excerpt.parquet"
    geometry = Geometry.uniform(24, 32, 4, fingerprint="f1ng3r")
    with np.load(EXCERPT, allow_pickle=False) as data:
        ids, sequence = data["ids"][:60].astype(np.uint16), data["sequence"][:60]
    with TraceWriter(path, geometry) as writer:
        writer.write(
            Trace(
                geometry=geometry,
                sequence=sequence,
                position=np.arange(len(ids), dtype=np.int32),
                phase=np.full(len(ids), DECODE, dtype=np.uint8),
                ids=ids,
            )
        )
    return path


@pytest.fixture(scope="module")
def compared(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "compared.html"
    result = daop(
        *("compare", "--trace", trace, "--hardware", "rtx4090", "--ecr", "0.125,0.25", "--html", page),
        *("--expert-bytes", "13.2MB", "--policies", "static,lru,hybrid_score,adaptive,optimum"),
    )
    assert result.exit_code == 0, result.output
    return page


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    result = daop(
        *("run", DEMO, "--prompt", "a secret", "--max-new-tokens", 12, "--ecr", 0.3),
        *("--html", folder / "ran.html", "--timeline", folder / "line.json"),
    )
    assert result.exit_code == 0, result.output
    return folder / "ran.html"


def test_a_comparison_says_what_was_run(compared: Path, trace: Path) -> None:
    text = compared.read_text()
    for part in (str(trace), "f1ng3r", "--expert-bytes 13.2MB", "RTX 4090", "daop 0.", "torch ", "top-4"):
        assert part in text
    for title in (
        *("Stalls by cause", "Bytes moved", "Hit rate per layer", "Reliability of forecasts"),
        *("Reuse distance", "Residency under", "Speed by policy", "Which experts are hot", "best static"),
    ):
        assert title in text
    assert re.search(
        r"rtx4090, ECR 0.25: \w+ is fastest at [\d.]+ tokens/s \([\d.]+ times the best static", text
    )


def test_a_run_says_what_was_run_but_not_what_was_asked(ran: Path) -> None:
    text = ran.read_text()
    assert "daop run" in text
    assert "--prompt ..." in text
    assert "secret" not in text
    for title in ("Stalls by cause", "Residency under adaptive", "Reuse distance", "tokens/s"):
        assert title in text
    line = json.loads((ran.parent / "line.json").read_text())
    assert "secret" not in json.dumps(line)
    assert {event["ph"] for event in line["traceEvents"]} >= {"X", "C", "M"}


def test_pages_are_whole_small_and_run_nothing(compared: Path, ran: Path) -> None:
    for page in (compared, ran):
        text = page.read_text()
        assert len(text.encode()) < LIMIT
        assert "<script" not in text
        links = set(re.findall(r"https?://[^\"'\s<)]+", text))
        assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids)), "an id stands twice"
        assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
        assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_names_are_shown_not_obeyed() -> None:
    evil = "<b>&\"'"
    part = Part(
        key="one",
        title=evil,
        svg=figure("one", evil, lambda ax: ax.set_title(evil)),
        caption=evil,
        table=Grid(title=evil, head=[evil], rows=[[evil]]),
    )
    text = render(evil, evil, [Section(key="s", title=evil, facts=[(evil, evil)], parts=[part])])
    assert "<b>" not in text
    assert text.count("&lt;b&gt;") >= 9


def row(policy: str, **more: Any) -> dict[str, Any]:
    stalls = dict.fromkeys(("demand", "late", "host", "forecast"), 1.0)
    return {
        "policy": policy, "hardware": "m", "ecr": 0.5, "tokens": 4, "hit_rate": 0.5, "exact": True,
        "tokens_per_second": 2.0, "ratio_to_best_static": 1.0, "ratio_to_optimum": None, "stall_ms": stalls,
        "bytes": {"demand": 5, "useful": 1, "late": 0, "wasted": 2}, "hit_rate_by_layer": [0.5, 0.5], **more,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    return compare_page({"rows": rows, "simulated": False, "about": about("daop compare")}, None, {})


def test_quality_stands_beside_the_speed_of_approximate_policies() -> None:
    kl = {"value": 0.0123, "low": 0.01, "high": 0.02}
    approximate = row("deferral", exact=False, quality={"tokens": 9, "mean_kl": kl}, tokens_per_second=3.0)
    text = page([row("lru"), approximate])
    assert "0.0123 [0.01, 0.02]" in text
    assert "mean kl" in text
    assert "changes the model&#39;s output" in text.split("</header>")[0]
    assert "Against the exact run" not in page([row("lru")])


def test_formats_are_kept_apart() -> None:
    text = page([row("lru", format="bf16"), row("lru", format="int4", tokens_per_second=4.0)])
    assert "m, bf16, ECR 0.5" in text
    assert "m, int4, ECR 0.5: lru is fastest at 4.0 tokens/s" in text


# -- bad input -----------------------------------------------------------------------------------


def test_existing_output_needs_force(trace: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.html"
    there.write_text("mine")
    for flag in ("--html", "--timeline"):
        for command in (("compare", "--trace", trace), ("run", DEMO, "--prompt", "x")):
            said = complaint(daop(*command, flag, there))
            assert "exists" in said
            assert "--force" in said
            assert there.read_text() == "mine"
    small = ("--ecr", 0.25, "--expert-bytes", "13.2MB", "--policies", "lru", "--tokens", 10)
    result = daop("compare", "--trace", trace, "--html", there, "--force", *small)
    assert result.exit_code == 0, result.output
    assert there.read_text().startswith("<!doctype html>")


def test_output_that_cannot_be_written(trace: Path, tmp_path: Path) -> None:
    assert "no folder" in complaint(daop("compare", "--trace", trace, "--html", tmp_path / "no" / "x.html"))
    assert "is a folder" in complaint(daop("run", DEMO, "--prompt", "x", "--timeline", tmp_path))


def test_nothing_half_written(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write() -> None:
        with whole_file(target) as file:
            file.write("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(DaopError, match="No space left"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_left_out_and_named() -> None:
    parts = [Part(key=f"p{n}", title=f"part {n}", svg="x" * 30_000, caption="") for n in range(20)]
    sections = [
        Section(key="a", title="First", facts=[("kept", "always")], parts=parts[:10]),
        Section(key="b", title="Second", facts=[("kept", "too")], parts=parts[10:]),
    ]
    text = render("t", "l", sections, limit=400_000)
    assert len(text.encode()) <= 400_000
    assert "would exceed 0.4 MB" in text
    assert "Second: part 19" in text
    assert "too" in text
    assert 'id="p0"' in text
    assert 'id="p19"' not in text


def test_heat_maps_shrink_to_averages() -> None:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert shrink(grid, 2, 3).tolist() == [[3.5, 5.5, 7.5], [15.5, 17.5, 19.5]]
    assert shrink(grid, 10, 10).tolist() == grid.tolist()
    uneven = shrink(np.arange(7, dtype=np.float32)[:, None], 3, 1)
    assert uneven[:, 0].tolist() == [0.5, 2.5, 5.0]


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if reason := missing():
        pytest.skip(reason)
    with chromium() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_looks(browser: Any, compared: Path, ran: Path, width: int, scheme: str) -> None:
    for file in (compared, ran):
        view = Page(browser, file.as_uri(), width, scheme)
        assert view.ask("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        assert view.ask(SPILLED) == 0
        light = view.ask(
            "(c => c.slice(0, 3).reduce((a, b) => a + b) / 3)"
            "(getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))"
        )
        assert (light > 200) == (scheme == "light")
        assert view.ask(CONTRAST) > 4.5, "text of a figure cannot be read"
        assert view.ask(SMALLEST) >= 8, "text of a figure is too small"
        assert view.complaints == []
        assert view.requests == [file.as_uri()]
        view.page.close()


SPILLED = """Math.max(...[...document.querySelectorAll('figure')].map(f => f.scrollWidth - f.clientWidth))"""
SMALLEST = """Math.min(
  ...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"""
CONTRAST = """(() => {
  const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
  const paper = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
  return Math.min(...[...document.querySelectorAll('svg text, figcaption, summary')].map(e => {
    const ink = light(e.tagName === 'text' ? getComputedStyle(e).fill : getComputedStyle(e).color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); }));
})()"""


@pytest.mark.slow
def test_works_by_keyboard(browser: Any, compared: Path) -> None:
    view = Page(browser, compared.as_uri(), 1280)
    stops = view.tab_stops()
    assert stops[0].startswith("A skip")
    reachable = view.ask("document.querySelectorAll('a[href], summary').length")
    # closed details hide the scrolling table in them from Tab
    shown = view.ask("[...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility()).length")
    assert len(stops) == reachable + shown

    view.page.reload()
    view.page.keyboard.press("Tab")
    view.page.keyboard.press("Enter")
    assert view.ask("document.activeElement.id") == "main"
    while view.ask("document.activeElement.tagName") != "SUMMARY":
        view.page.keyboard.press("Tab")
    assert view.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    view.page.keyboard.press("Enter")
    assert view.ask("document.activeElement.parentElement.open")
    view.page.keyboard.press("Tab")
    assert view.ask("document.activeElement.className") == "scroll"
    assert view.complaints == []
