"""``daop calibrate``: without a model, and what ``daop compare`` makes of its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daop.cli.main import app
from daop.hardware import load


def test_without_a_model_random_experts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = tmp_path / "machine.toml"
    arguments = ["calibrate", "-o", target, "--expert-bytes", "96KiB", "--seconds", 0.3, "--json", "-"]
    arguments += ["--format", "int4,bf16"]
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    assert [file.name for file in tmp_path.iterdir()] == ["machine.toml"], (
        "the model of random numbers is gone"
    )
    profile = load(str(target))
    assert json.loads(result.stdout)["link_gbs"] == profile.hardware.link_gbs
    assert profile.hardware.tier == "host"
    own, int4 = profile.hardware.curves
    assert (own.format, own.nbytes) == ("bf16", 98304), "the model's own is not measured twice"
    assert (int4.format, int4.nbytes) == ("int4", -(-98304 * 4.5 / 16 // 4096) * 4096)
    assert json.loads(result.stdout)["formats"]["int4"]["microseconds"] == list(int4.microseconds)
    assert "bf16 (the model's)" in result.stderr
    assert profile.expert_bytes == 98304
    assert set(profile.sources) >= {"link_gbs", "link_latency_us", "device_gbs", "layer_us", "forward_us"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a model, or -o"),
        (["-o", "machine.json"], "ends in .toml"),
        (["-o", "/no/such/folder/machine.toml"], "there is no folder"),
        (["-o", "machine.toml", "--expert-bytes", "much"], "--expert-bytes"),
        (["-o", "machine.toml", "--folder", "/no/such/folder"], "--folder"),
        (["/no/such/model"], "/no/such/model"),
        (["-o", "machine.toml", "--format", "zip"], "--format zip is not known"),
    ],
)
def test_nonsense_is_named(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
