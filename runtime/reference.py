"""The plain way to run experts: read each one's bytes from the files, then multiply. Nothing is kept.

Every faster path is compared with this one. It is the meaning of ``Checkpoint.ranges``, ``ExpertLayout``
and ``ExpertForm`` in code.

Shape legend: T tokens, K experts per token, n rows of one expert, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from daop.runtime.checkpoint import Checkpoint
from daop.runtime.experts import ExpertsFn
from daop.runtime.layout import ExpertForm


def read_expert(checkpoint: Checkpoint, flat: int) -> torch.Tensor:
    """A slot (uint8 [nbytes]) filled with the expert's bytes."""
    layer, _ = checkpoint.geometry.pair(flat)
    slot = torch.zeros(checkpoint.layouts[layer].nbytes, dtype=torch.uint8)
    buffer = slot.numpy().data
    for part in checkpoint.ranges(flat):
        with checkpoint.files[part.file].open("rb", buffering=0) as file:
            file.seek(part.offset)
            got = file.readinto(buffer[part.slot_offset : part.slot_offset + part.nbytes])
            if got != part.nbytes:
                raise OSError(f"{checkpoint.files[part.file]} ended early")
    return slot


def compute_expert(form: ExpertForm, parts: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One expert's output [n, H] for its rows x [n, H], in x's dtype; router weights are not applied."""
    up_roles = [role for role in ("gate_up", "gate", "up") if role in parts]
    inner = torch.cat([_linear(parts, role, x, form.transposed) for role in up_roles], dim=-1)
    out = _linear(parts, "down", form.apply_gate(inner), form.down_is_transposed)
    return out if form.post_norm is None else form.post_norm(out)


def _linear(parts: dict[str, torch.Tensor], role: str, x: torch.Tensor, transposed: bool) -> torch.Tensor:
    weight, bias = parts[role].to(x), parts.get(f"{role}_bias")
    return functional.linear(x, weight.T if transposed else weight, None if bias is None else bias.to(x))


def reference_experts(checkpoint: Checkpoint, forms: Sequence[ExpertForm]) -> ExpertsFn:
    """An ``ExpertsFn`` that reads every expert anew each time it is chosen. Sums are in float32."""

    def run(
        layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:  # [T, H], [T, K], [T, K] -> [T, H]
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        count, form = checkpoint.geometry.experts[layer], forms[layer]
        for expert in sorted(set(ids.flatten().tolist())):
            if expert >= count:  # padding
                continue
            rows, ranks = torch.where(ids == expert)
            flat = checkpoint.geometry.flat(layer, expert)
            slot = read_expert(checkpoint, flat)
            checkpoint.layouts[layer].check_finite(slot, checkpoint.describe(flat))
            weight = weights[rows, ranks, None]  # [n, 1]
            x = hidden[rows]  # [n, H]
            layout = checkpoint.layouts[layer]
            parts = layout.weights(layout.views(slot.to(hidden.device)), form)
            if form.scales_input:
                y = compute_expert(form, parts, x * weight.to(x.dtype)).float()
            else:
                y = compute_expert(form, parts, x).float() * weight.float()
            out.index_add_(0, rows, y)
        return out.to(hidden.dtype)

    return run
