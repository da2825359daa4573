"""Approximate policies on the device ``cuda``: the host device's output, whatever starts early and
wherever it is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cuda_runs import DEVICES, machinery, open_device, open_standin, standin
from early_runs import APPROXIMATE, LAYERS, OPTIONS, PROMPT, Everything, K, profile, rows
from test_cuda_faults import exhaust, experts
from tiny_models import save_tiny

from daop.api import Runtime, load
from daop.quality import Batch, teacher
from daop.runtime.policies.base import Plan, Policy, make_policy
from daop.runtime.timeline import Timeline

AHEAD = ["bounded", "daop", "everything"]  # which start calls before they are due
NAMES = [*APPROXIMATE, "everything"]
SLOTS = 9  # half of the model's experts
STEPS = 12


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("model"))


class Beside(Everything):
    """Everything that misses is computed by the CPU: in time, early and late."""

    def plan(self, step: Any, missing: Any, view: Any) -> Plan:
        return Plan(host=missing)


def chosen(model: Path, name: str) -> Policy:
    policy = Beside() if name == "everything" else make_policy(name, options=OPTIONS[name])
    policy.profile = profile(model)
    return policy


def score(runtime: Runtime, sequences: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, Any]:
    found = teacher(runtime)(Batch(tokens=sequences, prompt=PROMPT))
    assert found.calls is not None
    return found.logits, found.calls


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, tuple[torch.Tensor, Any]]:
    """What the device host gives, which ``test_early`` compares with the definitions."""
    out = {}
    for name in NAMES:
        with load(model, policy=chosen(model, name), ecr=0.5) as runtime:
            out[name] = score(runtime, rows(3))
    return out


def check(found: tuple[torch.Tensor, Any], wanted: tuple[torch.Tensor, Any]) -> None:
    assert torch.allclose(found[0].cpu(), wanted[0], atol=2e-4), (found[0].cpu() - wanted[0]).abs().max()
    assert found[1].tolist() == wanted[1].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_output_is_the_hosts(model: Path, wanted: Any, name: str, device: str) -> None:
    gpu = standin(3)
    with open_device(device, model, gpu, chosen(model, name), SLOTS) as runtime:
        for _ in range(2):
            check(score(runtime, rows(3)), wanted[name])
        figures = runtime.statistics()
    assert figures["approximate"]["calls"] == 2 * 3 * STEPS * LAYERS * K
    assert sum(figures["requests"].values()) > 0
    assert gpu.faults == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_gives_the_same_alone_and_in_a_batch(model: Path, name: str, device: str) -> None:
    sequences = rows(4, seed=8)
    gpu = standin(4)
    with open_device(device, model, gpu, chosen(model, name), SLOTS) as runtime:
        together, calls = score(runtime, sequences)
        for index, tokens in enumerate(sequences):
            alone, own = score(runtime, (tokens,))
            assert torch.allclose(alone[0], together[index], atol=1e-5)
            assert own[0].tolist() == calls[index].tolist()
    assert gpu.faults == []


def early_calls(runtime: Runtime, around: Callable[[], None]) -> list[tuple[int, int]]:
    """(layer, rows) of every early call that is computed from now on; ``around`` is called before it is."""
    host, done = machinery(runtime).executor._host, []
    real = host.compute_call

    def compute(layer: int, flat: int, x: torch.Tensor) -> torch.Tensor:
        around()
        done.append((layer, len(x)))
        return real(layer, flat, x)

    host.compute_call = compute  # type: ignore[method-assign]
    return done


@pytest.mark.parametrize("name", AHEAD)
def test_calls_are_computed_before_they_are_due(model: Path, wanted: Any, name: str) -> None:
    """The next layer's choice is held back until what was started for it is done: it would never come, were
    it started any later."""
    with open_standin(model, standin(5), chosen(model, name), SLOTS) as runtime:
        executor = machinery(runtime).executor
        done = early_calls(runtime, lambda: None)
        real, waited = executor._bring, []

        def bring(*given: Any) -> Any:
            if executor._host._early is not None:
                for call in executor._host._early._due:
                    waited.append(call.result.result(timeout=20))
            return real(*given)

        executor._bring = bring  # type: ignore[method-assign, assignment]
        check(score(runtime, rows(3)), wanted[name])
        assert len(waited) == len(done) > 0


@pytest.mark.parametrize("name", ["deferral", "everything"])
def test_a_layer_does_not_wait_for_what_is_added_to_the_next(model: Path, wanted: Any, name: str) -> None:
    """What is deferred is held back until the next layer's choice is asked for."""
    with open_standin(model, standin(5), chosen(model, name), SLOTS) as runtime:
        executor = machinery(runtime).executor
        asked, seen = threading.Semaphore(0), []
        run, bring = executor._host._run, executor._bring

        def slowly(*given: Any) -> Any:
            if given[-1] == "deferred":
                seen.append(asked.acquire(timeout=20))
            return run(*given)

        def bring_and_say(*given: Any) -> Any:
            if executor._host.owes:
                asked.release()
            return bring(*given)

        executor._host._run = slowly  # type: ignore[method-assign, assignment]
        executor._bring = bring_and_say  # type: ignore[method-assign, assignment]
        check(score(runtime, rows(3)), wanted[name])
        assert seen
        assert all(seen)


@pytest.mark.parametrize("name", AHEAD)
def test_a_slow_cpu_changes_no_output(model: Path, wanted: Any, name: str) -> None:
    """Calls that are not begun, or not ended, when their layer is due."""
    dice, timeline = Random(1), Timeline()
    gpu = standin(6)
    with open_standin(model, gpu, chosen(model, name), SLOTS, watchers=[timeline]) as runtime:
        done = early_calls(runtime, lambda: time.sleep(0.004 * dice.random()))
        check(score(runtime, rows(3)), wanted[name])
    spans = [span for span in timeline.busy if span.what.startswith("pre-calculation")]
    assert len(spans) == len(done) > 0
    assert all(span.begin < span.end and span.track == "host" for span in spans)
    assert any(span.what == "pre-calculation" for span in spans)
    assert gpu.faults == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ram", [99.0, 8.0])
def test_memory_used_up_and_experts_on_disk_change_no_output(
    model: Path, wanted: Any, name: str, ram: float
) -> None:
    dice, gpu = Random(2), standin(7)
    with open_standin(model, gpu, chosen(model, name), SLOTS, ram=experts(model, ram)) as runtime:
        done = early_calls(runtime, lambda: None)
        exhaust(runtime, lambda: dice.random() < 0.03)
        check(score(runtime, rows(3)), wanted[name])
        assert machinery(runtime).shrinks > 0
        assert bool(done) == (name in AHEAD)
    assert gpu.faults == []


def test_a_call_that_fails_ends_the_run_and_the_next_is_right(model: Path, wanted: Any) -> None:
    broken = [True]

    def trouble() -> None:
        if broken[0]:
            raise RuntimeError("made up")

    with open_standin(model, standin(8), chosen(model, "everything"), SLOTS) as runtime:
        early_calls(runtime, trouble)
        with pytest.raises(RuntimeError, match="made up"):
            score(runtime, rows(3))
        broken[0] = False
        check(score(runtime, rows(3)), wanted["everything"])


def test_where_all_experts_are_resident_nothing_starts(model: Path) -> None:
    with open_standin(model, standin(9), chosen(model, "everything"), None) as runtime:
        done = early_calls(runtime, lambda: None)
        score(runtime, rows(2))
        assert not done
