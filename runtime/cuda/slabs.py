"""Slots in HBM: one slab per slot class, and a few staging slots beside it.

A slab is one uint8 tensor of torch's; copies address its bytes directly, so nothing is held twice. Views of
an expert's parts over all slots have the slot's size as their first stride."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daop.runtime.codecs.base import TYPES
from daop.runtime.layout import ExpertLayout, Part
from daop.runtime.slots import slot_classes

from .streams import Gpu


class DeviceSlab:
    """``count`` slots of one layout: ``tensor`` uint8 [count, nbytes] on the device."""

    def __init__(self, layout: ExpertLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self.count = count
        self.tensor = torch.empty(count, layout.nbytes, dtype=torch.uint8, device=device)
        self._base = self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.count * self.layout.nbytes

    def address(self, slot: int) -> int:
        """Where a slot begins in the device's memory."""
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot} of {self.count}")
        return self._base + slot * self.layout.nbytes

    def part(self, part: Part) -> torch.Tensor:
        """[count, *shape] of one part in every slot: a view."""
        size = TYPES[part.dtype].itemsize
        inner = [1]
        for length in reversed(part.shape[1:]):
            inner.insert(0, inner[0] * length)
        typed = self.tensor.view(-1).view(TYPES[part.dtype])
        return typed.as_strided(
            (self.count, *part.shape), (self.layout.nbytes // size, *inner), part.offset // size
        )


class DeviceMemory:
    """The slabs of all slot classes; the same names as ``slots.SlotMemory``."""

    def __init__(self, gpu: Gpu, layouts: Sequence[ExpertLayout], slots: Sequence[int], staging: int) -> None:
        self._device = gpu.device
        self._gpu = gpu
        self.classes, self.class_of_layer = slot_classes(layouts)
        self.staging = [DeviceSlab(layout, staging, self._device) for layout in self.classes]
        self.slabs: list[DeviceSlab] = []
        self.allocate(slots)

    def allocate(self, slots: Sequence[int]) -> None:
        """Slabs of these sizes in the place of those that are there, whose bytes are lost. The old ones are
        freed first; on torch.OutOfMemoryError there are none left."""
        self.slabs = []
        self._gpu.release()
        self.slabs = [
            DeviceSlab(layout, count, self._device) for layout, count in zip(self.classes, slots, strict=True)
        ]

    def free(self) -> None:
        """Give all of it back."""
        self.slabs, self.staging = [], []
        self._gpu.release()

    @property
    def slots(self) -> list[int]:
        return [slab.count for slab in self.slabs]

    @property
    def expert_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def staging_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.staging)
