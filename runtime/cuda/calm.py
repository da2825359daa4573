"""Layers of a model of which every expert is resident: nothing is decided, and the host does not wait.

Shape legend: T tokens, K experts per token, H hidden size, E experts of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daop.core import Phase
from daop.runtime.conductor import Conductor

from .compute import WINDOW, DeviceExperts
from .mailbox import Outbox
from .slabs import DeviceMemory

UNSEEN = 4096  # layers of which the host has not counted the requests, at most


class CalmLayers:
    """``on``: all experts are resident, and the device can compute them without the host's knowing which."""

    def __init__(
        self,
        device_compute: Sequence[DeviceExperts],
        memory: DeviceMemory,
        conductor: Conductor,
        outbox: Outbox,
    ) -> None:
        self.on = False
        self._device = device_compute
        self._memory = memory
        self._conductor = conductor
        self._outbox = outbox
        self._counts: list[tuple[Phase, int, torch.Tensor]] = []  # choices that the host has not seen: [E]
        self._possible = all(compute.groups_from > 0 for compute in device_compute) and (
            max(conductor.residency.geometry.experts) <= WINDOW
        )

    def look(self) -> None:
        """Residency has changed."""
        self.on = self._possible and bool(self._conductor.residency.resident.all())

    def run(
        self, phase: Phase, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]"""
        compute = self._device[layer]
        slab = self._memory.slabs[self._memory.class_of_layer[layer]]
        batch = compute.begin(hidden, weights)
        residency = self._conductor.residency
        geometry = residency.geometry
        first = residency.slot_of[geometry.offsets[layer]]
        counts = compute.run_all(batch, slab, first, geometry.experts[layer], ids)
        self._counts.append((phase, layer, counts))
        if len(self._counts) >= UNSEEN:
            self.settle()
        return compute.finish(batch)

    def settle(self) -> None:
        """Count the requests that the host did not see when they were served."""
        if not self._counts:
            return
        counts, self._counts = self._counts, []
        (seen,) = self._outbox.bring([torch.cat([chosen for *_, chosen in counts])])
        sizes = [len(chosen) for *_, chosen in counts]
        for (phase, layer, _), chosen in zip(counts, torch.split(seen, sizes), strict=True):
            self._conductor.statistics.count(phase, layer, int((chosen > 0).sum()), 0, 0)

    def forget(self) -> None:
        """The device has no memory left to say what was not counted."""
        self._counts.clear()
