"""The comparisons with llama.cpp give it daop's own numbers, and say what they need where it is missing."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from daop.runtime.codecs.base import SCALE
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import VALUES, Mxfp4
from daop.runtime.codecs.plain import PLAIN

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
ROWS, COLUMNS = 6, 192


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("llama_cpp_common")


def read(name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """ggml's blocks of 32 as its ``dequantize_row`` functions read them: scale first, then the values."""
    head, body = {"q8_0": (2, 32), "q4_0": (2, 16), "mxfp4": (1, 16)}[name]
    each = blocks.reshape(ROWS, -1, head + body)
    first, last = each[..., :head], each[..., head:]
    if name == "q8_0":
        values = last.view(np.int8).astype(np.float32)
    else:
        nibbles = np.concatenate((last & 15, last >> 4), axis=-1)
        values = np.array(VALUES, np.float32)[nibbles] if name == "mxfp4" else nibbles.astype(np.float32) - 8
    scale = np.exp2(first.astype(np.float32) - 127) if name == "mxfp4" else first.copy().view(np.float16)
    return (values * scale.astype(np.float32)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize(
    "codec", [Integers(8, 32), Integers(8, 64), Integers(4, 32), Integers(4, 64)], ids=repr
)
def test_integers_are_the_same_numbers_in_ggmls_blocks(common: Any, codec: Integers) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.02
    parts = {"down" + suffix: piece for suffix, piece in codec.encode(weight).items()}
    blocks = common.expert_blocks(codec, parts)["down"]
    exact = codec.decode(parts, "down", COLUMNS, 0, ROWS).numpy()
    assert np.array_equal(read(f"q{codec.bits}_0", blocks), exact)


def test_a_scale_that_fp16_cannot_hold_is_refused(common: Any) -> None:
    codec = Integers(8, 32)
    parts = codec.encode(torch.randn(ROWS, COLUMNS) * 1e-6)
    with pytest.raises(ValueError, match="FP16"):
        common.as_blocks(codec, parts[""], parts[SCALE])


def test_mxfp4_is_the_same_numbers_in_ggmls_blocks(common: Any) -> None:
    codec = Mxfp4()
    parts = {
        "down": torch.randint(0, 256, (ROWS, COLUMNS // 32, 16), dtype=torch.uint8),
        "down" + SCALE: torch.randint(110, 130, (ROWS, COLUMNS // 32), dtype=torch.uint8),
    }
    blocks = common.expert_blocks(codec, parts)["down"]
    assert np.array_equal(read("mxfp4", blocks), codec.decode(parts, "down", COLUMNS, 0, ROWS).numpy())


def test_a_fused_gate_and_up_are_taken_apart(common: Any) -> None:
    both = torch.randn(2 * ROWS, COLUMNS).bfloat16()
    found = common.expert_blocks(PLAIN, {"gate_up": both, "down": torch.randn(COLUMNS, ROWS).bfloat16()})
    assert set(found) == {"gate", "up", "down"}
    up = torch.from_numpy(found["up"].copy()).view(torch.bfloat16)
    assert torch.equal(up, both[ROWS:])


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is not None, reason="llama.cpp's bindings are installed here"
)
@pytest.mark.parametrize("name", ["llama_cpp_experts", "llama_cpp_model"])
def test_without_the_bindings_it_says_how_to_install_them(name: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "models")] if name.endswith("model") else []
    program = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    ran = subprocess.run(
        program, cwd=BENCHMARKS.parent, env={"PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert "pip install llama-cpp-python gguf" in ran.stderr
    assert not (tmp_path / "models").exists()
