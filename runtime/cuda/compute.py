"""Resident experts computed on the device, straight from their slots.

A layer is begun once, run in as many groups of experts as arrive together, and finished once. Every pair of
token and expert has a row of its own in a float32 buffer, and the rows of a token are added up in the end, in
the order of its choices: the sum does not depend on the order in which experts arrived, and no two
computations write to one place.

Two ways to multiply: ``grouped``, one kernel for a window of neighbouring slots (torch's grouped product),
where the numbers are bf16 and lie as it wants them; and ``loop``, a product per expert, which always works.
``faster`` measures which is better for how many rows.

Shape legend: T tokens, K experts per token, H hidden size, I intermediate size, P pairs of a group, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import IntArray
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.layout import ExpertForm, ExpertLayout, Part

from .slabs import DeviceSlab

WINDOW = 1000  # slots of one grouped product; torch takes fewer than 1024
GAP = 128  # neighbours further apart than this are two windows


@dataclass(frozen=True, slots=True)
class Window:
    """Slots ``first .. first + count`` of which a grouped product computes rows ``begin .. end`` of the
    group; ``ends`` int32 [count]: where each slot's rows end, counted from ``begin``."""

    first: int
    count: int
    begin: int
    end: int
    ends: IntArray


@dataclass(frozen=True, slots=True)
class Group:
    """Experts that are computed together: their slots ascending, their numbers of rows, and their pairs,
    int64 [P] grouped by slot. ``windows`` cut them for grouped products."""

    slots: list[int]
    rows: list[int]
    pairs: NDArray[np.int64]
    windows: list[Window]

    def arrays(self) -> list[NDArray[np.generic]]:
        """What the device needs to know of it, to be sent; ``Sent`` is what arrives."""
        slots = np.repeat(np.asarray(self.slots, dtype=np.int64), self.rows)
        return [self.pairs, slots, *(window.ends for window in self.windows)]


@dataclass(frozen=True, slots=True)
class Sent:
    """``Group.arrays`` on the device."""

    pairs: torch.Tensor  # int64 [P]
    slots: torch.Tensor  # int64 [P], each row's slot
    ends: Sequence[torch.Tensor]  # int32 [count] of each window


def make_group(slots: Sequence[int], pairs_of: Sequence[NDArray[np.int64]]) -> Group:
    """``pairs_of[i]`` are the pairs of the expert in ``slots[i]``."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    ascending = [slots[i] for i in order]
    rows = [len(pairs_of[i]) for i in order]
    pairs = np.concatenate([pairs_of[i] for i in order])
    return Group(ascending, rows, pairs, make_windows(ascending, rows))


def make_windows(
    slots: Sequence[int], rows: Sequence[int], window: int = WINDOW, gap: int = GAP
) -> list[Window]:
    """Cut ascending slots into windows of at most ``window`` slots without gaps wider than ``gap``."""
    out: list[Window] = []
    start, at = 0, 0
    for i in range(1, len(slots) + 1):
        if i < len(slots) and slots[i] - slots[i - 1] <= gap and slots[i] - slots[start] < window:
            continue
        first = slots[start]
        counts = np.zeros(slots[i - 1] - first + 1, dtype=np.int32)
        counts[np.asarray(slots[start:i]) - first] = rows[start:i]
        ends = np.cumsum(counts, dtype=np.int32)
        out.append(Window(first, len(counts), at, at + int(ends[-1]), ends))
        at += int(ends[-1])
        start = i
    return out


@dataclass(eq=False, slots=True)
class DeviceBatch:
    """One MoE layer of one forward pass, on the device."""

    hidden: torch.Tensor  # [T, H], contiguous
    weights: torch.Tensor  # [T * K] float32
    outputs: torch.Tensor  # [T * K, H] float32
    top_k: int


class DeviceExperts:
    """Computes experts of one layout and form."""

    def __init__(self, layout: ExpertLayout, form: ExpertForm, device: torch.device) -> None:
        self.layout = layout
        self.form = form
        down = layout.part("down")
        if down is None:
            raise AssertionError("every expert has a down projection")
        self._down = down
        self._coded = layout.codec != PLAIN
        self._up = self._find_up()
        self._edges = torch.empty(0, dtype=torch.int64)
        self.groups_from = 1 if self._can_group(device) else 0
        """Smallest number of rows from which on a group uses grouped products; 0: never."""

    def _can_group(self, device: torch.device) -> bool:
        """Whether torch's grouped product takes these weights as they lie: bf16, rows of whole 16 bytes, and
        on a GPU that has the kernel."""
        aligned = all(
            part.dtype == "BF16" and (len(part.shape) == 1 or part.shape[-1] % 8 == 0)
            for part in self.layout.parts
        )
        aligned &= self.form.hidden % 8 == 0 and self.form.intermediate % 8 == 0
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return False
        return aligned and grouped_product() is not None

    def begin(self, hidden: torch.Tensor, weights: torch.Tensor) -> DeviceBatch:
        """hidden [T, H], weights [T, K]."""
        tokens, top_k = weights.shape
        outputs = torch.zeros(tokens * top_k, hidden.shape[1], device=hidden.device)
        return DeviceBatch(hidden.contiguous(), weights.reshape(-1).float(), outputs, top_k)

    def run(self, batch: DeviceBatch, slab: DeviceSlab, group: Group, sent: Sent) -> None:
        """Compute a group's experts."""
        x, weights = self._inputs(batch, sent.pairs)
        grouped = 0 < self.groups_from <= len(group.pairs) and x.dtype == torch.bfloat16
        multiply = self._grouped(slab, group.windows, sent) if grouped else self._loop(slab, group, sent)
        batch.outputs.index_copy_(0, sent.pairs, self._compute(x, weights, multiply))

    def run_all(
        self, batch: DeviceBatch, slab: DeviceSlab, first: int, count: int, ids: torch.Tensor
    ) -> torch.Tensor:
        """Every expert e of the layer lies in slot ``first + e``: compute all that ``ids`` [T, K] choose,
        without the host knowing which. Gives how many pairs chose each, int32 [count]."""
        flat = ids.reshape(-1)
        chosen, pairs = torch.sort(torch.where((flat >= 0) & (flat < count), flat, count), stable=True)
        if self._edges.numel() != count:
            self._edges = torch.arange(1, count + 1, device=ids.device)
        ends = torch.searchsorted(chosen, self._edges, out_int32=True)  # chosen is sorted
        x, weights = self._inputs(batch, pairs)
        window = Window(first, count, 0, len(pairs), np.zeros(0, dtype=np.int32))
        slots = first + chosen.clamp(max=count - 1) if self.form.has_bias else chosen
        sent = Sent(pairs, slots, [ends])
        out = self._compute(x, weights, self._grouped(slab, [window], sent))
        # Padding has no group: its rows hold whatever was in memory.
        batch.outputs.index_copy_(0, pairs, out.masked_fill_((chosen == count)[:, None], 0.0))
        return torch.diff(ends, prepend=ends.new_zeros(1))

    def finish(self, batch: DeviceBatch, beside: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] in hidden's dtype: the sum over every token's experts, and what was computed ``beside``,
        [T, H] float32. One rounding."""
        total = batch.outputs.view(len(batch.hidden), batch.top_k, -1).sum(dim=1)
        if beside is not None:
            total += beside
        return total.to(batch.hidden.dtype)

    # -- the arithmetic ----------------------------------------------------------------------------

    def _inputs(self, batch: DeviceBatch, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's rows [P, H] and router weights [P, 1]."""
        x = batch.hidden[torch.div(pairs, batch.top_k, rounding_mode="floor")]
        weights = batch.weights[pairs][:, None]
        if self.form.scales_input:
            x = x * weights.to(x.dtype)
        return x, weights

    def _compute(self, x: torch.Tensor, weights: torch.Tensor, multiply: Product) -> torch.Tensor:
        """[P, H] -> [P, H] float32, router weights applied."""
        form = self.form
        inner = [multiply(part, x, form.transposed) for part in self._up]
        act = form.apply_gate(inner[0] if len(inner) == 1 else torch.cat(inner, dim=-1))
        out = multiply(self._down, act, form.down_is_transposed)
        if form.post_norm is not None:
            out = form.post_norm(out)
        return out.float() if form.scales_input else out.float() * weights

    def _find_up(self) -> list[Part]:
        """The parts that the input is multiplied with. Gate and up that touch are seen as one."""
        parts = {role: self.layout.part(role) for role in ("gate_up", "gate", "up")}
        found = [part for part in parts.values() if part is not None]
        gate, up = parts["gate"], parts["up"]
        if gate is None or up is None or self.form.transposed or self.form.has_bias or self._coded:
            return found
        if gate.dtype != up.dtype or gate.shape != up.shape or gate.offset + gate.nbytes != up.offset:
            return found
        shape = (2 * gate.shape[0], gate.shape[1])
        both = Part(role="gate_up", shape=shape, dtype=gate.dtype, offset=gate.offset, nbytes=2 * gate.nbytes)
        return [both]

    def _loop(self, slab: DeviceSlab, group: Group, sent: Sent) -> Product:
        """A product per expert, in the wider of the two dtypes."""

        def multiply(part: Part, x: torch.Tensor, transposed: bool) -> torch.Tensor:
            weights = slab.part(part)
            dtype = torch.promote_types(x.dtype, weights.dtype)
            out = []
            for slot, rows in zip(group.slots, torch.split(x.to(dtype), group.rows), strict=True):
                weight = weights[slot].to(dtype)
                out.append(rows @ (weight if transposed else weight.T))
            return self._add_bias(torch.cat(out), part, slab, sent)

        return self._decoded(slab, group, sent) if self._coded else multiply

    def _decoded(self, slab: DeviceSlab, group: Group, sent: Sent) -> Product:
        """A product per expert in float32, its weights decoded for it and dropped."""
        layout = self.layout

        def multiply(part: Part, x: torch.Tensor, transposed: bool) -> torch.Tensor:
            out = []
            for slot, rows in zip(group.slots, torch.split(layout.codec.inputs(x), group.rows), strict=True):
                parts = layout.views(slab.tensor[slot])
                weight = layout.codec.decode(parts, part.role, x.shape[1], 0, len(parts[part.role]))
                out.append(rows @ weight.T)
            return self._add_bias(torch.cat(out), part, slab, sent)

        return multiply

    def _grouped(self, slab: DeviceSlab, windows: Sequence[Window], sent: Sent) -> Product:
        """One product per window."""
        product = grouped_product()
        assert product is not None

        def multiply(part: Part, x: torch.Tensor, transposed: bool) -> torch.Tensor:
            weights = slab.part(part)
            out = []
            for window, ends in zip(windows, sent.ends, strict=True):
                chosen = weights[window.first : window.first + window.count]
                rows = x[window.begin : window.end]
                out.append(product(rows, chosen if transposed else chosen.transpose(-2, -1), offs=ends))
            return self._add_bias(out[0] if len(out) == 1 else torch.cat(out), part, slab, sent)

        return multiply

    def _add_bias(self, y: torch.Tensor, part: Part, slab: DeviceSlab, sent: Sent) -> torch.Tensor:
        bias = self.layout.part(f"{part.role}_bias")
        return y if bias is None else y + slab.part(bias)[sent.slots]


Product = Callable[[Part, torch.Tensor, bool], torch.Tensor]
"""(part, rows [P, in], whether it is stored [in, out]) -> [P, out]."""


def grouped_product() -> Callable[..., torch.Tensor] | None:
    """torch's grouped product, public since 2.10; None if this torch has none."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
