"""How much fast memory the experts get, and proof that everything else fits beside them.

``plan_memory`` collects the numbers for a checkpoint on this machine, ``divide`` is the arithmetic. What
does not fit is an error with the numbers and a remedy, never a warning.

The budget of experts (``fast_memory`` in bytes, or ``ecr`` as a share of the experts) is for slots alone.
What the process adds to its memory at most is ``experts + non_experts + kv_cache + workspace``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daop.core import DaopError
from daop.units import format_size, parse_size

if TYPE_CHECKING:
    from daop.runtime.checkpoint import Checkpoint
    from daop.runtime.layout import ExpertLayout

MIB = 1 << 20
KERNEL_SCRATCH = 64 * MIB  # of a native call: converted inputs and outputs, at most 32 MiB each


@dataclass(frozen=True, kw_only=True)
class SlotClass:
    """Experts whose slots are interchangeable: how many the model has, and the bytes of one slot."""

    experts: int
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose; ``slots[c]`` is the number of slots of slot class ``c``.

    ``limit``: bytes that may be used, and ``limit_source`` who says so. ``headroom`` is left free.
    ``ecr``: share of the routed experts that has a slot. ``reason``: how it came about, for people.
    """

    slots: tuple[int, ...]
    experts: int
    non_experts: int
    kv_cache: int
    workspace: int
    headroom: int
    limit: int
    limit_source: str
    ecr: float
    reason: str

    @property
    def total(self) -> int:
        return self.experts + self.non_experts + self.kv_cache + self.workspace

    def as_dict(self) -> dict[str, int]:
        names = ("experts", "non_experts", "kv_cache", "workspace", "headroom", "total", "limit")
        return {name: int(getattr(self, name)) for name in names}


def default_headroom(limit: int) -> int:
    """5 % of what may be used, between 64 MiB and 1 GiB: allocator slack and what estimates miss."""
    return max(64 * MIB, min(1024 * MIB, limit // 20))


def plan_memory(
    checkpoint: Checkpoint,
    *,
    fast_memory: int | str | None = None,
    ecr: float | None = None,
    context: int = 2048,
    batch: int = 1,
    staging: int = 4,
    dtype: str | None = None,
    limit: tuple[int, str] | None = None,
    activations: int | None = None,
) -> MemoryPlan:
    """The plan for a checkpoint: on the device ``host`` unless ``limit`` says otherwise.

    ``fast_memory``: bytes, a size like "2GiB", or "auto" (also what is done if neither it nor ``ecr`` is
    given). ``staging``: buffers of each slot class for experts that are computed and dropped. ``dtype``: that
    of the model outside its experts (None: what its configuration says). ``limit``: bytes that may be used
    and who says so; by default what this machine and the containers around the process leave.
    ``activations``: what a prefill of the whole context was seen to take, KV cache included (None:
    estimated)."""
    from daop.machine import read_memory
    from daop.runtime.kv_cache import kv_cache

    fast_memory = as_bytes(fast_memory)
    if context < 1 or batch < 1:
        raise DaopError(f"--context {context} and batch {batch} must both be at least 1")
    if limit is None:
        memory = read_memory()
        limit = (memory.usable, memory.source)
    classes = slot_classes_of(checkpoint)
    non_experts, itemsize = non_expert_memory(checkpoint, dtype)
    config = checkpoint.skeleton.model.config
    cache = kv_cache(checkpoint.skeleton.model, context=context, batch=batch, itemsize=itemsize)
    workspace = staging * sum(kind.slot_bytes for kind in classes)
    if activations is None:
        largest = max(checkpoint.index.tensors[name].nbytes for name in checkpoint.other_tensors)
        workspace += activation_memory(config, context=context, batch=batch, itemsize=itemsize)
        workspace = max(workspace, 2 * largest)  # while loading: one tensor as stored, and what is made of it
    else:
        workspace += max(0, activations - cache.total)
    return divide(
        classes=classes,
        non_experts=non_experts,
        kv_cache=cache.total,
        workspace=workspace,
        limit=limit[0],
        limit_source=limit[1],
        fast_memory=fast_memory,
        ecr=ecr,
    )


def as_bytes(fast_memory: int | str | None) -> int | None:
    """``fast_memory`` as a number; None for "auto"."""
    if not isinstance(fast_memory, str):
        return fast_memory
    automatic = fast_memory.strip().lower() == "auto"
    return None if automatic else parse_size(fast_memory, "--fast-memory")


def slot_classes_of(checkpoint: Checkpoint) -> list[SlotClass]:
    """A slot class is a layout, in order of appearance."""
    counts: dict[ExpertLayout, int] = {}
    for layout, count in zip(checkpoint.layouts, checkpoint.geometry.experts, strict=True):
        counts[layout] = counts.get(layout, 0) + count
    return [SlotClass(experts=count, slot_bytes=layout.nbytes) for layout, count in counts.items()]


def non_expert_memory(checkpoint: Checkpoint, dtype: str | None) -> tuple[int, int]:
    """Bytes of all parameters but the routed experts' once loaded, and the bytes of one number."""
    import torch

    skeleton = checkpoint.skeleton
    stored = checkpoint.layouts[0].parts[0].dtype
    known = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    name = dtype or str(skeleton.config.dtype or known.get(stored, "bfloat16"))
    kind = getattr(torch, known.get(name, name.removeprefix("torch.")), None)
    if not isinstance(kind, torch.dtype):
        raise DaopError(f"--dtype {dtype} is not known; known: float32, bfloat16, float16")
    experts = {name for layer in skeleton.experts for name in layer.sources}
    count = sum(p.numel() for name, p in skeleton.model.named_parameters() if name not in experts)
    return count * kind.itemsize, kind.itemsize


def activation_memory(config: Any, *, context: int, batch: int, itemsize: int) -> int:
    """A generous estimate of what a prefill of the whole context holds at once.

    Of every token ten vectors of the model's width, one in float32 of each chosen expert (outputs that wait
    for their turn in the sum), the widest feed-forward; the scratch memory of the native kernels; the
    mask where there is one (a batch, a sliding window); scores of all heads where attention is not a fused
    kernel; and the last token's logits.
    """
    text = config.get_text_config()
    rows = context * batch
    top_k = getattr(text, "num_experts_per_tok", None) or 1
    widest = max(text.hidden_size, *(getattr(text, name, None) or 0 for name in _WIDTHS))
    per_row = text.hidden_size * (10 * max(itemsize, 2) + 4 * top_k) + 3 * widest * 4
    pairs = batch * context * context
    eager = getattr(text, "_attn_implementation", None) == "eager"
    scores = pairs * text.num_attention_heads * (4 + 2 * itemsize) if eager else 0
    masked = eager or batch > 1 or getattr(text, "sliding_window", None)
    mask = pairs * (1 + 4) if masked else 0  # of truth values, and of numbers made of it
    return int(KERNEL_SCRATCH + rows * per_row + mask + scores + 3 * batch * text.vocab_size * 4)


_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim")


def divide(
    *,
    classes: Sequence[SlotClass],
    non_experts: int,
    kv_cache: int,
    workspace: int,
    limit: int,
    limit_source: str,
    fast_memory: int | None = None,
    ecr: float | None = None,
    headroom: int | None = None,
) -> MemoryPlan:
    """Divide ``limit`` bytes; without ``fast_memory`` and ``ecr`` the experts get all that is left.

    Raises DaopError if what is asked does not fit into ``limit``, or if the rest alone does not.
    """
    _check_asked(fast_memory, ecr)
    headroom = default_headroom(limit) if headroom is None else headroom
    left = limit - non_experts - kv_cache - workspace - headroom
    beside = (
        f"non-experts {format_size(non_experts)}, KV cache {format_size(kv_cache)}, "
        f"workspace {format_size(workspace)} and headroom {format_size(headroom)}"
    )
    if left < 0:
        raise DaopError(
            f"the model does not fit even without a resident expert: {beside} need "
            f"{format_size(limit - left)}, but {format_size(limit)} may be used ({limit_source}). "
            "Lower --context or the batch, free memory, or raise the limit"
        )
    slots, how = _slots(classes, left, fast_memory, ecr)
    used = sum(count * kind.slot_bytes for count, kind in zip(slots, classes, strict=True))
    total = sum(kind.experts for kind in classes)
    if used > left:
        share = left / sum(kind.experts * kind.slot_bytes for kind in classes)
        raise DaopError(
            f"{how} asks for {format_size(used)} of experts, but of the {format_size(limit)} that may be "
            f"used ({limit_source}) only {format_size(left)} are left beside {beside}. Lower it to at most "
            f"--fast-memory {left // MIB}MiB (--ecr {int(share * 1000) / 1000:g}), or leave it out "
            "to have it chosen"
        )
    reason = (
        f"{how}: {sum(slots)} of {total} experts ({format_size(used)}) have a slot; {format_size(limit)} "
        f"may be used ({limit_source}), of which {beside} are kept for the rest"
    )
    return MemoryPlan(
        slots=slots,
        experts=used,
        non_experts=non_experts,
        kv_cache=kv_cache,
        workspace=workspace,
        headroom=headroom,
        limit=limit,
        limit_source=limit_source,
        ecr=sum(slots) / total,
        reason=reason,
    )


def _check_asked(fast_memory: int | None, ecr: float | None) -> None:
    if fast_memory is not None and ecr is not None:
        raise DaopError(
            "give either --fast-memory or --ecr, not both: each sets how many experts are resident"
        )
    if fast_memory is not None and fast_memory < 0:
        raise DaopError(f"--fast-memory is {fast_memory}, but must not be negative")
    if ecr is not None and not 0 <= ecr <= 1:
        raise DaopError(f"--ecr is {ecr}, but must lie between 0 (no expert resident) and 1 (all of them)")


def _slots(
    classes: Sequence[SlotClass], left: int, fast_memory: int | None, ecr: float | None
) -> tuple[tuple[int, ...], str]:
    """Slots of each class as asked, or as many as fit into ``left``; and how they were chosen."""
    if ecr is not None:
        return slots_for_share(classes, ecr), f"--ecr {ecr:g}"
    asked = left if fast_memory is None else fast_memory
    how = "auto" if fast_memory is None else f"--fast-memory {format_size(fast_memory)}"
    whole = sum(kind.experts * kind.slot_bytes for kind in classes)
    if asked >= whole:
        how += f", of which all experts take {format_size(whole)}"
    return slots_for_bytes(classes, asked), how


def slots_for_share(classes: Sequence[SlotClass], share: float) -> tuple[int, ...]:
    """The same share of every class, in whole slots; rounding is towards fewer."""
    return tuple(min(kind.experts, int(kind.experts * share + 1e-9)) for kind in classes)


def slots_for_bytes(classes: Sequence[SlotClass], budget: int) -> tuple[int, ...]:
    """The largest common share that fits into ``budget``, then single slots where they still fit."""
    whole = sum(kind.experts * kind.slot_bytes for kind in classes)
    share = 1.0 if budget >= whole else budget / whole
    slots = list(slots_for_share(classes, share))
    left = budget - sum(count * kind.slot_bytes for count, kind in zip(slots, classes, strict=True))
    if left < 0:  # the rounding of a share in floating point
        slots = [max(0, count - 1) for count in slots]
        left = budget - sum(count * kind.slot_bytes for count, kind in zip(slots, classes, strict=True))
    for index, kind in enumerate(classes):
        more = min(kind.experts - slots[index], left // kind.slot_bytes)
        slots[index] += more
        left -= more * kind.slot_bytes
    return tuple(slots)
