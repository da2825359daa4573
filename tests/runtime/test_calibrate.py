"""Calibration measures with a model's own experts, and what it writes can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from daop import calibration
from daop.agreement import CLOCKLESS, run_and_replay
from daop.core import DaopError
from daop.hardware import parse, render
from daop.prompts import Prompt
from daop.runtime.calibrate import Calibration, calibrate_host
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.measure_formats import spread, typical
from daop.runtime.policies.base import POLICIES
from daop.synthetic_model import synthetic


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    synthetic(folder, 96 * 1024)
    return folder


@pytest.fixture(scope="module")
def calibrated(model: Path) -> Calibration:
    return calibrate_host(open_checkpoint(model), seconds=0.5)


def test_a_calibration_is_a_profile(calibrated: Calibration, model: Path) -> None:
    profile = calibration.as_profile(calibrated, "here")
    assert parse(render(profile), "machine.toml") == profile
    assert calibrated.hardware.tier == "host"
    assert calibrated.expert_bytes == open_checkpoint(model).layouts[0].stored_bytes
    assert calibrated.weight_bits == 16.0
    assert calibrated.hardware.link_slows >= 1
    assert calibrated.hardware.device_gflops >= calibrated.hardware.device_gbs
    assert 0 < calibrated.hardware.layer_us < 1e6
    assert "n=" in calibrated.sources["link_gbs"], "the spread is told"


def test_time_is_bounded_by_what_was_asked(model: Path) -> None:
    steps: list[str] = []
    calibrate_host(open_checkpoint(model), seconds=0.1, told=lambda step, _: steps.append(step))
    assert steps[-1] == "done"
    with pytest.raises(DaopError, match="--seconds"):
        calibrate_host(open_checkpoint(model), seconds=0)


def test_rare_interruptions_do_not_count() -> None:
    assert typical([1.0] * 9 + [100.0]) == 1.0
    assert typical([2.0]) == 2.0
    assert spread([]) == "not measured"


def test_a_run_finds_the_calibration_of_its_machine(
    calibrated: Calibration, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checkpoint = open_checkpoint(model)
    hardware, source = calibration.costs_for(checkpoint, None)
    assert hardware is None
    assert "daop calibrate" in source
    path = calibration.save(calibration.as_profile(calibrated, "here"), checkpoint)
    assert path is not None
    assert calibration.costs_for(checkpoint, None) == (calibrated.hardware, str(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "97")
    assert calibration.costs_for(checkpoint, None)[0] is None, "other threads are another machine"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path.write_text("nonsense")
    hardware, source = calibration.costs_for(checkpoint, None)
    assert hardware is None
    assert "damaged" in source
    with pytest.raises(DaopError, match="describes a GPU"):
        calibration.costs_for(checkpoint, "rtx4090")


def test_a_cache_that_cannot_be_written_is_no_failure(
    calibrated: Calibration, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert calibration.save(calibration.as_profile(calibrated, "here"), open_checkpoint(model)) is None


def test_the_policies_decide_by_calibrated_costs(
    calibrated: Calibration, model: Path, tmp_path: Path
) -> None:
    import daop

    file = tmp_path / "machine.toml"
    file.write_text(render(calibration.as_profile(calibrated, "here")))
    with daop.load(model, policy="lru", ecr=0.5, hardware=str(file)) as runtime:
        assert runtime.costs_from == str(file)
        costs = runtime._executor.conductor.costs
        hardware = calibrated.hardware
        size = calibrated.expert_bytes
        assert costs.copy(0) == pytest.approx(
            hardware.link_latency_us * 1e-6 + size / hardware.link_gbs / 1e9
        )
        assert costs.layer(1) == pytest.approx(hardware.layer_us * 1e-6)
        (own,) = hardware.curves
        for tokens, microseconds in zip(own.tokens, own.microseconds, strict=True):
            assert costs.device(0, tokens) == pytest.approx(microseconds * 1e-6)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DaopError, match="--expert-bytes"):
        synthetic(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(CLOCKLESS))
def test_the_simulator_repeats_what_the_executor_did(
    policy: str, calibrated: Calibration, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Prompt | list[int]] = [[5, 9, 200], [7] * 30]
    ran = run_and_replay(model, asked, policy, 0.4, calibrated, max_new_tokens=12)
    assert ran.same_hits
    assert ran.measured["requests"] == ran.simulated["requests"]
    assert ran.measured["bytes"]["demand"] == ran.simulated["bytes"]["demand"]
    with capsys.disabled():
        print(f"\n{policy}: simulated over measured tokens/s {ran.ratio:.2f}", end=" ")


def test_policies_without_a_clock_are_known() -> None:
    assert set(POLICIES.names()) >= CLOCKLESS
    assert all(not POLICIES.get(name).horizon for name in CLOCKLESS)
