"""Files that flags name are looked for before a model is opened or anything is learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from daop.cli.main import app

DEMO = str(Path(__file__).parents[2] / "daop" / "assets" / "demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", DEMO, "--prompt", "A", "--profile", "nope"], "--profile nope: there is no such folder"),
        (["run", DEMO, "--prompt", "A", "--profile", "file"], "--profile file is a file: name the folder"),
        (["run", DEMO, "--prompt", "A", "--hardware", "nope.toml"], "cannot read the hardware profile nope"),
        (["quality", DEMO, "--text", "nope"], "--text nope: there is no such file"),
        (["quality", DEMO, "--prompts", "nope"], "--prompts nope: there is no such file"),
        (["quality", DEMO, "--text", "file", "--profile", "nope"], "--profile nope: there is no such folder"),
        (["pack", DEMO, "-o", "out", "--text", "nope"], "--text nope: there is no such file"),
        (["pack", DEMO, "-o", "out", "--text", "."], "--text . is a folder: name a file in it"),
        (["compare", "--model", DEMO, "--prompts", "nope"], "--prompts nope: there is no such file"),
        (["compare", "--trace", "nope"], "--trace nope: there is no such file"),
        (["calibrate", DEMO, "-o", "m.toml", "--folder", "nope"], "--folder nope: there is no such folder"),
        (["evaluate", "lru", "--trace", "file", "--train-on", "nope"], "--train-on nope: there is no such"),
        (
            ["trace", "capture", DEMO, "--prompts", "file", "-o", "t", "--distances", "--profile", "nope"],
            "--profile nope: there is no such folder",
        ),
    ],
)
def test_what_is_missing_is_said_first(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("A line.")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "..." not in result.output, "no step of any work was begun"
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "and nothing was written"
