"""Steps of the model with made-up experts, to learn what it takes beside them: memory, and time per layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from inspect import signature

import numpy as np
import torch

from daop.runtime.experts import ExpertsFn
from daop.runtime.model import BuiltModel

from .compute import DeviceExperts, Sent, make_group
from .slabs import DeviceSlab
from .streams import Gpu

TRIAL_TOKENS = 4096  # of a longer context only so many are tried, and the rest is in proportion
STEPS = 3


@torch.inference_mode()
def trial_bytes(
    gpu: Gpu,
    built: BuiltModel,
    compute: Sequence[DeviceExperts],
    use: Callable[[ExpertsFn], None],
    *,
    context: int,
    batch: int,
) -> int | None:
    """The most that a prefill of the whole context takes beside weights and experts' slots, KV cache
    included; None where nobody counts. Every token's experts are computed, all with the bytes of one."""
    gpu.release()
    before = gpu.peak_bytes(reset=True)
    if before is None:
        return None
    layouts = {id(one.layout): one.layout for one in compute}
    slabs = {key: DeviceSlab(layout, 1, gpu.device) for key, layout in layouts.items()}
    for slab in slabs.values():
        slab.tensor.zero_()
    gpu.peak_bytes(reset=True)
    base = gpu.peak_bytes(reset=True) or 0  # nothing was allocated since the last reset: what there is now

    def run(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts = compute[layer]
        group = make_group([0], [np.arange(ids.numel(), dtype=np.int64)])
        pairs, slots, *ends = [torch.from_numpy(array).to(hidden.device) for array in group.arrays()]
        started = experts.begin(hidden, weights)
        experts.run(started, slabs[id(experts.layout)], group, Sent(pairs, slots, ends))
        return experts.finish(started)

    tokens = min(context, TRIAL_TOKENS)
    use(run)
    given = torch.zeros(batch, tokens, dtype=torch.int64, device=gpu.device)
    # As generating does: only the last token's logits, where the family can leave out the others.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in signature(built.model.forward).parameters else {}
    built.model(given, use_cache=True, **fewer)
    gpu.synchronize()
    peak = gpu.peak_bytes(reset=True) or 0
    slabs.clear()
    gpu.release()
    return int((peak - base) * context / tokens)


@torch.inference_mode()
def layer_seconds(
    gpu: Gpu, built: BuiltModel, use: Callable[[ExpertsFn], None], rows: int = 64
) -> tuple[float, float]:
    """A layer without its routed experts: seconds for one row, and for every further one."""
    use(lambda layer, hidden, ids, weights: torch.zeros_like(hidden))
    layers = len(built.forms)

    def step(tokens: int) -> float:
        given = torch.zeros(1, tokens, dtype=torch.int64, device=gpu.device)
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            built.model(given, use_cache=False)
            gpu.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    one, many = step(1), step(rows)
    return one / layers, max(0.0, many - one) / (rows - 1) / layers
