"""Routed experts computed on the CPU, from the bytes that the files store.

``HostExperts`` serves the layers of one layout and form. A layer of one forward pass is three calls:

    batch = experts.begin(hidden, ids, weights)     # who computes what; batch.experts, batch.tokens
    experts.run(batch, [3, 17], [slot, slot])       # as often as wanted, in any order and grouping
    out = experts.finish(batch)                     # every chosen expert has run exactly once

The result never depends on the order or grouping in which experts were run, bit for bit, so it does not
depend on which of them were resident: each expert's output is computed alone, and a token's outputs are
added in float32 in ascending order of expert, then rounded once. Outputs that arrive ahead of their turn
are kept, [n, H] in float32 each; a caller that runs experts in ascending order keeps almost nothing.

Experts of few rows go to the native kernels (``native.py``), many at a time; the rest, and all where there
are no kernels or they do not know the form, to torch. Which path an expert takes depends on its number of
rows alone, never on its company.

Numbers: router weights, activations and sums are in float32. Products are too, except on two paths of
torch's that are much faster in bf16, where an expert's inner values are rounded to bf16 as in
transformers: a single row, and many rows on a CPU with bf16 arithmetic.

Shape legend: T tokens, K experts per token, H hidden size, I intermediate size, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import FloatArray, IntArray

from .layout import ExpertForm, ExpertLayout
from .native import Kernels, describe_form, load_kernels, padded

FEW_ROWS = 16  # up to here reading the weights costs more than multiplying
NATIVE_VALUES = 1 << 24  # outputs of one native call, at most (if of several experts): 64 MiB
BLOCK_VALUES = 1 << 18  # weights converted at a time: 1 MiB of float32, which a core's caches hold


@dataclass(eq=False)
class Batch:
    """One MoE layer of one forward pass.

    ``experts`` are the distinct chosen experts, ascending; ``tokens`` says how many tokens chose each.
    """

    hidden: torch.Tensor  # [T, H]
    weights: torch.Tensor  # [T * K] float32
    experts: IntArray
    tokens: IntArray
    pairs: NDArray[np.int64]  # indices into [T * K], grouped by expert in the order of ``experts``
    starts: list[int]  # where each expert's pairs begin, and their end
    top_k: int
    sum: torch.Tensor  # [T, H] float32
    prepared: torch.Tensor | None = None  # hidden as the native kernels read it
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)  # position -> output [n, H]
    turn: int = 0  # position of the expert whose output is added next

    def position(self, expert: int) -> int:
        """Where an expert stands among the chosen ones."""
        position = int(np.searchsorted(self.experts, expert))
        if position == len(self.experts) or self.experts[position] != expert:
            raise ValueError(f"expert {expert} was not chosen by any token")
        if position < self.turn or position in self.waiting:
            raise ValueError(f"expert {expert} has already been run")
        return position

    def pairs_of(self, position: int) -> torch.Tensor:
        return torch.from_numpy(self.pairs[self.starts[position] : self.starts[position + 1]])

    def weight_sums(self) -> FloatArray:
        """[len(experts)] sum of the router weights that each chosen expert got."""
        if not len(self.experts):
            return np.zeros(0, np.float32)
        chosen = self.weights.numpy()[self.pairs]
        return np.add.reduceat(chosen, self.starts[:-1], dtype=np.float32)


class HostExperts:
    """Computes experts of one layout and form, of which a layer has ``count``.

    One thread at a time may use an instance: it owns scratch memory. ``kernels`` None keeps to torch.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        form: ExpertForm,
        count: int,
        *,
        kernels: Kernels | Literal["auto"] | None = "auto",
    ) -> None:
        self.layout = layout
        self.form = form
        self.count = count
        self._scratch = torch.empty(0)
        self._kernels = load_kernels() if kernels == "auto" else kernels
        self._native_form = describe_form(layout, form)
        columns = form.transposed or form.down_is_transposed
        self._native_rows = FEW_ROWS if columns or has_bf16_arithmetic() else 1 << 62
        if self._kernels is None or self._native_form is None:
            self._native_rows = 0

    def begin(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Batch:
        """Group the tokens of a layer by expert. hidden [T, H], ids [T, K], weights [T, K]; an id outside
        0..count-1 is padding and adds nothing."""
        flat = ids.detach().reshape(-1).numpy()
        pairs = np.argsort(flat, kind="stable")
        ordered = flat[pairs]
        first, last = np.searchsorted(ordered, (0, self.count))
        pairs, ordered = pairs[first:last], ordered[first:last]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        return Batch(
            hidden=hidden.detach().contiguous(),
            weights=weights.detach().reshape(-1).float(),
            experts=ordered[starts].astype(np.int32),
            tokens=np.diff(starts, append=len(pairs)).astype(np.int32),
            pairs=pairs,
            starts=[*starts.tolist(), len(pairs)],
            top_k=ids.shape[-1],
            sum=torch.zeros(hidden.shape, dtype=torch.float32),
        )

    @torch.no_grad()
    def run(self, batch: Batch, experts: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        """Compute chosen experts, whose bytes lie in ``slots`` (uint8 [nbytes] each)."""
        group: list[tuple[int, int]] = []  # (position, address) of what one native call computes
        values = 0
        for expert, slot in zip(experts, slots, strict=True):
            position = batch.position(expert)
            rows = batch.starts[position + 1] - batch.starts[position]
            if rows > self._native_rows:
                self._add(batch, position, self._rows(batch, position, self.layout.views(slot)))
                continue
            if group and values + rows * self.form.hidden > NATIVE_VALUES:
                self._run_native(batch, group)
                group, values = [], 0
            group.append((position, slot.data_ptr()))
            values += rows * self.form.hidden
        if group:
            self._run_native(batch, group)

    def finish(self, batch: Batch) -> torch.Tensor:
        """[T, H] in the dtype of hidden: the sum over every token's experts."""
        if batch.turn != len(batch.experts):
            raise ValueError(f"expert {batch.experts[batch.turn]} was chosen but not run")
        return batch.sum.to(batch.hidden.dtype)

    def _add(self, batch: Batch, position: int, out: torch.Tensor) -> None:
        """Keep an expert's outputs [n, H] and add all whose turn it is."""
        batch.waiting[position] = out
        while batch.turn in batch.waiting:
            rows = batch.pairs_of(batch.turn) // batch.top_k
            batch.sum.index_add_(0, rows, batch.waiting.pop(batch.turn))
            batch.turn += 1

    def _run_native(self, batch: Batch, group: list[tuple[int, int]]) -> None:
        kernels, form = self._kernels, self._native_form
        if kernels is None or form is None:
            raise AssertionError("only experts that the kernels know come here")
        if batch.prepared is None:
            batch.prepared = kernels.prepare(form, batch.hidden)
        positions = [position for position, _ in group]
        spans = [(batch.starts[position], batch.starts[position + 1]) for position in positions]
        starts = [0]
        for begin, end in spans:
            starts.append(starts[-1] + end - begin)
        in_turn = positions == list(range(positions[0], positions[0] + len(positions)))
        if in_turn:
            pairs = batch.pairs[spans[0][0] : spans[-1][1]]
        else:
            pairs = np.concatenate([batch.pairs[begin:end] for begin, end in spans])
        scratch = self._at_least(len(pairs) * padded(self.form.intermediate))
        out = torch.empty(len(pairs), self.form.hidden)
        slots = [address for _, address in group]
        kernels.run(form, batch.prepared, slots, starts, pairs, batch.weights, batch.top_k, scratch, out)
        if in_turn and batch.turn == positions[0] and not batch.waiting:
            kernels.add(out, pairs, batch.top_k, batch.sum)
            batch.turn += len(positions)
        else:
            for i, position in enumerate(positions):
                self._add(batch, position, out[starts[i] : starts[i + 1]])

    def _at_least(self, values: int) -> torch.Tensor:
        if self._scratch.numel() < values:
            self._scratch = torch.empty(values)
        return self._scratch

    def _rows(self, batch: Batch, position: int, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """[n, H] float32: a chosen expert's outputs, router weights applied."""
        pairs = batch.pairs_of(position)
        x, weight = batch.hidden[pairs // batch.top_k], batch.weights[pairs, None]
        if self.form.scales_input:
            return self._expert(parts, x.float() * weight)
        return self._expert(parts, x).mul_(weight)

    def _expert(self, parts: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        form, as_stored = self.form, self._multiplies_as_stored(parts["down"].dtype, x)
        roles = [role for role in ("gate_up", "gate", "up") if role in parts]
        inner = [self._linear(parts, role, x, form.transposed, as_stored) for role in roles]
        act = form.apply_gate(inner[0] if len(inner) == 1 else torch.cat(inner, dim=-1))
        out = self._linear(parts, "down", act, form.down_is_transposed, as_stored)
        return out if form.post_norm is None else form.post_norm(out).float()

    @staticmethod
    def _multiplies_as_stored(dtype: torch.dtype, x: torch.Tensor) -> bool:
        if dtype == torch.bfloat16 and x.dtype == torch.bfloat16:
            return x.shape[0] == 1 or has_bf16_arithmetic()
        return dtype == torch.float32

    def _linear(
        self, parts: dict[str, torch.Tensor], role: str, x: torch.Tensor, transposed: bool, as_stored: bool
    ) -> torch.Tensor:  # [n, in] -> [n, out] float32
        weight, bias = parts[role], parts.get(f"{role}_bias")
        if transposed:
            weight = weight.T
        if as_stored:
            out = torch.mm(weight, x.to(weight.dtype).T).T.float()
        else:
            out = self._convert_and_multiply(weight, x.float(), transposed)
        return out if bias is None else out.add_(bias.float())

    def _convert_and_multiply(self, weight: torch.Tensor, x: torch.Tensor, transposed: bool) -> torch.Tensor:
        """x [n, in] times weight [out, in] in float32, a block of the weight converted at a time: without
        bf16 arithmetic a float32 product is several times faster than one in bf16."""
        height, width = weight.shape
        rows = max(1, min(height, BLOCK_VALUES // width))
        scratch = self._at_least(rows * width)
        out = torch.empty(height, x.shape[0])
        for top in range(0, height, rows):
            part = weight[top : top + rows]
            flat = scratch[: part.numel()]
            block = flat.view(width, -1).T if transposed else flat.view(-1, width)
            torch.mm(block.copy_(part), x.T, out=out[top : top + rows])
        return out.T


@cache
def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bf16 in hardware; torch's products of bf16 are slow where it does not."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
