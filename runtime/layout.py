"""How an expert lies in a slot, and what is computed with it.

A *slot* is a flat uint8 buffer that holds one expert as the file stores it. ``ExpertLayout`` says where
each tensor of the expert lies in the slot and which codec its weights are in, ``ExpertForm`` what the
model's family computes with them.
Layers whose experts have the same shapes share one equal layout, so that a slot serves any of them.

Shape legend: H hidden size, I intermediate size, n rows (tokens) of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from daop.core import DaopError

from .codecs.base import TYPES, Codec, Parts
from .codecs.plain import PLAIN

ALIGNMENT = 64  # a cache line, and the widest vector load
SAMPLE = 64  # values of each part that check_finite looks at, at each end

DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of an expert inside its slot.

    ``role``: "gate", "up", "gate_up" (fused, gate first unless the form says interleaved), "down", each also
    with the suffix "_bias", or a codec's ("_scale"). ``shape`` is as stored, ``dtype`` safetensors' name,
    ``offset`` bytes from the slot's start.
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Where the parts of one expert lie.

    ``nbytes`` is the slot's size, a multiple of 64; ``stored_bytes`` what the files hold of it.
    """

    parts: tuple[Part, ...]
    nbytes: int
    stored_bytes: int
    codec: Codec = PLAIN

    @classmethod
    def pack(cls, parts: Sequence[tuple[str, tuple[int, ...], str]], codec: Codec = PLAIN) -> ExpertLayout:
        """The layout of parts ``(role, shape, dtype)`` in this order, each at a multiple of 64 bytes."""
        placed, offset, stored = [], 0, 0
        for role, shape, dtype in parts:
            nbytes = TYPES[dtype].itemsize
            for size in shape:
                nbytes *= size
            placed.append(Part(role=role, shape=shape, dtype=dtype, offset=offset, nbytes=nbytes))
            stored += nbytes
            offset = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
        return cls(parts=tuple(placed), nbytes=offset, stored_bytes=stored, codec=codec)

    def part(self, role: str) -> Part | None:
        """The part with that role, or None."""
        return next((part for part in self.parts if part.role == role), None)

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views into a uint8 slot [nbytes], by role; nothing is copied."""
        return {
            part.role: slot[part.offset : part.offset + part.nbytes].view(TYPES[part.dtype]).view(part.shape)
            for part in self.parts
        }

    def weights(self, parts: Parts, form: ExpertForm) -> dict[str, torch.Tensor]:
        """Weights and biases by role, decoded: a plain part as it is, any other as float32. For tests and
        references; what runs decodes a few rows at a time."""
        if self.codec == PLAIN:
            return dict(parts)
        out = {role: part for role, part in parts.items() if role.endswith("_bias")}
        for role in ("gate", "up", "gate_up", "down"):
            if role in parts:
                columns = form.intermediate if role == "down" else form.hidden
                out[role] = self.codec.decode(parts, role, columns, 0, len(parts[role]))
        return out

    def check_finite(self, slot: torch.Tensor, expert: str) -> None:
        """Raise if the first or last 64 values of any part are not all finite.

        A placeholder that was saved unfilled is NaN from end to end, so the ends give it away at a
        cost that does not grow with the expert. ``expert`` names it in the error. A single NaN in the
        middle is not looked for.
        """
        for role, tensor in self.views(slot).items():
            if tensor.dtype in (torch.int8, torch.uint8):  # all values are numbers
                continue
            flat = tensor.view(-1)
            for end in (flat[:SAMPLE], flat[-SAMPLE:]):
                if not bool(torch.isfinite(end.float()).all()):
                    raise DaopError(
                        f"the {role} tensor of {expert} holds values that are not finite (NaN or "
                        "infinity): the checkpoint is damaged or was saved before its weights were "
                        "filled in; fetch it again"
                    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertForm:
    """What to compute with an expert's parts.

    ``y = (act(x @ gate_up)) @ down`` with these particulars:
    ``transposed``: weights are stored [in, out] (else [out, in]); ``down_transposed`` says it for down alone
    where a family stores that one the other way round (dbrx), None where it does not.
    ``interleaved``: the outputs of the fused gate/up alternate gate, up, gate, up (else gate first, then up).
    ``activation`` names the arithmetic for native kernels: transformers' name of the activation that is
    applied to the gate (a key of ``activations.ACTIVATIONS``), "gpt_oss" (clamped swiglu, with
    ``activation_arguments`` alpha and limit), or "custom": only ``apply_gate`` knows.
    ``apply_gate``: transformers' own function from the fused output [n, 2I] in the module's order to
    [n, I]; without a gate the activation, [n, I] to [n, I].
    ``scales_input``: the router weight multiplies the expert's input instead of its output.
    ``post_norm``: applied to each expert's output before the router weight, or None.
    """

    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    transposed: bool
    interleaved: bool
    activation: str
    apply_gate: Callable[[torch.Tensor], torch.Tensor]
    activation_arguments: tuple[float, ...] = ()
    down_transposed: bool | None = None
    scales_input: bool = False
    post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    def as_stored(self, layout: ExpertLayout) -> ExpertForm:
        """The form of a layout's bytes: a codec may lay weights row by row where the family does not."""
        if layout.codec.by_rows:
            return replace(self, transposed=False, down_transposed=False)
        return self

    @property
    def down_is_transposed(self) -> bool:
        """Whether down is stored [in, out]."""
        return self.transposed if self.down_transposed is None else self.down_transposed
