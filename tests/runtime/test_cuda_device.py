"""Bad input of the device ``cuda``: what was found, what is needed, what to type. And the costs it
measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_runs import machinery, open_standin, standin
from cuda_standin import StandIn
from tiny_models import save_tiny

from daop.core import DaopError
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.cuda import measure
from daop.runtime.cuda.device import CudaFacts, find_problem
from daop.runtime.cuda.machinery import CudaDevice
from daop.runtime.machinery import Wishes, find_device

GOOD = CudaFacts(
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    devices=1,
    cupy={"cupy-cuda13x": "14.2.0"},
    driver=13000,
    cupy_runtime=13020,
)
NO_DRIVER = "Found no NVIDIA driver on your system."
OLD = "The NVIDIA driver on your system is too old (found version 11040)."


def test_a_machine_that_has_all_of_it_has_no_problem() -> None:
    assert find_problem(GOOD) == ""
    assert (
        find_problem(replace(GOOD, torch_cuda="12.8", cupy={"cupy-cuda12x": "14.2.0"}, cupy_runtime=12090))
        == ""
    )
    assert find_problem(replace(GOOD, cupy={"cupy": "14.2.0"})) == "", "built from source"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch_cuda": None, "torch": "2.13.0+cpu"}, r"torch 2.13.0\+cpu is a build for CPUs.*pip install"),
        (
            {"devices": 0, "torch_problem": NO_DRIVER},
            r"Found no NVIDIA driver.*NVIDIA GPU.*--gpus all",
        ),
        ({"devices": 0}, r"CUDA_VISIBLE_DEVICES"),
        (
            {"devices": 0, "torch_problem": OLD},
            r"too old for torch 2.11.0.*11040.*CUDA 13.0: update",
        ),
        ({"cupy": {}}, r"CuPy is missing.*pip install \"daop\[cuda13\]\""),
        ({"cupy": {}, "torch_cuda": "12.8"}, r"pip install \"daop\[cuda12\]\""),
        (
            {"cupy": {"cupy-cuda12x": "14.2.0"}},
            r"cupy-cuda12x 14.2.0 is for another CUDA than torch 2.11.0.*pip uninstall cupy-cuda12x; pip",
        ),
        ({"cupy_problem": "libcudart.so: cannot open"}, r"CuPy does not work here \(libcudart.so"),
        ({"driver": 12080}, r"driver is for CUDA 12.8.*CuPy needs 13.2.*CUDA 12,"),
        ({"torch_cuda": "11.8"}, r"built for CUDA 11.8.*CUDA 12 or 13"),
    ],
)
def test_what_is_missing_is_said_with_the_remedy(change: dict[str, object], said: str) -> None:
    import re

    problem = find_problem(replace(GOOD, **change))  # type: ignore[arg-type]
    assert re.search(said, problem), problem
    if "pip uninstall" not in problem:
        assert "--device host" in problem


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_device_is_refused(model: Path) -> None:
    with pytest.raises(DaopError, match="--device host"):
        find_device("cuda", open_checkpoint(model), Wishes())
    with pytest.raises(DaopError, match="--device tpu is not known; known: host, cuda"):
        find_device("tpu", open_checkpoint(model), Wishes())


def test_more_than_is_free_is_an_error_with_the_numbers(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    small = StandIn(free=200 << 20)  # of 400 MiB: another process holds the rest
    with pytest.raises(
        DaopError, match=r"does not fit even without a resident expert.*free of the 400 MiB of cpu"
    ):
        CudaDevice(checkpoint, Wishes(context=1 << 17), gpu=small)
    huge = 1 << 40
    with pytest.raises(
        DaopError, match=r"free of the 400 MiB of cpu; 200 MiB are in use, nvidia-smi says by whom"
    ):
        CudaDevice(checkpoint, Wishes(context=1 << 17, fast_memory=huge), gpu=small)


def test_a_budget_is_what_was_asked_and_auto_is_everything(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    auto = CudaDevice(checkpoint, Wishes(), gpu=StandIn())
    assert auto.estimate.ecr == 1
    half = CudaDevice(checkpoint, Wishes(ecr=0.5), gpu=StandIn())
    assert half.estimate.slots == (9,)
    size = checkpoint.layouts[0].nbytes
    assert CudaDevice(checkpoint, Wishes(fast_memory=5 * size), gpu=StandIn()).estimate.slots == (5,)


def test_costs_are_measured_at_the_start(model: Path) -> None:
    with open_standin(model, standin(0), "lru", 5) as runtime:
        found = machinery(runtime).hardware
        assert found.tier == "device"
        assert found.name == "this machine"
        costs = runtime._executor.conductor.costs
        assert costs.host_beside
        assert 0 < costs.device(0, 1) <= costs.device(0, 512)
        assert 0 < costs.host(0, 1) <= costs.host(0, 512)
        assert costs.copy(0) > 0
    with open_standin(model, standin(0), "lru", 5, ram=0) as runtime:
        assert "not measured" in machinery(runtime).hardware.name


def test_a_profile_is_what_was_measured() -> None:
    hardware = measure.as_hardware(
        name="made up",
        nbytes=10_000_000,
        copied=10_000_000,
        pinned=400e-6 + 10e-6,
        small=10e-6,
        pageable=2e-3,
        device={1: 10e-6, 64: 20e-6},
        host={1: 200e-6, 16: 1e-3},
        bring=30e-6,
        layer=50e-6,
        layer_per_row=1e-6,
    )
    assert (hardware.link_gbs, hardware.link_latency_us) == (25.0, 10.0)
    assert hardware.link_pageable_gbs == 5.0
    assert hardware.host_gbs == 50.0
    assert hardware.host_gflops == 160.0  # 16 tokens x 10 MB of bf16, two operations per two bytes, in 1 ms
    assert hardware.device_gbs == 1000.0
    assert hardware.device_gflops == 32000.0
    assert (hardware.layer_us, hardware.layer_us_per_row, hardware.activation_us) == (50.0, 1.0, 30.0)
