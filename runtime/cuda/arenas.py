"""Experts in host memory: packed one behind the other into a few large arenas, page-locked as far as allowed.

One expert lies in one piece, so moving it is one copy. Arenas are mapped memory that CUDA then locks, whole
pages of it: nothing is rounded up to powers of two, and what is locked exceeds the weights by padding to 64
bytes and a page an arena. Where locking is refused, an arena stays pageable and is copied from through a
small locked ring (see ``transfers``); experts beyond the budget of RAM stay in their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import Geometry
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.codecs.base import TYPES
from daop.runtime.layout import SAMPLE
from daop.runtime.numa import map_memory
from daop.runtime.transfers import CHUNK, Reader
from daop.units import format_size

from .streams import Gpu, PinError

ARENA_BYTES = 4 << 30
READERS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expert lies: ``offset`` bytes into arena ``arena``."""

    arena: int
    offset: int


def pack(sizes: Sequence[int], arena_bytes: int = ARENA_BYTES) -> tuple[list[Place], list[int]]:
    """Places for experts of these sizes, in order, and the sizes of the arenas. No expert crosses a border;
    one that is larger than ``arena_bytes`` has an arena of its own."""
    places: list[Place] = []
    arenas: list[int] = []
    for size in sizes:
        if not arenas or (arenas[-1] and arenas[-1] + size > arena_bytes):
            arenas.append(0)
        places.append(Place(len(arenas) - 1, arenas[-1]))
        arenas[-1] += size
    return places, arenas


def choose_for_ram(geometry: Geometry, slot_bytes: Sequence[int], budget: int) -> list[int]:
    """Flat ids of the experts that are kept in RAM, ascending: the same share of every layer.

    ``slot_bytes[l]``: bytes of a layer's expert in an arena.
    """
    chosen: list[int] = []
    left = budget
    for expert in range(max(geometry.experts)):
        for layer, count in enumerate(geometry.experts):
            if expert < count and slot_bytes[layer] <= left:
                chosen.append(geometry.flat(layer, expert))
                left -= slot_bytes[layer]
    return sorted(chosen)


class HostWeights:
    """The experts of a checkpoint that fit into ``budget`` bytes of RAM. ``pinned_bytes``, ``pageable_bytes``
    and ``on_disk`` (a number of experts) say what came of it, ``refusal`` why nothing more was locked ('':
    everything was)."""

    def __init__(
        self, checkpoint: Checkpoint, gpu: Gpu, budget: int, *, arena_bytes: int = ARENA_BYTES
    ) -> None:
        self._checkpoint = checkpoint
        self._gpu = gpu
        geometry = checkpoint.geometry
        slot_bytes = [layout.nbytes for layout in checkpoint.layouts]
        chosen = choose_for_ram(geometry, slot_bytes, budget)
        sizes = [slot_bytes[int(geometry.layer_of[flat])] for flat in chosen]
        places, self.arena_sizes = pack(sizes, arena_bytes)
        self._places = dict(zip(chosen, places, strict=True))
        self._nbytes = dict(zip(chosen, sizes, strict=True))
        self._arenas = [map_memory(size) for size in self.arena_sizes]
        self._addresses = [int(arena.ctypes.data) for arena in self._arenas]
        self.on_disk = geometry.total - len(chosen)
        self.refusal = ""
        self._locked: list[bool] = []
        for address, size in zip(self._addresses, self.arena_sizes, strict=True):
            self._locked.append(self._lock(address, size))
        self.pinned_bytes = sum(s for s, locked in zip(self.arena_sizes, self._locked, strict=True) if locked)
        self.pageable_bytes = sum(self.arena_sizes) - self.pinned_bytes

    def _lock(self, address: int, size: int) -> bool:
        if self.refusal:  # a quota that is used up stays used up
            return False
        try:
            self._gpu.pin(address, size)
        except PinError as error:
            self.refusal = str(error)
            return False
        return True

    def describe(self) -> str:
        """What is not as fast as it could be, in words."""
        said = []
        if self.pageable_bytes:
            said.append(
                f"{format_size(self.pageable_bytes)} of experts could not be page-locked ({self.refusal}) "
                "and are copied through a small locked buffer: raise the limit of locked memory (ulimit -l)"
            )
        if self.on_disk:
            said.append(f"{self.on_disk} experts do not fit in RAM and are read from disk when needed")
        return "; ".join(said)

    def in_ram(self, flat: int) -> bool:
        return flat in self._places

    def address(self, flat: int) -> int:
        """Where the expert's bytes begin, if it is in RAM."""
        place = self._places[flat]
        return self._addresses[place.arena] + place.offset

    def is_pinned(self, flat: int) -> bool:
        place = self._places.get(flat)
        return place is not None and self._locked[place.arena]

    def array(self, flat: int) -> NDArray[np.uint8]:
        """The expert's bytes, if it is in RAM: a view."""
        place = self._places[flat]
        return self._arenas[place.arena][place.offset : place.offset + self._nbytes[flat]]

    def fill(self, reader: Reader, told: Callable[[float], None] | None = None) -> None:
        """Read every expert that has a place, and look at the ends of those that have none for the marks of
        an unfilled placeholder; raises DaopError for what is damaged, OSError for what cannot be read."""
        total = self._checkpoint.geometry.total
        with ThreadPoolExecutor(READERS) as pool:
            for count, _ in enumerate(pool.map(lambda flat: self._read(reader, flat), range(total))):
                if told is not None and count % 64 == 0:
                    told(count / total)

    def _read(self, reader: Reader, flat: int) -> None:
        checkpoint = self._checkpoint
        layer = int(checkpoint.geometry.layer_of[flat])
        layout = checkpoint.layouts[layer]
        if self.in_ram(flat):
            out = self.array(flat)
            for part in checkpoint.ranges(flat):
                for start in range(0, part.nbytes, CHUNK):
                    size = min(CHUNK, part.nbytes - start)
                    at = part.slot_offset + start
                    reader.read(part.file, part.offset + start, out[at : at + size])
        else:
            out = np.zeros(layout.nbytes, dtype=np.uint8)
            for begin, end in _ends(checkpoint, flat):
                for part in checkpoint.ranges(flat):
                    low = max(begin, part.slot_offset)
                    high = min(end, part.slot_offset + part.nbytes)
                    if low < high:
                        reader.read(part.file, part.offset + low - part.slot_offset, out[low:high])
        layout.check_finite(torch.from_numpy(out), checkpoint.describe(flat))

    def close(self) -> None:
        """Unlock; the memory goes with its last view."""
        for index, locked in enumerate(self._locked):
            if locked:
                self._gpu.unpin(self._addresses[index])
                self._locked[index] = False


def _ends(checkpoint: Checkpoint, flat: int) -> list[tuple[int, int]]:
    """The byte ranges of a slot that ``check_finite`` looks at."""
    layout = checkpoint.layouts[int(checkpoint.geometry.layer_of[flat])]
    found = []
    for part in layout.parts:
        looked = min(part.nbytes, SAMPLE * TYPES[part.dtype].itemsize)
        found.append((part.offset, part.offset + looked))
        found.append((part.offset + part.nbytes - looked, part.offset + part.nbytes))
    return found
