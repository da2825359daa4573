"""The device ``cuda`` against the reference, family by family: what each adds to an expert, in its own
arrangement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_parity
import pytest
import tiny_models
import torch
from cuda_runs import DEVICES, machinery, open_device, standin

from daop.runtime.policies.base import Plan, Policy

FAMILIES = (
    *("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "dbrx", "llama4_text", "nemotron_h", "gemma4_text"),
    *("granitemoe", "deepseek_v3", "lfm2_moe", "minimax_m2"),
)
WIDE = 24  # an intermediate size whose rows are whole 16 bytes in bf16, as grouped products want it
GROUPED: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": WIDE},
    "qwen3_moe": {"moe_intermediate_size": WIDE},
    "gpt_oss": {"intermediate_size": WIDE},
    "nemotron_h": {"moe_intermediate_size": WIDE},
    "llama4_text": {"intermediate_size": WIDE},
    "granitemoe": {"intermediate_size": WIDE},
}


pytestmark = pytest.mark.usefixtures("one_thread")


class Thirds(Policy):
    """Serves misses in all three ways."""

    def plan(self, step: Any, missing: Any, view: Any) -> Plan:
        return Plan(keep=missing[::3], stream=missing[1::3], host=missing[2::3])


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    inputs = {name: tensor.to(model.device) for name, tensor in family_parity.prompts(3).items()}
    real = inputs["attention_mask"].bool()
    out: torch.Tensor = model(**inputs).logits[real].float().cpu()
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_references(family: str, device: str, tmp_path: Path) -> None:
    tiny_models.save_tiny(family, tmp_path)
    wanted = logits(family_parity.load(tmp_path, torch.float32).model)
    gpu = standin(1)
    with open_device(device, tmp_path, gpu, Thirds(), 8) as runtime:
        for _ in range(2):
            assert (logits(runtime.model) - wanted).abs().max() < 1e-4
        figures = runtime.statistics()
        assert min(figures["experts_streamed"], figures["experts_computed_in_place"]) > 0
    assert gpu.faults == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [5, None])
@pytest.mark.parametrize("family", GROUPED)
def test_grouped_products_in_bf16(family: str, slots: int | None, device: str, tmp_path: Path) -> None:
    """As good as transformers' own bf16, compared with float32 of the same weights; with slots for all
    experts the host does not see what is chosen."""
    tiny_models.save_tiny(family, tmp_path, dtype=torch.bfloat16, **GROUPED[family])
    truth = logits(family_parity.load_theirs(tmp_path, torch.float32))
    theirs = logits(family_parity.load_theirs(tmp_path, torch.bfloat16))
    gpu = standin(2)
    with open_device(device, tmp_path, gpu, "lru", slots) as runtime:
        for compute in machinery(runtime).compute:
            assert compute.groups_from > 0, "this layout can be grouped"
            compute.groups_from = 1
        ours = [logits(runtime.model) for _ in range(3)]
        calm = machinery(runtime).executor._calm.on
        requests = runtime.statistics()["requests"]
    assert calm == (slots is None)
    assert sum(requests.values()) > 0
    assert (requests["misses"] == 0) == (slots is None)
    for one in ours:
        assert (one - truth).abs().median() < 2 * (theirs - truth).abs().median()
    assert gpu.faults == []


def test_what_the_host_does_not_see_is_counted_all_the_same(tmp_path: Path) -> None:
    tiny_models.save_tiny("qwen3_moe", tmp_path, dtype=torch.bfloat16, **GROUPED["qwen3_moe"])
    found = []
    for calm in (True, False):
        with open_device("standin", tmp_path, standin(0), "static", None) as runtime:
            executor = machinery(runtime).executor
            for compute in machinery(runtime).compute:
                compute.groups_from = 1
            assert executor._calm.on
            executor._calm.on = executor._calm._possible = calm
            runtime.reset_statistics()
            tokens = [answer.token_ids for answer in runtime.generate([[5, 6, 7], [8, 9, 10]], 5)]
            figures = runtime.statistics()
            found.append((tokens, figures["requests"], figures["hit_rate_by_layer"]))
    assert found[0] == found[1]


def test_padding_is_nobodys(tmp_path: Path) -> None:
    """Ids outside the experts add nothing, on both paths."""
    tiny_models.save_tiny("gpt_oss", tmp_path, dtype=torch.bfloat16, **GROUPED["gpt_oss"])
    hidden = torch.randn(6, tiny_models.H).bfloat16()
    weights = torch.rand(6, 2)
    ids = torch.tensor([[0, 6], [1, 2], [6, 7], [3, -1], [5, 0], [6, 6]])
    kept = weights.masked_fill((ids >= tiny_models.E) | (ids < 0), 0.0)
    for slots in (None, 4):
        with open_device("standin", tmp_path, standin(0), "static", slots) as runtime:
            executor = machinery(runtime).executor
            assert executor._calm.on == (slots is None)
            out = executor(1, hidden, ids, weights)
            wanted = executor(1, hidden, ids.clamp(0, tiny_models.E - 1), kept)
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)
        assert not out[2].any()
        assert not out[5].any()
