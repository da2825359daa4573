"""One model on the device ``cuda`` under many policies and budgets, its host memory filled once; for
``gpu_check.py``.

Decoding is driven with given tokens, so that every contender does the same work and logits can be compared.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daop.core import Phase
from daop.forward_watch import CACHE_ARGUMENTS
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.cuda.compute import DeviceExperts
from daop.runtime.cuda.machinery import CudaMachinery
from daop.runtime.cuda.streams import Gpu
from daop.runtime.cuda.trial import layer_seconds
from daop.runtime.executor import Executor
from daop.runtime.experts import ExpertsFn
from daop.runtime.machinery import Setup
from daop.runtime.memory import MemoryPlan, divide, slot_classes_of
from daop.runtime.model import build_model
from daop.runtime.policies.base import Policy, make_policy
from daop.runtime.profile import Profile
from daop.runtime.recording import Recorder


@dataclass(frozen=True)
class Driven:
    """What driving a model gave. ``logits``: of the last prompt token and every decode step, float32 on the
    CPU."""

    prefill_tokens_per_second: float
    tokens_per_second: float
    logits: torch.Tensor


@torch.inference_mode()
def drive(
    model: Any,
    tokens: list[int],
    steps: int,
    synchronize: Callable[[], None],
    begin: Callable[[Phase, int, int], None] | None = None,
    end: Callable[[], None] | None = None,
) -> Driven:
    """A prefill of all but the last ``steps`` tokens, then one step for each of them."""
    from transformers import DynamicCache

    device = next(model.parameters()).device
    named = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in named), CACHE_ARGUMENTS[-1])
    given = torch.tensor([tokens], device=device)
    prompt = len(tokens) - steps
    cache = DynamicCache(config=model.config)
    kept, began, prefilled = [], time.perf_counter(), 0.0
    for at in (0, *range(prompt, len(tokens))):
        part = given[:, :prompt] if at == 0 else given[:, at : at + 1]
        if begin is not None:
            begin(Phase.PREFILL if at == 0 else Phase.DECODE, part.shape[1], int(at == 0))
        out = model(part, use_cache=True, logits_to_keep=1, **{name: cache})
        kept.append(out.logits[0, -1])
        if end is not None:
            end()
        if at == 0:
            synchronize()
            prefilled = time.perf_counter()
        else:  # a sampler reads every token's logits
            int(kept[-1].argmax())
    ended = time.perf_counter()
    return Driven(
        prompt / max(prefilled - began, 1e-9),
        steps / max(ended - prefilled, 1e-9),
        torch.stack(kept).float().cpu(),
    )


class Bench:
    """A checkpoint with everything but its experts on the device, and its experts in host memory."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        self.gpu = gpu
        self.checkpoint = open_checkpoint(folder)
        self._run: ExpertsFn | None = None
        self.built = build_model(self.checkpoint, self._call, device=gpu.device)
        self.model = self.built.model
        self.compute = [
            DeviceExperts(layout, form, gpu.device)
            for layout, form in zip(self.checkpoint.layouts, self.built.forms, strict=True)
        ]
        self.layer = layer_seconds(gpu, self.built, self.use)
        self.profile: Profile | None = None
        self.base = self._machinery(make_policy("on_demand"), 0.0, None)

    def use(self, run: ExpertsFn) -> None:
        self._run = run

    def _call(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        assert self._run is not None
        return self._run(layer, hidden, ids, weights)

    def _plan(self, ecr: float) -> MemoryPlan:
        free, total = self.gpu.memory()
        return divide(
            classes=slot_classes_of(self.checkpoint),
            non_experts=0,
            kv_cache=0,
            workspace=min(free // 8, 1 << 30),
            limit=free,
            limit_source=f"free of {total >> 20} MiB",
            ecr=ecr,
        )

    def _machinery(self, policy: Policy, ecr: float, share: CudaMachinery | None) -> CudaMachinery:
        setup = Setup(built=self.built, policy=policy, use=self.use, told=lambda _, __: None)
        return CudaMachinery(
            self.checkpoint,
            self._plan(ecr),
            setup,
            gpu=self.gpu,
            compute=self.compute,
            layer_seconds=self.layer,
            ram=1 << 40,  # all of it: a virtual machine may show less memory than it will give
            direct_io=False,
            share=share,
        )

    @contextmanager
    def run(self, policy: str | Policy, ecr: float, *, poison: bool = False) -> Iterator[CudaMachinery]:
        """A policy at a budget, its hot set filled. ``poison``: what holds no expert is NaN."""
        chosen = policy if isinstance(policy, Policy) else make_policy(policy, self.profile)
        machinery = self._machinery(chosen, ecr, self.base)
        try:
            if poison:
                for slab in (*machinery.memory.slabs, *machinery.memory.staging):
                    slab.tensor.fill_(0xFF)
                self.gpu.synchronize()
            machinery.executor.start()
            self.use(machinery.executor)
            yield machinery
        finally:
            self._run = None
            machinery.close()
            del machinery
            self.gpu.release()

    def drive(
        self,
        machinery: CudaMachinery,
        tokens: list[int],
        steps: int,
        recorder: Recorder | None = None,
        sequence: int = 0,
    ) -> Driven:
        """``drive`` with the executor told of every pass, and the routing recorded if there is a recorder."""
        executor: Executor = machinery.executor
        executor.recorder = recorder
        position = [0]

        def begin(phase: Phase, rows: int, new: int) -> None:
            executor.begin_forward(phase, rows, new)
            if recorder is not None:
                places = np.arange(position[0], position[0] + rows, dtype=np.int32)
                recorder.begin_forward(phase, np.full(rows, sequence, dtype=np.int32), places)
                position[0] += rows

        end = recorder.end_forward if recorder is not None else None
        try:
            return drive(self.model, tokens, steps, self.gpu.synchronize, begin, end)
        finally:
            executor.recorder = None

    def close(self) -> None:
        self.base.close()
