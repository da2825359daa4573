"""What goes wrong on the device ``cuda``: reads that fail, memory that is used up, memory that cannot be
locked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cuda_runs import DEVICES, generate, machinery, open_device, standin
from test_cuda_executor import reference_tokens
from test_executor import PROMPTS, STEPS, AlwaysWrong
from tiny_models import save_tiny

from daop.api import Runtime
from daop.core import DaopError
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.cuda.machinery import STAGING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    return reference_tokens(model)


pytestmark = pytest.mark.usefixtures("one_thread")


def experts(model: Path, count: float) -> int:
    return int(count * open_checkpoint(model).layouts[0].nbytes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["speculative", "fiddler", AlwaysWrong])
@pytest.mark.parametrize(("pinned", "ram"), [(0.0, 99.0), (7.5, 99.0), (99.0, 6.0), (2.0, 0.0), (0.0, 5.0)])
def test_what_cannot_be_locked_or_kept_in_ram_is_only_slower(
    model: Path, reference: list[list[int]], policy: Any, pinned: float, ram: float, device: str
) -> None:
    gpu = standin(3, pin_limit=experts(model, pinned))
    chosen = policy if isinstance(policy, str) else policy()
    with open_device(device, model, gpu, chosen, 5, ram=experts(model, ram)) as runtime:
        assert generate(runtime, PROMPTS, STEPS) == reference
        assert generate(runtime, PROMPTS, STEPS, batch=3) == reference
        held = runtime.statistics()["memory_bytes"]
        weights = machinery(runtime).weights
    assert gpu.faults == []
    assert gpu.locked == {}, "what was locked is unlocked in the end"
    assert held["experts_on_disk"] == 18 - min(18, int(ram))
    if pinned < ram:
        assert held["host_pageable"] > 0 or ram == 0
        assert held["staged"] > 0
        assert weights.refusal or ram == 0
        assert "page-locked" in weights.describe() or ram == 0
    if ram < 18:
        assert f"{held['experts_on_disk']} experts do not fit in RAM" in weights.describe()


def break_reads(runtime: Runtime) -> Callable[[bool], None]:
    """A switch: whether reads of the checkpoint fail."""
    reader = machinery(runtime).reader
    real = reader.read
    broken = [False]

    def read(file: int, offset: int, out: Any) -> None:
        if broken[0]:
            raise OSError(5, "Input/output error")
        real(file, offset, out)

    reader.read = read  # type: ignore[method-assign]

    def switch(on: bool) -> None:
        broken[0] = on

    return switch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["on_demand", "lru", "static", "speculative"])
def test_a_read_error_mid_run_is_told_and_the_next_run_is_right(
    model: Path, reference: list[list[int]], policy: str, device: str
) -> None:
    gpu = standin(4)
    with open_device(device, model, gpu, policy, 5, ram=experts(model, 2)) as runtime:
        switch = break_reads(runtime)
        assert generate(runtime, PROMPTS, STEPS) == reference
        switch(True)
        with pytest.raises(DaopError, match=r"cannot read expert \d of .*Input/output error"):
            generate(runtime, PROMPTS, STEPS)
        switch(False)
        assert generate(runtime, PROMPTS, STEPS) == reference
    assert gpu.faults == []


def exhaust(runtime: Runtime, when: Callable[[], bool]) -> None:
    """Computing experts runs out of memory whenever ``when`` says so."""
    for compute in machinery(runtime).compute:
        real = compute.begin

        def begin(*given: Any, real: Any = real) -> Any:
            if when():
                raise torch.OutOfMemoryError("made up")
            return real(*given)

        compute.begin = begin  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["speculative", "lru", "static", "adaptive", "fiddler"])
def test_memory_used_up_in_the_middle_costs_slots_not_tokens(
    model: Path, reference: list[list[int]], policy: str, device: str
) -> None:
    gpu, dice = standin(5), Random(1)
    with open_device(device, model, gpu, policy, 14) as runtime:
        exhaust(runtime, lambda: dice.random() < 0.02)
        assert generate(runtime, PROMPTS, STEPS) == reference
        assert generate(runtime, PROMPTS, STEPS, batch=3) == reference
        figures = runtime.statistics()
        found = machinery(runtime)
        assert found.shrinks > 0
        assert figures["slots"] == sum(found.memory.slots) < 14
        assert found.residency.used_slots == figures["slots"], "what was resident is brought back"
        assert figures["memory_bytes"]["shrinks"] == found.shrinks
    assert gpu.faults == []


@pytest.mark.parametrize("device", DEVICES)
def test_memory_used_up_without_a_slot_left_ends_in_an_error(model: Path, device: str) -> None:
    with open_device(device, model, standin(6), "lru", 6) as runtime:
        exhaust(runtime, lambda: True)
        with pytest.raises(DaopError, match=r"no expert is resident any more.*--context"):
            runtime.generate([PROMPTS[0]], 2)
        assert sum(machinery(runtime).memory.slots) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_memory_used_up_outside_the_experts_begins_again(
    model: Path, reference: list[list[int]], device: str
) -> None:
    calls = [0]

    def trouble(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("made up")

    with open_device(device, model, standin(7), "lru", 14) as runtime:
        runtime.model.register_forward_pre_hook(trouble)
        assert generate(runtime, PROMPTS, STEPS) == reference
        assert machinery(runtime).shrinks == 1
        calls[0] = 0
        said: list[str] = []
        runtime.tokenizer = Letters()
        with pytest.raises(DaopError, match="so try again"):
            runtime.generate([PROMPTS[0]], STEPS, on_text=lambda _, text: said.append(text))
        assert said
        assert machinery(runtime).shrinks == 2


class Letters:
    """A tokenizer as far as it is needed here."""

    pad_token_id = 0

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ram", [99.0, 11.0, 4.0])
def test_staging_slots_are_enough_for_any_number_of_streams(
    model: Path, reference: list[list[int]], ram: float, device: str
) -> None:
    """Also where some wait for a disk and others do not, one after the other in the same slot."""
    gpu = standin(8)
    with open_device(device, model, gpu, "on_demand", 0, ram=experts(model, ram)) as runtime:
        assert generate(runtime, PROMPTS, STEPS, batch=3) == reference
        assert machinery(runtime).memory.staging[0].count == STAGING < 6
    assert gpu.faults == []
