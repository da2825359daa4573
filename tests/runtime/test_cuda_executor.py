"""The device ``cuda`` without CUDA: its whole request path over memory on the host that behaves as badly as a
GPU's may, and on the real device where there is one. Policies, budgets and delays change time, never the
output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_runs import DEVICES, generate, open_device, poison, standin
from test_executor import PROMPTS, STEPS
from tiny_models import save_tiny

from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.model import build_model
from daop.runtime.policies.base import POLICIES, Plan, Policy
from daop.runtime.reference import reference_experts

EXACT = [name for name, kind in POLICIES.items() if kind.exact and not kind.needs_future]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("qwen3_moe", path)
    return path


def reference_tokens(model: Path) -> list[list[int]]:
    checkpoint = open_checkpoint(model)
    built = build_model(checkpoint, lambda *call: reference_experts(checkpoint, built.forms)(*call))
    out = []
    for prompt in PROMPTS:
        tokens = built.model.generate(
            torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=0
        )
        out.append(tokens[0, len(prompt) :].tolist())
    return out


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    return reference_tokens(model)


class Everywhere(Policy):
    """Serves misses in all three ways in turn, and keeps speculating."""

    horizon = 1

    def plan(self, step, missing, view):  # type: ignore[no-untyped-def]
        return Plan(keep=missing[::3], stream=missing[1::3], host=missing[2::3])


CASES = [
    *((name, 7) for name in EXACT),
    *((name, count) for name in ("lru", "static", "speculative") for count in (0, 1, 3, 18)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("policy", "count"), CASES)
def test_every_policy_and_budget_gives_the_reference_tokens(
    model: Path, reference: list[list[int]], policy: str, count: int, device: str
) -> None:
    gpu = standin(count)
    with open_device(device, model, gpu, policy, count) as runtime:
        poison(runtime)
        assert generate(runtime, PROMPTS, STEPS) == reference
        assert generate(runtime, PROMPTS, STEPS, batch=3) == reference
        figures = runtime.statistics()
        assert figures["slots"] == count
        assert sum(figures["requests"].values()) > 0
        assert figures["ecr"] == pytest.approx(count / 18)
    assert gpu.faults == []
