"""FP8 and MXFP4 checkpoints run as they are stored, and give what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import load, load_theirs, prompts
from quantised_models import FP8, configuration, dequantised, rewrite, save_fp8, save_mxfp4
from safetensors.torch import load_file

import daop
from daop.core import DaopError
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.mxfp4 import Mxfp4

SIZES: dict[str, Any] = {
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64},
    "deepseek_v3": {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
    },
}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8("qwen3_moe", tmp_path_factory.mktemp("fp8") / "model", **SIZES["qwen3_moe"])


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    return save_mxfp4(folder, hidden_size=64, intermediate_size=96)


@torch.no_grad()
def compare(folder: Path, plain: Path) -> None:
    """Prefill of a batch, the reference experts; then decode, the executor's."""
    theirs = load_theirs(dequantised(folder, plain), torch.float32)
    inputs = prompts(3)
    real = inputs["attention_mask"].bool()
    wanted = theirs(**inputs).logits[real]
    got = load(folder, torch.float32).model(**inputs).logits[real]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    ids = prompts(1)["input_ids"]
    tokens = theirs.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    with daop.load(folder, dtype="float32", ecr=0.5) as runtime:
        got = runtime.model(**inputs).logits[real]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert runtime.generate([ids[0].tolist()], 6)[0].token_ids == tokens


@pytest.mark.parametrize("family", SIZES)
def test_fp8_parity(family: str, tmp_path: Path) -> None:
    folder = save_fp8(family, tmp_path / "model", **SIZES[family])
    checkpoint = open_checkpoint(folder)
    assert {layout.codec for layout in checkpoint.layouts} == {Fp8()}
    compare(folder, tmp_path / "plain")


def test_mxfp4_parity(mxfp4: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mxfp4)
    assert {layout.codec for layout in checkpoint.layouts} == {Mxfp4()}
    compare(mxfp4, tmp_path / "plain")


def test_bytes_are_counted_as_stored(fp8: Path, mxfp4: Path) -> None:
    values = 3 * 256 * 128  # gate, up and down, each with one scale in F32 for 128 x 128
    assert open_checkpoint(fp8).geometry.expert_bytes[0] == values + 3 * 4 * 2
    blocks = (2 * 96 * 64 + 64 * 96) // 32
    assert open_checkpoint(mxfp4).geometry.expert_bytes[0] == blocks * 17 + (2 * 96 + 64) * 2


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"bits": 4},
        "gptq",
        {**FP8, "weight_block_size": [64, 64]},
        {**FP8, "weight_block_size": None},
        {**FP8, "fmt": "e5m2"},
    ],
)
def test_formats_that_are_not_read(said: Any, fp8: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in fp8.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    configuration(folder, said)
    with pytest.raises(DaopError, match=r"daop reads .*in (one of these|BF16)"):
        open_checkpoint(folder)


def spoil(source: Path, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A copy with tensors replaced (or left out, None), by the end of their name with dots as underscores."""
    folder.mkdir()
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for ending, tensor in changes.items():
        name = next(name for name in sorted(tensors) if name.replace(".", "_").endswith(ending))
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    rewrite(folder, tensors, FP8 if source.parent.name.startswith("fp8") else {"quant_method": "mxfp4"})
    return folder


def test_damage_is_named(fp8: Path, mxfp4: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (fp8, {"experts_1_up_proj_weight_scale_inv": None}, "experts.1.up_proj.weight.*dtype F8_E4M3"),
        (fp8, {"experts_1_up_proj_weight_scale_inv": torch.ones(2, 2)}, r"has shape \[2, 2\]"),
        (
            fp8,
            {"experts_1_up_proj_weight": torch.ones(128, 256).bfloat16()},
            "reads such a tensor in F8_E4M3",
        ),
        (fp8, {"self_attn_k_proj_weight_scale_inv": torch.ones(3, 3)}, "not a weight in fp8"),
        (fp8, {"self_attn_k_proj_weight_scale_inv": torch.full((1, 2), torch.nan)}, "holds NaN"),
        (mxfp4, {"gate_up_proj_scales": None}, "lacks the gate_up weights"),
        (mxfp4, {"down_proj_blocks": torch.ones(6, 64, 2, 16).byte()}, "has shape"),
    ]
    for number, (source, changes, message) in enumerate(cases):
        folder = spoil(source, tmp_path / str(number), **changes)
        with pytest.raises(DaopError, match=message):
            daop.load(folder)


@pytest.mark.parametrize(("ecr", "policy"), [(0.0, "lru"), (1.0, "static"), (0.9, "speculative")])
def test_an_expert_whose_scale_is_nan_is_refused(fp8: Path, tmp_path: Path, ecr: float, policy: str) -> None:
    """However it came: read on demand, resident from the start, brought ahead; and also when asked again."""
    folder = spoil(
        fp8, tmp_path / "m", layers_0_mlp_experts_0_down_proj_weight_scale_inv=torch.full((2, 1), torch.nan)
    )
    with daop.load(folder, ecr=ecr, policy=policy) as runtime:
        for _ in range(2):
            with pytest.raises(DaopError, match=r"down_scale tensor of expert 0 of .*not finite"):
                runtime.generate([list(range(3, 40))], 2)
