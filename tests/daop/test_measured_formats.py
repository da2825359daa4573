"""``daop compare --model`` with the same model in several formats: the same memory, rows that say which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daop.cli.main import app
from daop.runtime import packing
from daop.runtime.checkpoint import open_checkpoint
from daop.synthetic_model import synthetic

DEMO = Path(__file__).parents[2] / "daop" / "assets" / "demo"


@pytest.mark.slow
def test_formats_are_measured_in_the_same_memory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(DEMO)
    packing.pack(checkpoint, tmp_path / "int8", dtype="int8", told=lambda *_: None)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "o.json"
    prompts.write_text("Once upon a time\n")
    arguments = [
        "compare",
        "--model",
        str(DEMO),
        "--model",
        str(tmp_path / "int8"),
        "--prompts",
        str(prompts),
    ]
    arguments += ["--ecr", "0.25", "--policies", "static", "--repeats", "1", "--max-new-tokens", "3"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    plain, packed = json.loads(out.read_text())["rows"]
    assert (plain["format"], packed["format"]) == ("bf16", "int8")
    assert plain["memory_ecr"] == packed["memory_ecr"] == plain["ecr"] == 0.25
    assert packed["slots"] * packed["expert_bytes"] <= plain["slots"] * plain["expert_bytes"]
    assert (packed["slots"] + 1) * packed["expert_bytes"] > plain["slots"] * plain["expert_bytes"]
    assert "formats in the same memory" in " ".join(result.output.split())


def test_another_model_is_refused(tmp_path: Path) -> None:
    synthetic(tmp_path / "other", 96 * 1024)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A\n")
    arguments = [
        "compare",
        "--model",
        str(DEMO),
        "--model",
        str(tmp_path / "other"),
        "--prompts",
        str(prompts),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "MoE layers" in result.output
