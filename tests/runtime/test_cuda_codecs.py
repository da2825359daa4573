"""Experts in int8, int4, FP8 and MXFP4 on the device ``cuda``: decoded there, multiplied on the CPU by its
own kernels, and the same numbers in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_runs import DEVICES, machinery, open_device, standin
from quantised_models import save_fp8, save_mxfp4
from test_cuda_families import Thirds, logits
from test_packing import pack
from test_quantised_checkpoints import SIZES
from tiny_models import save_tiny

import daop
from daop.runtime.codecs.base import Codec
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4

PROMPT = list(range(3, 20))
CODECS: dict[str, Codec] = {
    "int8": Integers(8, 32),
    "int4": Integers(4, 32),
    "fp8": Fp8(),
    "mxfp4": Mxfp4(),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def save(codec: str, folder: Path) -> Path:
    if codec == "fp8":
        return save_fp8("qwen3_moe", folder, **SIZES["qwen3_moe"])
    if codec == "mxfp4":
        return save_mxfp4(folder, hidden_size=64, intermediate_size=96)
    source = save_tiny("qwen3_moe", folder.parent / "source", dtype=torch.bfloat16)
    pack(source, folder, dtype=codec, group=32)
    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS)
def test_quantised_experts_give_the_hosts_logits(codec: str, device: str, tmp_path: Path) -> None:
    """Some decoded on the device from slots and staging slots, some computed by the CPU from host memory. The
    device host is compared with the reference by the tests of codecs."""
    folder = save(codec, tmp_path / "model")
    with daop.load(folder, dtype="float32", ecr=0.5) as runtime:
        wanted = logits(runtime.model)
        tokens = runtime.generate([PROMPT], 6)[0].token_ids
    gpu = standin(1)
    with open_device(device, folder, gpu, Thirds(), 7, dtype="float32") as runtime:
        layouts = runtime.checkpoint.layouts
        assert {layout.codec for layout in layouts} == {CODECS[codec]}
        assert all(compute.groups_from == 0 for compute in machinery(runtime).compute)
        for _ in range(2):
            torch.testing.assert_close(logits(runtime.model), wanted, rtol=1e-4, atol=1e-4)
        assert runtime.generate([PROMPT], 6)[0].token_ids == tokens
        figures = runtime.statistics()
        assert min(figures["experts_streamed"], figures["experts_computed_in_place"]) > 0
        assert figures["memory_bytes"]["host_pinned"] == 18 * layouts[0].nbytes, "bytes as stored"
    assert gpu.faults == []
