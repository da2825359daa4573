"""A MoE layer's experts as a graph of ggml, through ctypes on the libraries that llama.cpp's bindings bring.

The graph is that of llama.cpp's own MoE layers (``llm_graph_context::build_moe_ffn``): ``mul_mat_id`` for
gate, up and down, swiglu, router weights, and a sum over the chosen experts by additions of views. Weights
go into the buffer type that repacks them where ggml supports that for their type, as llama.cpp loads models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from llama_cpp_common import Bytes, bindings
from numpy.typing import NDArray

P, I64, SIZE, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
F32, I32 = 0, 26  # ggml's types
CPU = 0  # the device type


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_init": (P, (InitParams,)),
    "ggml_tensor_overhead": (SIZE, ()),
    "ggml_graph_overhead": (SIZE, ()),
    "ggml_new_tensor_2d": (P, (P, INT, I64, I64)),
    "ggml_new_tensor_3d": (P, (P, INT, I64, I64, I64)),
    "ggml_mul_mat_id": (P, (P, P, P, P)),
    "ggml_swiglu_split": (P, (P, P, P)),
    "ggml_mul": (P, (P, P, P)),
    "ggml_add": (P, (P, P, P)),
    "ggml_view_2d": (P, (P, P, I64, I64, SIZE, SIZE)),
    "ggml_set_input": (None, (P,)),
    "ggml_set_output": (None, (P,)),
    "ggml_nbytes": (SIZE, (P,)),
    "ggml_new_graph": (P, (P,)),
    "ggml_build_forward_expand": (None, (P, P)),
    "ggml_gallocr_new": (P, (P,)),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, (P, P)),
    "ggml_backend_load_all": (None, ()),
    "ggml_backend_dev_by_type": (P, (INT,)),
    "ggml_backend_dev_init": (P, (P, ctypes.c_char_p)),
    "ggml_backend_dev_buffer_type": (P, (P,)),
    "ggml_backend_dev_backend_reg": (P, (P,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (P, P)),
    "ggml_backend_reg_get_proc_address": (P, (P, ctypes.c_char_p)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, (P, P)),
    "ggml_backend_buffer_free": (None, (P,)),
    "ggml_backend_tensor_set": (None, (P, P, SIZE, SIZE)),
    "ggml_backend_tensor_get": (None, (P, P, SIZE, SIZE)),
    "ggml_backend_graph_compute": (INT, (P, P)),
}


@dataclass(frozen=True)
class Weights:
    """Tensors [count, rows, columns] by role; ``where``: the buffer type that holds them."""

    tensors: dict[str, int]
    hidden: int
    where: str


class Ggml:
    """ggml's CPU device, with so many threads."""

    def __init__(self, threads: int) -> None:
        library = ctypes.CDLL(str(Path(bindings().__file__).parent / "lib" / "libllama.so"))
        functions = {}  # of the libraries that this one is linked to
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            functions[name.removeprefix("ggml_")] = function
        self.c: Any = SimpleNamespace(**functions)
        self.c.backend_load_all()
        self.device = self.c.backend_dev_by_type(CPU)
        self.backend = self.c.backend_dev_init(self.device, None)
        set_threads = self._found("ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, P, INT)(set_threads)(self.backend, threads)

    def _found(self, name: str) -> int:
        registry = self.c.backend_dev_backend_reg(self.device)
        address: int = self.c.backend_reg_get_proc_address(registry, name.encode())
        return address

    def _context(self, tensors: int) -> int:
        size = tensors * self.c.tensor_overhead() + self.c.graph_overhead()
        context: int = self.c.init(InitParams(size, None, True))
        return context

    def _places(self) -> list[int]:
        """Buffer types, the repacking ones first."""
        get = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(self._found("ggml_backend_dev_get_extra_bufts"))
        extra, places = get(self.device), list[int]()
        while extra and extra[len(places)]:
            places.append(extra[len(places)])
        return [*places, self.c.backend_dev_buffer_type(self.device)]

    def weights(self, kind: int, columns: dict[str, int], experts: Sequence[dict[str, Bytes]]) -> Weights:
        """Experts' blocks of one of ggml's types, by role."""
        for place in self._places():
            context = self._context(16)
            tensors = {
                role: self.c.new_tensor_3d(context, kind, width, len(experts[0][role]), len(experts))
                for role, width in columns.items()
            }
            buffer = self.c.backend_alloc_ctx_tensors_from_buft(context, place)
            ids = self.c.new_tensor_2d(context, I32, 8, 1)
            trial = [
                self.c.mul_mat_id(
                    context, tensor, self.c.new_tensor_3d(context, F32, columns[role], 1, 1), ids
                )
                for role, tensor in tensors.items()
            ]
            if all(self.c.backend_dev_supports_op(self.device, operation) for operation in trial):
                break
            self.c.backend_buffer_free(buffer)
        for role, tensor in tensors.items():
            whole = np.ascontiguousarray(np.stack([expert[role] for expert in experts]))
            if whole.nbytes != self.c.nbytes(tensor):
                raise ValueError(f"{role}: {whole.nbytes} bytes for a tensor of {self.c.nbytes(tensor)}")
            self.c.backend_tensor_set(tensor, whole.ctypes.data, 0, whole.nbytes)
        where = self.c.backend_buft_name(place).decode()
        return Weights(tensors, columns["gate"], where)

    def layer(self, weights: Weights, tokens: int, chosen: int) -> Layer:
        return Layer(self, weights, tokens, chosen)


class Layer:
    """The graph for a number of tokens; a call computes it."""

    def __init__(self, ggml: Ggml, weights: Weights, tokens: int, chosen: int) -> None:
        self._ggml = ggml
        context = ggml._context(64)
        hidden = weights.hidden
        self._x = ggml.c.new_tensor_3d(context, F32, hidden, 1, tokens)
        self._ids = ggml.c.new_tensor_2d(context, I32, chosen, tokens)
        self._router = ggml.c.new_tensor_3d(context, F32, 1, chosen, tokens)
        for tensor in (self._x, self._ids, self._router):
            ggml.c.set_input(tensor)
        up = ggml.c.mul_mat_id(context, weights.tensors["up"], self._x, self._ids)
        gate = ggml.c.mul_mat_id(context, weights.tensors["gate"], self._x, self._ids)
        inner = ggml.c.swiglu_split(context, gate, up)
        out = ggml.c.mul(
            context, ggml.c.mul_mat_id(context, weights.tensors["down"], inner, self._ids), self._router
        )
        row = 4 * hidden
        views = [
            ggml.c.view_2d(context, out, hidden, tokens, chosen * row, rank * row) for rank in range(chosen)
        ]
        self._sum = views[0]
        for view in views[1:]:
            self._sum = ggml.c.add(context, self._sum, view)
        ggml.c.set_output(self._sum)
        self._graph = ggml.c.new_graph(context)
        ggml.c.build_forward_expand(self._graph, self._sum)
        place = ggml.c.backend_dev_buffer_type(ggml.device)
        if not ggml.c.gallocr_alloc_graph(ggml.c.gallocr_new(place), self._graph):
            raise MemoryError("ggml could not allocate its graph")

    def __call__(
        self, x: NDArray[np.float32], ids: NDArray[np.int32], router: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """x [T, H], ids and router weights [T, K] -> [T, H]."""
        out = np.empty_like(x)
        for tensor, array in ((self._x, x), (self._ids, ids), (self._router, router)):
            self._ggml.c.backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        if self._ggml.c.backend_graph_compute(self._ggml.backend, self._graph):
            raise RuntimeError("ggml did not compute its graph")
        self._ggml.c.backend_tensor_get(self._sum, out.ctypes.data, 0, out.nbytes)
        return out
