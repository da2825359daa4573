"""A running forecast's arithmetic in the compiled library, some five times faster than numpy's."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, FloatArray, Step

from .native_library import library_path, short_calls


class CContext(ctypes.Structure):
    """``Context`` of csrc/context.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "experts", "leads", "lags", "decays")),
        *((name, ctypes.c_void_p) for name in ("targets", "table", "gain", "decay", "features", "seen")),
        *((name, ctypes.c_void_p) for name in ("counts", "usual", "rate", "chance", "expected", "hot")),
        *((name, ctypes.c_void_p) for name in ("chosen", "many")),
    )


class CSearch(ctypes.Structure):
    """``Search`` of csrc/context.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("context", "worth", "offsets", "resident", "filling")),
        ("found", ctypes.c_float),
    )


def address(values: NDArray[Any]) -> int:
    """Where a contiguous array lies."""
    return int(values.__array_interface__["data"][0])


def places_of(arrays: dict[str, NDArray[Any]], types: Mapping[str, type]) -> dict[str, int]:
    """Where the arrays lie, which are float32 unless ``types`` says otherwise."""
    for name, values in arrays.items():
        if not values.flags.c_contiguous or values.dtype != types.get(name, np.float32):
            raise ValueError(f"{name} must be contiguous and of the type that context.h says")
    return {name: address(values) for name, values in arrays.items()}


class NativeForecast:
    """Works on the arrays it is given, in place; it keeps them alive. Subclasses say how to ``absorb``.

    ``sizes``: layers, experts, leads, lags, decays; the last two are the linear model's alone.
    """

    def __init__(
        self, library: ctypes.PyDLL, sizes: tuple[int, int, int, int, int], arrays: dict[str, NDArray[Any]]
    ) -> None:
        layers, experts, *_ = sizes
        chosen = np.zeros((layers, experts), dtype=np.int32)
        self._arrays = {**arrays, "chosen": chosen, "many": np.zeros(layers, dtype=np.int32)}
        types = {"targets": np.int64, "seen": np.float64, "chosen": np.int32, "many": np.int32}
        self._context = CContext(*sizes, **places_of(self._arrays, types))
        self._at = ctypes.addressof(self._context)
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._loss = function_of(library, "loss", ctypes.c_double, pointer, pointer, pointer, number)
        self._worth = function_of(
            library, "worth", None, pointer, number, pointer, real, ctypes.c_int, pointer
        )
        self._best = function_of(library, "best", number, pointer, pointer, number, number)
        self._searched: tuple[NDArray[Any], ...] = ()  # what the search below was made for

    def absorb(
        self, layer: int, chosen: Sequence[int], shares: FloatArray | None, step: Step, trust: float
    ) -> None:
        """``RunningForecast.absorb``; ``shares`` [len(chosen)] of the rows (None: one row)."""
        raise NotImplementedError

    def loss(self, guess: FloatArray, chosen: Sequence[int]) -> float:
        """Mean log loss per expert of ``guess`` [E]."""
        ids = array("i", chosen)
        return float(self._loss(self._at, address(guess), ids.buffer_info()[0], len(ids)))

    def worth(self, layer: int, nearness: FloatArray, stay: float, everywhere: bool, out: FloatArray) -> None:
        """out [L, E] = chance * nearness + stay * rate, for the layer's targets or for every layer."""
        self._worth(self._at, layer, address(nearness), stay, everywhere, address(out))

    def best(
        self,
        worth: FloatArray,
        offsets: NDArray[np.int64],
        resident: BoolArray,
        filling: BoolArray,
        late: Sequence[int],
        taken: Sequence[int],
    ) -> tuple[int, float]:
        """``WorthTable.best``'s search: (flat id or -1, its worth)."""
        last = self._searched
        if not last or not (worth is last[0] and resident is last[1] and filling is last[2]):
            self._searched = (worth, resident, filling, offsets)
            places = (address(worth), address(offsets), address(resident), address(filling))
            self._search = CSearch(self._at, *places)
            self._search_at = ctypes.addressof(self._search)
        numbers = array("q", (*late, *taken))
        flat = self._best(self._search_at, numbers.buffer_info()[0], len(late), len(taken))
        return int(flat), self._search.found


class NativeContext(NativeForecast):
    """The linear model's."""

    def __init__(
        self, library: ctypes.PyDLL, sizes: tuple[int, int, int, int, int], arrays: dict[str, NDArray[Any]]
    ) -> None:
        super().__init__(library, sizes, arrays)
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        types = (pointer, number, pointer, pointer, number, number, real)
        self._absorb = function_of(library, "absorb", None, *types)

    def absorb(
        self, layer: int, chosen: Sequence[int], shares: FloatArray | None, step: Step, trust: float
    ) -> None:
        ids = array("i", chosen)
        where = None if shares is None else address(shares)
        self._absorb(self._at, layer, ids.buffer_info()[0], where, len(ids), step.rows, trust)


def function_of(library: ctypes.PyDLL, name: str, result: Any, *arguments: Any) -> Any:
    # One handle for each call site: argument types set on the library's own would be shared.
    function = ctypes.PYFUNCTYPE(result, *arguments)((f"daop_context_{name}", library))
    return function


def load_context() -> ctypes.PyDLL | None:
    """The library, or None where it is not built, does not load or is switched off by ``DAOP_NATIVE=0``."""
    path = None if os.environ.get("DAOP_NATIVE") == "0" else library_path()
    return None if path is None else short_calls(path)
