"""The compiled kernels (``csrc/``): finding them, what they can compute, and calling them.

They are optional. Installation builds them where there is a C++ compiler; without them everything works on
torch, and ``native_status`` says so. ``python -m daop.runtime.native`` builds them beside this file.
``DAOP_NATIVE=0`` leaves them unused; ``DAOP_NATIVE=avx2`` (or another variant that the CPU has) forces one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError

from .codecs.base import SCALE
from .layout import ExpertForm, ExpertLayout
from .native_library import VERSION, build, library_path

log = logging.getLogger(__name__)

DTYPE_CODES = {"F32": 0, "F16": 1, "BF16": 2}
HIDDEN_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3, "relu2": 4, "gpt_oss": 5}
MXFP4, MXFP4_SHORT = 6, 7
PAD = 128  # a row of activations is padded to a multiple of this: the widest kernel's step, the largest group


class CForm(ctypes.Structure):
    """``Form`` of experts.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "gate", "up", "down")),
        *((name, ctypes.c_int64) for name in ("gate_bias", "up_bias", "down_bias", "step", "bias_step")),
        *((name, ctypes.c_int32) for name in ("dtype", "activation", "transposed", "down_transposed")),
        *((name, ctypes.c_int32) for name in ("interleaved", "scales_input")),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("gate_scale", "up_scale", "down_scale", "up_first")),
        *((name, ctypes.c_int32) for name in ("group", "scale_dtype", "bias_dtype")),
    )


class CCall(ctypes.Structure):
    """``Call`` of experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("form", "x", "slots", "starts", "pairs", "weights")),
        *((name, ctypes.c_void_p) for name in ("inner", "out")),
        *((name, ctypes.c_int64) for name in ("tasks", "top_k", "x_width", "inner_width")),
        ("x_dtype", ctypes.c_int32),
    )


class Kernels:
    """The loaded library and the variant in use."""

    def __init__(self, path: Path, wanted: str = "") -> None:
        library = ctypes.CDLL(str(path))  # releases the GIL while it computes
        library.daop_version.restype = ctypes.c_int
        if library.daop_version() != VERSION:
            raise OSError(f"{path} was built from another version of daop")
        library.daop_variant.restype = ctypes.c_char_p
        self.variants: list[str] = []
        while name := library.daop_variant(len(self.variants)):
            self.variants.append(name.decode())
        if wanted and wanted not in self.variants:
            raise DaopError(
                f"DAOP_NATIVE={wanted} is not a variant that this CPU can run; it can run "
                f"{', '.join(self.variants)} (0 switches the native kernels off)"
            )
        self.variant = wanted or self.variants[0]
        self.index = self.variants.index(self.variant)
        self._parallel = parallel_function()
        pointer, number, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._prepare = library.daop_prepare
        self._prepare.argtypes = [ctypes.c_int, pointer, pointer, word, number, number, pointer, pointer]
        self._prepare.restype = None
        self._run = library.daop_run
        self._run.argtypes = [ctypes.c_int, pointer, pointer, ctypes.c_uint]
        self._run.restype = None
        self._read = library.daop_read
        self._read.argtypes = [ctypes.c_int, pointer, number, pointer, ctypes.c_uint]
        self._add = library.daop_add
        self._add.argtypes = [pointer, pointer, number, number, number, pointer]
        self._add.restype = None

    @property
    def threaded(self) -> bool:
        return self._parallel is not None

    def prepare(self, form: CForm, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H], contiguous, as the form's kernels read them: [T, padded H] of 4 bytes."""
        rows, width = hidden.shape
        out, scratch = torch.empty(rows, padded(width)), torch.empty(width)
        self._prepare(
            self.index,
            ctypes.addressof(form),
            hidden.data_ptr(),
            HIDDEN_CODES[hidden.dtype],
            rows,
            out.shape[1],
            scratch.data_ptr(),
            out.data_ptr(),
        )
        return out

    def run(
        self,
        form: CForm,
        x: torch.Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        pairs: NDArray[np.int64],
        weights: torch.Tensor,
        top_k: int,
        scratch: torch.Tensor,
        out: torch.Tensor,
        hidden: torch.dtype,
    ) -> None:
        """Experts at addresses ``slots``, of which the i-th computes rows starts[i]..starts[i + 1] of
        ``pairs``: out [rows, H]. ``x`` is what ``prepare`` made of hidden states of dtype ``hidden``;
        ``scratch`` is float32 of at least rows x padded I."""
        count = len(slots)
        table = array("q", (*slots, *starts))
        at = table.buffer_info()[0]
        call = CCall(
            ctypes.addressof(form),
            x.data_ptr(),
            at,
            at + 8 * count,
            pairs.__array_interface__["data"][0],
            weights.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
            count,
            top_k,
            x.shape[1],
            padded(form.inner),
            HIDDEN_CODES[hidden],
        )
        self._run(self.index, ctypes.addressof(call), self._parallel, torch.get_num_threads())

    def add(self, rows: torch.Tensor, pairs: NDArray[np.int64], top_k: int, total: torch.Tensor) -> None:
        """total[pairs // top_k] += rows, one row after the other; float32."""
        self._add(rows.data_ptr(), pairs.ctypes.data, len(pairs), top_k, total.shape[1], total.data_ptr())

    def read(self, memory: torch.Tensor) -> None:
        """Read a tensor's bytes (but for the last few) and do nothing else: the bound of ``run``."""
        size = memory.nbytes // 512 * 512
        self._read(self.index, memory.data_ptr(), size, self._parallel, torch.get_num_threads())


def padded(width: int) -> int:
    """Values of a row of activations: whole steps of the widest kernel, and not a power of two, since rows
    that lie a multiple of 4 KiB apart would contend for the same lines of the first cache."""
    return -(-width // PAD) * PAD + 32


def describe_form(layout: ExpertLayout, form: ExpertForm) -> CForm | None:
    """What the kernels need to know, or None if they cannot compute such experts."""
    activation, codes = ACTIVATION_CODES.get(form.activation), _dtype_codes(layout)
    if activation is None or codes is None or form.post_norm is not None:
        return None
    dtype, bias = codes
    size = 4 if bias == DTYPE_CODES["F32"] else 2
    at = {part.role: part.offset for part in layout.parts}
    inner, hidden, coded = form.intermediate, form.hidden, layout.codec.by_rows
    fused, first = "gate_up" in at, 0
    if fused:
        between = 1 if form.interleaved else inner  # rows, or columns if transposed
        apart = size if form.transposed else size * hidden
        at["gate"], at["up"] = at["gate_up"], at["gate_up"] + (0 if coded else between * apart)
        if coded:
            at["gate_scale"] = at["up_scale"] = at["gate_up_scale"]
            first = between
        if form.has_bias:
            at["gate_bias"] = at["gate_up_bias"]
            at["up_bias"] = at["gate_up_bias"] + between * size
    wide = 2 if fused else 1
    alternating = fused and form.interleaved
    step = inner * wide if form.transposed else hidden * (2 if alternating else 1)
    scale = layout.part("down_scale")
    return CForm(
        hidden,
        inner,
        *(at.get(role, -1) for role in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")),
        step,
        2 if alternating else 1,
        dtype,
        activation,
        form.transposed,
        form.down_is_transposed,
        alternating,
        form.scales_input,
        *(form.activation_arguments or (0.0, 0.0)),
        *(at.get(f"{role}_scale", -1) for role in ("gate", "up", "down")),
        first,
        layout.codec.block,
        DTYPE_CODES.get(scale.dtype, -1) if scale is not None else -1,
        bias,
    )


def for_hidden(form: CForm | None, dtype: torch.dtype) -> CForm | None:
    """The form for hidden states of that dtype: with MXFP4 weights, those of 16 bits need no
    activations of 22."""
    if form is None or form.dtype != MXFP4 or dtype == torch.float32:
        return form
    short = CForm.from_buffer_copy(form)
    short.dtype = MXFP4_SHORT
    return short


def _dtype_codes(layout: ExpertLayout) -> tuple[int, int] | None:
    """``Dtype`` of weights and of biases, or None if the kernels do not know them."""
    coded = layout.codec.by_rows
    plain = {part.dtype for part in layout.parts if not coded or part.role.endswith("_bias")}
    scales = {part.dtype for part in layout.parts if coded and part.role.endswith(SCALE)}
    if len(plain) > 1 or len(scales) > 1 or not plain <= DTYPE_CODES.keys():
        return None
    bias = DTYPE_CODES[plain.pop()] if plain else 0
    dtype = layout.codec.kernel if coded else bias
    return None if dtype is None else (dtype, bias)


def parallel_function() -> ctypes.c_void_p | None:
    """``GOMP_parallel`` of the OpenMP library that torch runs on, or None if it has none.

    Sharing torch's threads, instead of starting a second set, is what keeps the two from fighting: OpenMP's
    idle threads spin for milliseconds, and would take the cores from ours after every product of torch's.
    """
    torch.zeros(1 << 17).add_(1)  # torch loads its library with the first parallel loop at the latest
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "omp" in line}
    home = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda p: not p.startswith(home)):
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p)
    return None


@cache
def _load(setting: str) -> tuple[Kernels | None, str]:
    if setting == "0":
        return None, "switched off by DAOP_NATIVE=0"
    path = library_path()
    if path is None:
        how = "build them with: python -m daop.runtime.native"
        return None, f"not built (installation found no working C++ compiler?); {how}"
    try:
        kernels = Kernels(path, setting)
    except (OSError, AttributeError) as error:
        reason = f"cannot be loaded: {error}; build them with: python -m daop.runtime.native"
        log.warning("The native kernels %s. Until then experts on the host run on torch, slower.", reason)
        return None, reason
    if not kernels.threaded:
        return kernels, "single-threaded: torch here runs on no OpenMP library whose threads they could share"
    return kernels, ""


def load_kernels() -> Kernels | None:
    """The kernels, or None: see ``native_status``."""
    return _load(os.environ.get("DAOP_NATIVE", ""))[0]


def native_status() -> tuple[bool, str, str]:
    """(whether the native kernels are used, variant or '', what is wrong or '')."""
    kernels, reason = _load(os.environ.get("DAOP_NATIVE", ""))
    return kernels is not None, kernels.variant if kernels else "", reason


if __name__ == "__main__":
    try:
        sys.stdout.write(f"built {build()}\n")
    except DaopError as problem:
        sys.exit(str(problem))
