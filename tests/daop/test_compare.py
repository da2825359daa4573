"""``daop compare`` on a recorded trace: its table, files and messages."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from daop import comparison
from daop.cli.main import app
from daop.core import DaopError, Geometry
from daop.training.trace import ABSENT, DECODE, Trace
from daop.training.writer import TraceWriter

EXCERPT = Path(__file__).parents[1] / "data" / "gpt-oss-20b-excerpt.npz"


def recorded(tokens: int = 120) -> Trace:
    with np.load(EXCERPT, allow_pickle=False) as data:
        ids, sequence = data["ids"][:tokens].astype(np.uint16), data["sequence"][:tokens]
    return Trace(
        geometry=Geometry.uniform(24, 32, 4),
        sequence=sequence,
        position=np.arange(len(ids), dtype=np.int32),
        phase=np.full(len(ids), DECODE, dtype=np.uint8),
        ids=ids,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "excerpt.parquet"
    with TraceWriter(path, Geometry.uniform(24, 32, 4)) as writer:
        writer.write(recorded())
    return path


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compare", *(str(a) for a in arguments)])


def complaint(result: Any) -> str:
    """The error that a person is shown, on one line."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(str(result.output).split())


def test_rows_say_what_was_promised(trace: Path, tmp_path: Path) -> None:
    out, table, line = tmp_path / "o.json", tmp_path / "o.csv", tmp_path / "timeline.json"
    result = call(
        *("--trace", trace, "--hardware", "rtx4090", "--ecr", "0.25", "--expert-bytes", "13.2MB"),
        *("--policies", "static,lru,optimum", "--json", out, "--csv", table, "--timeline", line),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["static", "lru", "optimum"]
    for row in rows:
        assert row["hardware"] == "rtx4090"
        assert row["ecr"] == 0.25
        assert 0 < row["hit_rate"] < 1
        assert row["tokens_per_second"] > 0
        assert 0 < row["ratio_to_optimum"] <= 1
        assert {"demand", "useful", "late", "wasted"} <= set(row["bytes"])
        assert {"demand", "late", "host", "forecast"} <= set(row["stall_ms"])
    assert rows[0]["ratio_to_best_static"] <= 1
    assert rows[2]["ratio_to_optimum"] == 1
    with table.open() as file:
        assert [row["policy"] for row in csv.DictReader(file)] == ["static", "lru", "optimum"]
    events = json.loads(line.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"policy", "device", "host", "link in"}
    assert "optimum" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fastest"], "known: activation_matrix"),
        (["--policies", ","], "names no policy"),
        (["--hardware", "abacus"], "rtx4090"),
        (["--ecr", "1.5"], "between 0 and 1"),
        (["--ecr", "much"], "--ecr"),
        (["--expert-bytes", "big"], "--expert-bytes"),
        ([], "--expert-bytes"),
    ],
)
def test_bad_flags_are_named(trace: Path, arguments: list[str], message: str) -> None:
    asked = {"--hardware": "rtx4090", "--ecr": "0.25", "--policies": "static"}
    if arguments and arguments[0] != "--expert-bytes":
        asked["--expert-bytes"] = "13.2MB"
    asked.update(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    result = call("--trace", trace, *(part for pair in asked.items() for part in pair))
    assert message in complaint(result)


def test_what_is_missing_is_said_before_any_work(trace: Path, tmp_path: Path) -> None:
    asked = {"--trace": trace, "--expert-bytes": "13.2MB"}
    for flag, value, message in (
        ("--trace", tmp_path / "nope.parquet", "nope.parquet: there is no such file"),
        ("--trace", tmp_path, "is a folder: name a file"),
        ("--profile", tmp_path / "nope", "nope: there is no such folder"),
        ("--hardware", "rtx4090,nope.toml", "cannot read the hardware profile nope.toml"),
        ("--csv", "/no/such/folder/rows.csv", "there is no folder /no/such/folder"),
        ("--format", "zip", "--format zip is not known"),
    ):
        parts = {**asked, flag: value}
        result = call(*(part for pair in parts.items() for part in pair))
        assert message in complaint(result)
        assert "learning" not in result.output
    missing = call("--model", "somewhere", "--prompts", tmp_path / "nope.txt")
    assert "nope.txt: there is no such file" in complaint(missing)
    judged = call(
        *("--trace", trace, "--prompts", __file__, "--quality-model", tmp_path / "nope"),
        *("--expert-bytes", "13.2MB"),
    )
    assert "nope" in complaint(judged)
    assert "learning" not in judged.output


def test_formats_say_what_they_rest_on(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    result = call(
        *("--trace", trace, "--ecr", "0.25,0.5", "--expert-bytes", "13.2MB", "--policies", "static,lru"),
        *("--format", "keep,int4,f32", "--json", out, "--html", tmp_path / "o.html"),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    kinds = {row["format"]: row["costs"] for row in document["rows"]}
    assert kinds == {"keep": "assumed", "int4": "assumed", "f32": "unknown"}
    assert {(c["format"], c["kind"]) for c in document["format_costs"]} == set(kinds.items())
    assert {row["memory_ecr"] for row in document["rows"]} == {0.25, 0.5}
    text = " ".join(result.output.split())
    assert "? computing on rtx4090 is unknown: f32" in text
    assert "* computing on rtx4090 is assumed: keep the machine's figures as they are; int4 host_gbs" in text
    assert "computing on rtx4090 is assumed" in (tmp_path / "o.html").read_text()


def test_either_a_trace_or_a_model() -> None:
    assert "--trace" in complaint(call("--ecr", "0.25"))
    assert "--prompts" in complaint(call("--model", "somewhere"))
    only_simulated = call("--model", "somewhere", "--prompts", __file__, "--policies", "optimum")
    assert "only be simulated" in complaint(only_simulated)


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(DaopError, match="MoE layers"):
        comparison.traffic_of(recorded(), Geometry.uniform(12, 32, 4, 100))
    with pytest.raises(DaopError, match="does not have"):
        comparison.traffic_of(recorded(), Geometry.uniform(24, 8, 4, 100))
    with pytest.raises(DaopError, match="no tokens"):
        comparison.traffic_of(recorded(0), Geometry.uniform(24, 32, 4, 100))


def test_layers_that_a_trace_lacks_are_passed_over() -> None:
    partial = recorded(6)
    partial.ids[:5, 23] = ABSENT
    partial.ids[2, 3, 1:] = ABSENT
    geometry = comparison.sized(partial.geometry, 100)
    traffic = comparison.traffic_of(partial, geometry)
    from daop.hardware import load

    setting = comparison.Setting(hardware=load("rtx4090"), ecr=0.25)
    for name in ("lru", "adaptive", "optimum", "activation_matrix"):
        row = comparison.simulate_one(traffic, None, setting, name)
        assert sum(row["requests"].values()) == 6 * 24 * 4 - 5 * 4 - 3
    profile = comparison.learn_profile(partial, geometry)
    assert profile.frequency.sum() == pytest.approx(24 * 4)
