"""What the comparisons with llama.cpp share: bindings, processes that take turns, experts as ggml's blocks.

A daop expert in bf16, INT8, INT4 or MXFP4 is the same numbers in a type of ggml's (BF16, Q8_0, Q4_0, MXFP4):
integers and power-of-two scales are taken over as they are, BF16 scales become FP16, which ``as_blocks``
checks to be exact. So both sides compute with equal weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from daop.runtime.codecs.base import SCALE, Codec
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4

GGML_TYPES = {"bf16": 30, "int8": 8, "int4": 2, "mxfp4": 39}
"""ggml's number of the type that holds a format's numbers."""
GGML_NAMES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0", "mxfp4": "MXFP4"}
BLOCK = 32  # values that share a scale, in each of ggml's types here
REST = 0.1  # seconds after which another process' threads have stopped spinning
HOW = (
    "this benchmark needs llama.cpp's Python bindings and its file format: CMAKE_ARGS=-DGGML_NATIVE=ON "
    "pip install llama-cpp-python gguf (it compiles llama.cpp for this machine: minutes, a C++ compiler)"
)
Bytes = NDArray[np.uint8]
_SILENCE: list[Any] = []
Result = TypeVar("Result")


def bindings(name: str = "llama_cpp") -> Any:
    """The module ``llama_cpp`` or ``gguf``; ends the program with a way to install them if it is missing."""
    if any(importlib.util.find_spec(needed) is None for needed in ("llama_cpp", "gguf")):
        raise SystemExit(HOW)
    module: Any = importlib.import_module(name)
    if name == "llama_cpp" and not _SILENCE:
        _SILENCE.append(module.llama_log_callback(lambda level, text, data: None))  # must outlive every call
        module.llama_log_set(_SILENCE[0], None)
    return module


class Side:
    """One contender's process. Two thread pools in one process would take the cores from each other, since
    idle OpenMP threads spin for a while; so do those of another process, which ``call`` waits for."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        os.environ.pop("OMP_WAIT_POLICY", None)  # both sides as they are by default
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """The function's result there; what it keeps in its module stays for the next call."""
        time.sleep(REST)
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        self._pool.shutdown()


def as_blocks(codec: Codec, weight: torch.Tensor, scale: torch.Tensor | None) -> Bytes:
    """Rows of a weight as daop stores them, as ggml does: uint8 [rows, bytes]."""
    if scale is None:
        return weight.contiguous().view(torch.uint8).numpy().reshape(len(weight), -1)
    rows = len(weight)
    if isinstance(codec, Mxfp4):
        pairs = weight.reshape(rows, -1, BLOCK // 2)
        values = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(rows, -1, BLOCK)
        head = scale.reshape(rows, -1, 1)
        return torch.cat((head, _nibbles(values)), dim=-1).view(rows, -1).numpy()
    assert isinstance(codec, Integers)
    half = scale.repeat_interleave(codec.group // BLOCK, dim=1).half()
    if not bool((half.float() == scale.float().repeat_interleave(codec.group // BLOCK, dim=1)).all()):
        raise ValueError("a scale is not the same number in FP16")
    head = half.unsqueeze(-1).view(torch.uint8)  # [rows, blocks, 2]
    if codec.bits == 8:
        body = weight.view(torch.uint8).view(rows, -1, BLOCK)
    else:  # blocks of 64, of which a byte's halves are 32 values apart, each plus 8 as ggml has it
        halves = weight.view(rows, -1, 1, BLOCK)
        body = _nibbles(torch.cat((halves & 15, halves >> 4), dim=2).view(rows, -1, BLOCK))
    return torch.cat((head, body), dim=-1).view(rows, -1).numpy()


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 32] of 4-bit numbers as ggml packs them: value j below value j + 16."""
    return values[..., : BLOCK // 2] | values[..., BLOCK // 2 :] << 4


def expert_blocks(codec: Codec, parts: dict[str, torch.Tensor]) -> dict[str, Bytes]:
    """An expert's parts by role as ggml's "gate", "up" and "down"; a fused gate and up are taken apart."""
    found: dict[str, Bytes] = {}
    for role in ("gate", "up", "gate_up", "down"):
        if role in parts:
            found[role] = as_blocks(codec, parts[role], parts.get(role + SCALE))
    if "gate_up" in found:
        both = found.pop("gate_up")
        found["gate"], found["up"] = both[: len(both) // 2], both[len(both) // 2 :]
    return found
