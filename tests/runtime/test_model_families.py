"""daop's models against transformers' own, for every family that the documentation lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import family_parity
import pytest
import tiny_models
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from daop.core import DaopError
from daop.runtime import families
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.layout import ExpertForm
from daop.runtime.model import build_model
from daop.runtime.reference import compute_expert, read_expert, reference_experts

CASES: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in tiny_models.FAMILIES] + list(
    tiny_models.SQUARE.items()
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "overrides"), CASES, ids=[f"{name}{'-square' if more else ''}" for name, more in CASES]
)
def test_same_as_transformers(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    parity = family_parity.measure(family, tmp_path, **overrides)
    assert parity.prefill < 1e-4
    assert parity.decode < 1e-4
    assert parity.greedy_equal
    # In bf16 both are off by rounding; ours must not be off much more than transformers' own.
    assert parity.bf16_ours < 2 * parity.bf16_theirs
    assert parity.routers_agree


def test_the_documented_table_is_what_is_tested() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\w[^|]*?) \|.*\| (\w+) \|[^|]*\|[^|]*\|$", family_parity.DOCUMENT.read_text(), re.M
    )
    assert [name for name, _, _ in rows if name != "family"] == sorted(tiny_models.FAMILIES)
    assert {greedy for name, _, greedy in rows if name != "family"} == {"equal"}
    assert sorted(families.TESTED) == sorted(tiny_models.FAMILIES)


@pytest.mark.parametrize("family", ["mixtral", "dbrx", "llama4_text", "gpt_oss"])
def test_expert_weights_are_neither_read_nor_allocated(family: str, tmp_path: Path) -> None:
    built = family_parity.load(tiny_models.save_tiny(family, tmp_path))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    experts = sum(built.checkpoint.geometry.bytes_of)
    ours = sum(tensor.numel() * tensor.itemsize for tensor in built.model.parameters())
    theirs = sum(tensor.numel() * tensor.itemsize for tensor in whole.parameters())
    assert ours == theirs - experts
    assert not any(tensor.is_meta for tensor in built.model.parameters())
    buffers = sum(tensor.numel() * tensor.itemsize for name, tensor in whole.state_dict().items())
    assert built.checkpoint.non_expert_bytes == buffers - experts


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text", "dbrx"])
@torch.no_grad()
def test_two_models_at_once(family: str, tmp_path: Path) -> None:
    inputs = family_parity.prompts(3)
    folders = [tiny_models.save_tiny(family, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    alone = [family_parity.load(folder).model(**inputs).logits for folder in folders]
    both = [family_parity.load(folder) for folder in folders]
    for _ in range(2):
        for built, wanted in zip(both, alone, strict=True):
            assert torch.equal(built.model(**inputs).logits, wanted)
    assert not torch.allclose(alone[0], alone[1], atol=0.1)


@torch.no_grad()
def test_ids_beyond_the_experts_are_padding(tmp_path: Path) -> None:
    built = family_parity.load(tiny_models.save_tiny("mixtral", tmp_path))
    run = reference_experts(built.checkpoint, built.forms)
    hidden, weights = torch.randn(5, tiny_models.H), torch.rand(5, 2)
    ids = torch.tensor([[0, 6], [1, 2], [6, 7], [3, 6], [5, 0]])
    kept = weights.masked_fill(ids >= tiny_models.E, 0.0)
    out = run(1, hidden, ids, weights)
    # Not to the last bit: a product rounds differently with more rows.
    torch.testing.assert_close(out, run(1, hidden, ids.clamp(max=tiny_models.E - 1), kept))
    assert not out[2].any()


@torch.no_grad()
def test_a_multimodal_llama4_gives_its_language_model(tmp_path: Path) -> None:
    text = tiny_models.tiny_config("llama4_text")
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    config = AutoConfig.for_model("llama4", text_config=text.to_dict(), vision_config=vision)
    from transformers import Llama4ForConditionalGeneration

    whole = Llama4ForConditionalGeneration(config).eval()
    tiny_models.randomise(whole, 3)
    whole.save_pretrained(tmp_path)
    built = family_parity.load(tmp_path, torch.float32)
    inputs = family_parity.prompts(1)
    assert (built.model(**inputs).logits - whole.language_model(**inputs).logits).abs().max() < 1e-4


def test_a_dense_model_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(DaopError, match=r"'llama' model without routed experts.*qwen3_moe"):
        open_checkpoint(tmp_path)


def test_an_unknown_kind_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "jetmoe",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(DaopError, match=r"'jetmoe' model.*qwen3_moe"):
        open_checkpoint(tmp_path)


def test_post_norm_comes_before_the_router_weight() -> None:
    form = ExpertForm(
        hidden=4,
        intermediate=4,
        has_gate=False,
        has_bias=False,
        transposed=False,
        interleaved=False,
        activation="relu",
        apply_gate=torch.relu,
        post_norm=lambda y: 10 * y,
    )
    x = torch.ones(1, 4)
    parts = {"up": torch.eye(4), "down": torch.eye(4)}
    assert torch.equal(compute_expert(form, parts, x), 10 * x)


def test_a_slot_holds_what_the_files_hold(tmp_path: Path) -> None:
    """An anchor that does not go through the model: one expert's numbers, read by safetensors itself."""
    from safetensors import safe_open

    checkpoint = open_checkpoint(tiny_models.save_tiny("qwen3_moe", tmp_path))
    views = checkpoint.layouts[2].views(read_expert(checkpoint, checkpoint.geometry.flat(2, 4)))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for role in ("gate", "up", "down"):
            assert torch.equal(
                views[role], file.get_tensor(f"model.layers.2.mlp.experts.4.{role}_proj.weight")
            )


@torch.no_grad()
def test_the_default_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    built = family_parity.load(tiny_models.save_tiny("olmoe", tmp_path, dtype=torch.float16))
    assert built.model.dtype == torch.float16
    theirs = family_parity.load_theirs(tmp_path, torch.float32)
    inputs = family_parity.prompts(1)
    assert (built.model(**inputs).logits.float() - theirs(**inputs).logits).abs().max() < 0.1
    run = build_model(built.checkpoint, lambda *_: torch.zeros(()), dtype=torch.float32)
    assert run.model.dtype == torch.float32
