"""``daop doctor`` and what all commands write with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_model import EXPERTS, LAYERS, save_chat_model
from typer.testing import CliRunner

from daop.cli.main import COMMANDS, app, load_command
from daop.cli.output import Output, printable, write_whole
from daop.core import DaopError
from daop.machine import physical_cores


def test_doctor_describes_this_machine_and_a_model(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path)
    ran = CliRunner().invoke(app, ["doctor", str(model), "--json", "-"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    choice = found["choice"]
    assert choice["model"].items() >= {"family": "qwen3_moe", "tested": True, "moe_layers": LAYERS}.items()
    assert choice["ecr"] == 1
    assert f"{EXPERTS * LAYERS} of {EXPERTS * LAYERS} experts" in choice["memory_reason"]
    assert choice["threads"] >= 1
    assert found["memory"]["usable"] <= found["memory"]["total"]
    assert all(found["versions"].values())
    assert "This machine" in ran.stderr


def test_doctor_says_how_many_threads_compute_and_where_experts_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(physical_cores())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", "-"]).stdout)
    assert found["choice"]["threads"] <= cores
    assert f"on {found['cpu']['cores']} cores" in found["choice"]["threads_reason"]
    assert found["memory_nodes"]["said"]
    assert "OMP_WAIT_POLICY" not in found["choice"]["threads_reason"]
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 3))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    ran = CliRunner().invoke(app, ["doctor"])
    assert f"{cores + 3}: OMP_NUM_THREADS says so" in ran.stdout
    assert "OMP_WAIT_POLICY=passive" in ran.stdout
    assert "experts in it" in ran.stdout


def test_doctor_still_describes_the_machine_when_the_model_is_at_fault() -> None:
    ran = CliRunner().invoke(app, ["doctor", "/no/such/model"])
    assert ran.exit_code == 2
    assert "This machine" in ran.stdout
    assert ran.stderr.startswith("error: /no/such/model is neither")
    ran = CliRunner().invoke(app, ["doctor", "--context", "0"])
    assert ran.exit_code == 2
    assert "--context" in ran.stderr


def test_every_listed_command_can_be_loaded() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for name in COMMANDS:
        if f"  {name} " in listed:
            assert load_command(name).name == name


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "figures.json"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DaopError, match=r"cannot write .*No space left"):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]


def test_figures_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "figures.json"))
    with pytest.raises(ValueError, match="JSON"):
        output.json({"hit_rate": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\n\tc\x07\x9b") == "a\ufffd[2Jb\ufffd\n\tc\ufffd\ufffd"
