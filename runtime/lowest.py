"""The search for victims: which few of thousands of experts are worth least."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray

from .native_context import address, load_context


def lowest_of(values: NDArray[Any], allowed: BoolArray, count: int) -> list[int]:
    """The ``count`` allowed indices of least value, ascending; ties go to the lower index."""
    search = _compiled().get(values.dtype.char)
    if search is None or not (values.flags.c_contiguous and allowed.flags.c_contiguous):
        return lowest_by_numpy(values, allowed, count)
    out = array("q", bytes(8 * count))
    found = search(_place(values), _place(allowed), len(values), count, out.buffer_info()[0])
    return out[:found].tolist()


_places: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}  # arrays last asked for, and where they lie


def _place(values: NDArray[Any]) -> int:
    """``address``, remembered: the same few arrays are searched in every layer, and asking takes longer."""
    known = _places.get(id(values))
    if known is not None and known[0]() is values:
        return known[1]
    if len(_places) >= 64:
        _places.clear()
    place = address(values)
    _places[id(values)] = (weakref.ref(values), place)
    return place


def lowest_by_numpy(values: NDArray[Any], allowed: BoolArray, count: int) -> list[int]:
    """The plain version of ``lowest_of``."""
    ids = np.flatnonzero(allowed)
    if len(ids) > count > 0:  # only those that could be among the lowest are sorted
        candidates = values[ids]
        ids = ids[candidates <= np.partition(candidates, count - 1)[count - 1]]
    chosen: list[int] = ids[np.argsort(values[ids], kind="stable")[:count]].tolist()
    return chosen


@cache
def _compiled() -> dict[str, Any]:
    """The compiled searches by numpy's letter for a type; none without the library."""
    library = load_context()
    if library is None:
        return {}
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    make = ctypes.PYFUNCTYPE(number, pointer, pointer, number, number, pointer)
    whole = make(("daop_lowest_int", library))
    return {"f": make(("daop_lowest_float", library)), np.dtype(np.int64).char: whole}
