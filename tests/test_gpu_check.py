"""``benchmarks/gpu_check.py`` walks its plan without a GPU, so that it does not fail on one for a trifle."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from daop.hardware import load

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SECTIONS = ("model", "link", "experts", "rivals", "correct", "overlap", "policies", "simulated", "mixtral")


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


@pytest.mark.slow
def test_the_whole_plan_is_walked(
    gpu_check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = importlib.import_module("gpu_sections")
    monkeypatch.setattr(sections, "POLICIES", ("static", "adaptive"))
    monkeypatch.setattr(gpu_check, "SHARES", (0.25, 1.0))
    monkeypatch.setattr(
        gpu_check, "SECONDS", dict.fromkeys(gpu_check.SECONDS, 240)
    )  # a busy machine is no fault
    output, machine = tmp_path / "found.json", tmp_path / "machine.toml"
    given = ["--dry-run", "--seed", "1", "--output", str(output), "--machine", str(machine)]
    for name in SECTIONS:
        given += ["--only", name]
    assert gpu_check.main(given) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found["failed"] == []
    assert found["correct"]["wrong"] == []
    assert found["mixtral"]["correct"]["wrong"] == []
    assert found["tests"] == {"skipped": "not asked for"}
    assert found["dry_run"] is True
    assert json.loads(output.read_text())["policies"]["decode"] == found["policies"]["decode"]
    assert found["model"]["pinned_over_weights"] <= 1.02
    assert set(found["simulated"]["rows"]) == {
        f"{n}@{s}" for n in ("static", "adaptive") for s in (0.25, 1.0)
    }
    hardware = load(str(machine)).hardware
    assert hardware.tier == "device"
    assert hardware.link_pageable_gbs is not None
    assert "these figures say nothing about a GPU" in printed


def test_a_section_that_fails_or_hangs_does_not_end_the_run(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    def broken(_: object) -> dict[str, Any]:
        raise RuntimeError("made up")

    def hangs(_: object) -> dict[str, Any]:
        time.sleep(60)
        return {}

    monkeypatch.setattr(
        gpu_check,
        "SECTIONS",
        (("model", broken), ("link", hangs), ("experts", lambda _: {"fine": True}), ("rivals", broken)),
    )
    monkeypatch.setattr(gpu_check, "SECONDS", {"model": 1, "link": 0.2, "experts": 1, "rivals": 1})

    class Nothing:
        found: dict[str, Any] = {}  # noqa: RUF012

    output = tmp_path / "found.json"
    failed = gpu_check.run_sections(Nothing, output, 1.0, [])
    assert failed == ["model", "link", "rivals"]
    saved = json.loads(output.read_text())
    assert saved["experts"]["fine"] is True
    assert "made up" in saved["model"]["failed"]
    assert "OutOfTime" in saved["link"]["failed"]
