"""Puts the device ``cuda`` together: a plan of its memory, slots, host memory, transfers, executor.

The order matters: the rest of the model is on the device before its memory is planned, so that what a step
takes beside the experts is measured rather than guessed; host memory is filled before the hot set."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Sequence

import torch

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.conductor import Conductor
from daop.runtime.costs import Hardware, HardwareCosts
from daop.runtime.files import FileReader
from daop.runtime.host_compute import HostExperts
from daop.runtime.layout import ExpertForm
from daop.runtime.machinery import Setup, Wishes, peak_rss, weight_bits
from daop.runtime.memory import MemoryPlan, as_bytes, default_headroom, plan_memory
from daop.runtime.residency import Residency
from daop.runtime.statistics import Statistics
from daop.runtime.transfers import CHUNK as READ_CHUNK

from . import measure
from .arenas import HostWeights
from .compute import DeviceExperts
from .device import describe_memory, open_gpu
from .executor import CudaExecutor
from .slabs import DeviceMemory
from .streams import Gpu
from .transfers import LinkTransfers
from .trial import layer_seconds, trial_bytes

STAGING = 3  # slots of each class for experts that are computed and dropped
SHRINK = 0.8  # share of the slots that is kept when memory is used up
Told = Callable[[str, float], None]


class CudaDevice:
    """HBM, with pinned host memory behind it. ``gpu`` is another one's in tests; ``ram``: bytes of host
    memory for experts (None: what this machine leaves)."""

    def __init__(
        self, checkpoint: Checkpoint, wishes: Wishes, *, gpu: Gpu | None = None, ram: int | None = None
    ) -> None:
        self._gpu: Gpu = open_gpu() if gpu is None else gpu
        self._checkpoint = checkpoint
        self._wishes = wishes
        self._ram = ram
        self.torch_device = self._gpu.device
        gc.collect()  # a model that was closed before may hold memory still, in cycles
        self._gpu.release()
        free, total = self._gpu.memory()
        self._limit = (free, describe_memory(free, total, _name(self._gpu.device)))
        self.estimate = self._plan(None)  # what cannot fit is said before anything is loaded

    def _plan(self, activations: int | None) -> MemoryPlan:
        wishes = self._wishes
        return plan_memory(
            self._checkpoint,
            fast_memory=as_bytes(wishes.fast_memory),
            ecr=wishes.ecr,
            context=wishes.context,
            batch=wishes.batch,
            staging=STAGING,
            dtype=wishes.dtype,
            limit=self._limit,
            activations=activations,
        )

    def set_up(self, setup: Setup) -> CudaMachinery:
        setup.told("measuring what a step takes", 0.4)
        built, use = setup.built, setup.use
        device = self._gpu.device
        compute = [
            DeviceExperts(layout, form, device)
            for layout, form in zip(self._checkpoint.layouts, built.forms, strict=True)
        ]
        wishes = self._wishes
        taken = trial_bytes(self._gpu, built, compute, use, context=wishes.context, batch=wishes.batch)
        plan = self._plan(taken)
        layer = layer_seconds(self._gpu, built, use)
        setup.told("reading experts into host memory", 0.5)
        return CudaMachinery(
            self._checkpoint,
            plan,
            setup,
            gpu=self._gpu,
            compute=compute,
            layer_seconds=layer,
            ram=self._ram if self._ram is not None else ram_budget(),
            direct_io=wishes.direct_io,
        )


class CudaMachinery:
    """The device ``cuda`` at work on one model. ``hardware``: what things cost here, measured at the
    start."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: MemoryPlan,
        setup: Setup,
        *,
        gpu: Gpu,
        compute: Sequence[DeviceExperts],
        layer_seconds: tuple[float, float],
        ram: int,
        direct_io: bool,
        share: CudaMachinery | None = None,
    ) -> None:
        self.plan = plan
        self.gpu = gpu
        self._checkpoint = checkpoint
        geometry = checkpoint.geometry
        self.reader = FileReader(checkpoint.files, direct_io=direct_io, largest=READ_CHUNK)
        self._shares = share is not None
        self.weights: HostWeights = share.weights if share is not None else self._fill(ram, setup.told)
        self.memory = DeviceMemory(gpu, checkpoint.layouts, plan.slots, STAGING)
        self.transfers = LinkTransfers(checkpoint, gpu, self.memory, self.weights, self.reader)
        self.residency = Residency(geometry, plan.slots, self.memory.class_of_layer)
        forms = setup.built.forms
        host_compute = [
            HostExperts(layout, _on_host(form), count)
            for layout, form, count in zip(checkpoint.layouts, forms, geometry.experts, strict=True)
        ]
        setup.told("measuring what experts cost", 0.88)
        self.compute = compute
        self.host_compute = host_compute
        self.hardware: Hardware = (
            share.hardware if share is not None else self._measure(setup.built.model.dtype, layer_seconds)
        )
        self.transfers.bandwidth = self.hardware.link_gbs * 1e9
        costs = HardwareCosts(self.hardware, geometry, weight_bits(checkpoint))
        conductor = Conductor(
            setup.policy, self.residency, self.transfers, costs, Statistics(geometry), setup.watchers
        )
        self._conductor = conductor
        self.executor = CudaExecutor(
            checkpoint=checkpoint,
            gpu=gpu,
            memory=self.memory,
            weights=self.weights,
            transfers=self.transfers,
            conductor=conductor,
            device_compute=compute,
            host_compute=host_compute,
            gates=setup.built,
            shrink=self._shrink,
            recorder=setup.recorder,
        )
        self.shrinks = 0

    def _fill(self, ram: int, told: Told) -> HostWeights:
        weights = HostWeights(self._checkpoint, self.gpu, ram)
        reading = "reading experts into host memory"
        weights.fill(self.reader, lambda share: told(reading, 0.5 + share / 3))
        self.reader.drop_cache()  # they are in our own memory now
        if weights.pageable_bytes or weights.on_disk:
            told(weights.describe(), 0.85)
        return weights

    def _measure(self, dtype: torch.dtype, layer: tuple[float, float]) -> Hardware:
        """Costs of the largest experts, with as many of them as outgrow a processor's caches."""
        geometry = self._checkpoint.geometry
        largest = max(range(geometry.layers), key=lambda number: geometry.expert_bytes[number])
        first, last = geometry.offsets[largest : largest + 2]
        flats = [flat for flat in range(first, last) if self.weights.in_ram(flat)][: max(8, geometry.top_k)]
        if not flats:
            return measure.unmeasured(layer)
        staging = self.memory.staging[self.memory.class_of_layer[largest]]
        source, nbytes = self.weights.address(flats[0]), staging.layout.nbytes
        if not self.weights.is_pinned(flats[0]):  # what can be locked at least
            source, nbytes = self.transfers.handover.ring_address, min(nbytes, self.transfers.handover.chunk)
        bench = measure.Bench(
            compute=self.compute[largest],
            host_compute=self.host_compute[largest],
            staging=staging,
            slots=[torch.from_numpy(self.weights.array(flat)) for flat in flats],
            source=source,
            nbytes=nbytes,
        )
        found = measure.measure_machine(self.gpu, bench, dtype, layer)
        for other in self.compute:
            if other.layout == bench.compute.layout:
                other.groups_from = bench.compute.groups_from
        return found

    # -- when memory is used up ----------------------------------------------------------------------

    def make_room(self) -> bool:
        if self.residency.capacity == 0:
            return False
        self.executor.shrink()
        return True

    def _shrink(self) -> None:
        """Fewer slots, filled again from host memory with what was resident; raises DaopError if there are
        none to give up. The caller has seen to it that no layer is running."""
        if self.residency.capacity == 0:
            free, total = self.gpu.memory()
            raise DaopError(
                f"the GPU's memory is used up although no expert is resident any more ({free >> 20} of "
                f"{total >> 20} MiB free): lower --context or --batch, or end what else uses the GPU "
                "(nvidia-smi lists it)"
            )
        self.transfers.wait_idle()
        self.gpu.synchronize()
        self._conductor.settle()
        resident = [
            flat for flat in range(self._checkpoint.geometry.total) if self.residency.is_resident(flat)
        ]
        for flat in resident:
            self.residency.evict(flat)
        slots = self.memory.slots
        while True:
            slots = [int(count * SHRINK) for count in slots]
            try:
                self.memory.allocate(slots)
                break
            except torch.OutOfMemoryError:
                if not any(slots):
                    raise
        self.shrinks += 1
        self.residency.resize(slots)
        self._conductor.policy.slots = self.residency.capacity
        self.executor.refill(resident)

    # -- figures ------------------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        return self.transfers.bytes_moved

    def memory_bytes(self) -> dict[str, int]:
        return {
            "experts": self.memory.expert_bytes,
            "staging": self.memory.staging_bytes,
            "host_pinned": self.weights.pinned_bytes,
            "host_pageable": self.weights.pageable_bytes,
            "experts_on_disk": self.weights.on_disk,
            "staged": self.transfers.handover.staged_bytes,
            "shrinks": self.shrinks,
            "peak": peak_rss(),
        }

    def drop_cache(self) -> None:
        self.reader.drop_cache()

    def close(self) -> None:
        self.executor.close()
        self.transfers.close()
        self.gpu.synchronize()
        self.memory.free()
        if not self._shares:
            self.weights.close()
        self.reader.close()


def ram_budget() -> int:
    """Bytes of host memory that experts may take here."""
    from daop.machine import read_memory

    usable = read_memory().usable
    return max(0, usable - default_headroom(usable))


def _on_host(form: ExpertForm) -> ExpertForm:
    """The form for the CPU: a norm behind each expert has weights, which the device's own has on the
    device."""
    if not isinstance(form.post_norm, torch.nn.Module):
        return form
    return dataclasses.replace(form, post_norm=copy.deepcopy(form.post_norm).to("cpu"))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
