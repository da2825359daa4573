"""The bytes behind slots: one slab per slot class, and a few staging slots beside it.

A slot class is one ``ExpertLayout``; layers whose experts have the same layout share it. Memory is
mapped, so it costs nothing until a slot is filled, and asks for huge pages, which weight streaming
likes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .layout import ExpertLayout
from .numa import map_memory


class Slab:
    """``count`` slots of one layout: ``tensor`` uint8 [count, nbytes], ``array`` the same for numpy."""

    def __init__(self, layout: ExpertLayout, count: int) -> None:
        self.layout = layout
        memory = map_memory(count * layout.nbytes)
        self.array: NDArray[np.uint8] = memory.reshape(count, layout.nbytes)
        self.tensor = torch.from_numpy(self.array)
        self.nbytes = count * layout.nbytes


class SlotMemory:
    """The slabs of all slot classes.

    ``classes[c]`` is a layout, ``class_of_layer[l]`` the class of a MoE layer, ``slots[c]`` and
    ``staging`` slot classes' sizes. Staging slots hold experts that are computed and dropped.
    """

    def __init__(self, layouts: Sequence[ExpertLayout], slots: Sequence[int], staging: int) -> None:
        self.classes, self.class_of_layer = slot_classes(layouts)
        self.slabs = [Slab(layout, count) for layout, count in zip(self.classes, slots, strict=True)]
        self.staging = [Slab(layout, staging) for layout in self.classes]

    @property
    def expert_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def staging_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.staging)


def slot_classes(layouts: Sequence[ExpertLayout]) -> tuple[list[ExpertLayout], list[int]]:
    """The distinct layouts, in order of appearance, and the class of each layer."""
    classes = list(dict.fromkeys(layouts))
    return classes, [classes.index(layout) for layout in layouts]
