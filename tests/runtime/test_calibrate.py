"""Calibration measures, and what it writes can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from daop.core import DaopError
from daop.hardware import HardwareProfile, parse, render
from daop.runtime.calibrate import measure, read_speed


def test_a_calibration_is_a_profile(tmp_path: Path) -> None:
    steps: list[str] = []
    hardware, sources = measure(tmp_path, 300_000, told=lambda step, _: steps.append(step))
    profile = HardwareProfile(hardware=hardware, about="here", sources=sources, derived={})
    assert list(tmp_path.iterdir()) == []
    assert profile.hardware.tier == "host"
    assert profile.hardware.link_gbs > 0.001
    assert profile.hardware.host_gflops >= profile.hardware.host_gbs
    assert parse(render(profile), "machine.toml") == profile
    assert steps[-1] == "done"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DaopError, match="--folder"):
        read_speed(tmp_path / "none", 4096)
