"""Widening a checkpoint's experts changes its size, not its function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "widen_model.py"


def widen(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}  # whether daop is installed or not
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
        initializer_range=0.1, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("widen") / "source"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "README.md").write_text("the card of the narrow model")
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def test_the_function_is_unchanged(source: Path, tmp_path: Path) -> None:
    done = widen(source, tmp_path / "wide", "--intermediate", "200")
    assert done.returncode == 0, done.stderr
    narrow, wide = load(source), load(tmp_path / "wide")
    assert wide.config.moe_intermediate_size == 200
    assert wide.model.layers[0].mlp.experts.down_proj.shape == (8, 32, 200)
    ids = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, atol=1e-6, rtol=0)
    options = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(wide.generate(ids, **options), narrow.generate(ids, **options))
    assert not (tmp_path / "wide" / "README.md").exists()
    assert not (tmp_path / "wide.partial").exists()


def test_target_size_and_index(source: Path, tmp_path: Path) -> None:
    gib = 3 * 2**20 / 2**30
    done = widen(source, tmp_path / "wide", "--target-gib", str(gib))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["intermediate"] % 8 == 0
    assert 0.9 * gib * 2**30 < said["expert_bytes"] <= gib * 2**30
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == said["bytes"]
    assert {path.name for path in (tmp_path / "wide").glob("*.safetensors")} == set(
        index["weight_map"].values()
    )


def test_refuses_to_shrink_or_overwrite(source: Path, tmp_path: Path) -> None:
    shrunk = widen(source, tmp_path / "small", "--intermediate", "8")
    assert shrunk.returncode != 0
    assert "smaller" in shrunk.stderr
    assert not (tmp_path / "small").exists()
    again = widen(source, source, "--intermediate", "64")
    assert again.returncode != 0
    assert "exists" in again.stderr
