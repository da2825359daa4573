"""An expert's bytes from one layout to another: how it lies in a packed file, and its numbers converted."""

from __future__ import annotations

from typing import Any

import torch

from daop.core import DaopError
from daop.runtime.codecs.base import Codec
from daop.runtime.codecs.integers import Integers
from daop.runtime.experts import Experts, PartSource
from daop.runtime.format_names import GROUPS, PAGE
from daop.runtime.layout import ExpertLayout

DTYPES = ("keep", *GROUPS)
ROWS = 1 << 22  # weights that are converted at a time


def settings_of(dtype: str, group: int) -> dict[str, Any]:
    """What is asked for, as the manifest has it; ``group`` 0: the usual one. ``DaopError`` if unknown."""
    if dtype not in DTYPES:
        raise DaopError(f"--dtype {dtype} is not known; known: {', '.join(DTYPES)}")
    if dtype == "keep":
        if group:
            raise DaopError("--group is for int8 and int4: leave it out, for --dtype keep changes no number")
        return {"dtype": dtype}
    return {"dtype": dtype, "group": Integers(int(dtype[3:]), group or GROUPS[dtype]).group}


def codec_of_settings(settings: dict[str, Any]) -> Codec | None:
    """The codec of the result; None: the source's own."""
    if settings["dtype"] == "keep":
        return None
    return Integers(int(settings["dtype"][3:]), settings["group"])


def packed_layout(layout: ExpertLayout, experts: Experts, codec: Codec | None) -> ExpertLayout:
    """Parts in the source's order, each weight in ``codec`` (None: as it is); whole pages."""
    if codec is None:
        parts, kept = [(part.role, part.shape, part.dtype) for part in layout.parts], layout.codec
    else:
        parts, kept = [], codec
        for part in layout.parts:
            if part.role.endswith("_bias"):
                parts.append((part.role, part.shape, part.dtype))
            elif not part.role.endswith(layout.codec.suffixes or ("\0",)):
                rows, columns = weight_shape(experts, part.role)
                for suffix, piece in codec.pieces(rows, columns).items():
                    parts.append((part.role + suffix, piece.shape, piece.dtypes[0]))
    made = ExpertLayout.pack(parts, kept)
    nbytes = -(-made.nbytes // PAGE) * PAGE
    return ExpertLayout(parts=made.parts, nbytes=nbytes, stored_bytes=nbytes, codec=kept)


def weight_shape(experts: Experts, role: str) -> tuple[int, int]:
    """(outputs, inputs) of a role's weight."""
    source = _source_of(experts, role)
    rows, columns = reversed(source.shape) if source.transposed else source.shape
    return (rows // 2 if source.role != role else rows), columns


def _source_of(experts: Experts, role: str) -> PartSource:
    by_role = {source.role: source for source in experts.sources.values()}
    return by_role.get(role) or by_role["gate_up"]


def convert(
    source: ExpertLayout,
    target: ExpertLayout,
    experts: Experts,
    slot: torch.Tensor,
    out: torch.Tensor,
    name: str,
) -> None:
    """An expert's bytes in one layout, to its bytes in another; ``name`` for messages."""
    out.zero_()
    parts, made = source.views(slot), target.views(out)
    for role, part in parts.items():
        if source.codec == target.codec or role.endswith("_bias"):
            made[role].copy_(part)
        elif role in made and not role.endswith(source.codec.suffixes or ("\0",)):
            _convert_weight(source, target, experts, parts, made, role, name)


def _convert_weight(
    source: ExpertLayout,
    target: ExpertLayout,
    experts: Experts,
    parts: dict[str, torch.Tensor],
    made: dict[str, torch.Tensor],
    role: str,
    name: str,
) -> None:
    """Some rows at a time, through float32."""
    codec = target.codec
    assert isinstance(codec, Integers)
    rows, columns = weight_shape(experts, role)
    flip = not source.codec.by_rows and _source_of(experts, role).transposed
    step = max(1, ROWS // columns)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        if flip:
            weight = parts[role][:, first:last].float().T
        else:
            weight = source.codec.decode(parts, role, columns, first, last)
        if not bool(weight.isfinite().all()):
            raise DaopError(f"the {role} weights of {name} are not all finite: the source is damaged")
        for suffix, piece in codec.encode(weight).items():
            made[role + suffix][first:last].copy_(piece)
