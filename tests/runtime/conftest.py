"""Fixtures that several modules ask for by name."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from written_checkpoints import Tensors

from daop.core import DaopError
from daop.runtime import native_library
from daop.runtime.native import Kernels

# avx512vnni has avx512's kernels for plain weights and its own for quantised ones, which avx512bf16 has too.
X86 = ["avx512bf16", "avx512vnni", "avx2", "portable"]
VARIANTS = ["neon_dots", "neon"] if platform.machine() == "aarch64" else X86


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products are faster on one thread than shared among several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as shipped, but with the AVX-512 code in halves, so that it runs on any AVX2 machine."""
    path = tmp_path_factory.mktemp("native") / "_experts.so"
    try:
        command = native_library.compile_command(path, ("-shared", "-fPIC", "-DDAOP_EMULATE_AVX512"))
    except DaopError as error:
        pytest.skip(str(error))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(params=VARIANTS)
def kernels(library: Path, request: pytest.FixtureRequest) -> Kernels:
    """Every variant of them that this CPU can run."""
    if request.param not in Kernels(library).variants:
        pytest.skip(f"this CPU has no {request.param}")
    return Kernels(library, request.param)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers stores it; to be left as it is."""
    from tiny_models import save_tiny  # loads transformers, which most modules do without

    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("original"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tensors(original: Path) -> Tensors:
    """What is stored in ``original``."""
    stored: Tensors = load_file(original / "model.safetensors")
    return stored


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of ``original`` to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))
