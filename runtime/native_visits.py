"""``VisitState``'s arithmetic in the compiled library."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Phase, Step

from .native_context import NativeForecast, address, function_of, places_of


class CVisits(ctypes.Structure):
    """``Visits`` of csrc/context.h."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("width", "forecasts", "windows", "total", "later")),
        *(
            (name, ctypes.c_void_p)
            for name in ("offsets", "heads", "embeddings", "in", "out", "head", "bias")
        ),
        *((name, ctypes.c_void_p) for name in ("head_bias", "direct", "base", "blank", "decay")),
        *((name, ctypes.c_void_p) for name in ("state", "work", "sums", "coming", "said", "shown")),
        *((name, ctypes.c_void_p) for name in ("decayed", "mass", "at", "visited")),
    )


class NativeVisits(NativeForecast):
    """``shared`` are the arrays of ``RunningForecast``, ``own`` those of ``VisitState``; ``later``: the
    forecast that the rate is told by."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        shared: dict[str, NDArray[Any]],
        own: dict[str, NDArray[Any]],
        later: int,
    ) -> None:
        layers, experts = shared["chance"].shape
        super().__init__(library, (layers, experts, len(own["heads"]), 0, 0), shared)
        _, forecasts, direct = own["direct"].shape  # S + 1 numbers
        _, total, width = own["embeddings"].shape
        self._own = {
            **own,
            "work": np.zeros((2, width), dtype=np.float32),
            "said": np.zeros((forecasts, experts), dtype=np.float32),
        }
        kinds: dict[str, type] = dict.fromkeys(("offsets", "heads", "at", "visited"), np.int64)
        kinds |= dict.fromkeys(("in", "out", "head"), np.uint16)
        places = places_of(self._own, kinds)
        self._visits = CVisits(self._at, width, forecasts, (direct - 1) // 2, total, later, **places)
        self._visits_at = ctypes.addressof(self._visits)
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        types = (pointer, number, pointer, pointer, number, number, number, real)
        self._visit = function_of(library, "visit", None, *types)

    def absorb(
        self, layer: int, chosen: Sequence[int], shares: FloatArray | None, step: Step, trust: float
    ) -> None:
        ids = array("i", chosen)
        where = None if shares is None else address(shares)
        tokens = step.rows if step.phase is Phase.PREFILL else 1
        self._visit(self._visits_at, layer, ids.buffer_info()[0], where, len(ids), step.rows, tokens, trust)

    def forget(self) -> None:
        """No layer has chosen anything yet."""
        self._arrays["many"].fill(0)
