"""``daop demo`` with the shipped model, made short, and the parts that it is made of."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daop import machine
from daop.cli import demo as demo_module
from daop.cli.demo import changed, hot_set_map, scratch_folder
from daop.cli.main import app
from daop.core import DaopError

SHORT = ("--limit", "2", "--max-new-tokens", "4", "--expert-bytes", "32MiB")


@pytest.mark.slow
def test_both_placements_are_reported_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran = CliRunner().invoke(app, ["demo", *SHORT, "--json", "-"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    dynamic, static = document["runs"]
    assert (dynamic["policy"], static["policy"]) == ("adaptive", "static")
    assert document["same_tokens"]
    assert dynamic["token_ids"] == static["token_ids"]
    assert sum(dynamic["hot_set_changes"]) > 0
    assert sum(static["hot_set_changes"]) == 0
    assert "same 8 tokens" in " ".join(ran.stderr.split())
    assert "hot set" in ran.stderr
    assert not list(tmp_path.glob("daop*")), "the widened model was not removed"


@pytest.mark.slow
def test_different_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_module._run
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def lying(*arguments: object, **options: object) -> dict[str, object]:
        figures = honest(*arguments, **options)  # type: ignore[arg-type]
        return figures | {"token_ids": [[len(str(figures["policy"]))]]}

    monkeypatch.setattr(demo_module, "_run", lying)
    ran = CliRunner().invoke(app, ["demo", *SHORT[:4], "--expert-bytes", "0"])
    assert ran.exit_code == 1
    assert "DIFFERENT" in ran.stdout


def test_what_came_and_left_is_shown() -> None:
    before, after = [[0, 1], [2]], [[1, 3], [2]]
    assert changed(before, after) == 1
    lines = hot_set_map(before, after, (4, 3)).plain.splitlines()
    assert lines[1:] == ["layer   0 □■·■  1 came, 1 left", "layer   1 ··■  0 came, 0 left"]


def test_the_scratch_folder_is_removed_even_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted() -> None:
        with scratch_folder(10) as folder:
            (folder / "big").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_without_a_disk_the_demo_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DaopError, match="TMPDIR"), scratch_folder(1 << 60):
        pass
    in_memory = machine.Disk(
        path="/", filesystem="tmpfs", device="", total=1 << 62, free=1 << 62, rotational=None, in_memory=True
    )
    monkeypatch.setattr(machine, "read_disk", lambda _: in_memory)
    with pytest.raises(DaopError, match="in memory"), scratch_folder(10):
        pass
