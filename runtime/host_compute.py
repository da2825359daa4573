"""Routed experts computed on the CPU, from the bytes that the files store.

``HostExperts`` serves the layers of one layout and form. A layer of one forward pass is three calls:

    batch = experts.begin(hidden, ids, weights)     # who computes what; batch.experts, batch.tokens
    experts.run(batch, [3, 17], [slot, slot])       # as often as wanted, in any order and grouping
    out = experts.finish(batch)                     # every chosen expert has run exactly once

The result never depends on the order or grouping in which experts were run, bit for bit, so it does not
depend on which of them were resident: each expert's output is computed alone, a token's outputs are added in
float32 in ascending order of expert (``batch.py``), then rounded once. Outputs that arrive ahead of their
turn are kept, [n, H] in float32 each: T * K * H * 4 bytes at most, and almost nothing if experts are run in
ascending order.

Experts of few rows go to the native kernels (``native.py``), many at a time; the rest, and all where there
are no kernels or they do not know the form, to torch. Which path an expert takes depends on its number of
rows alone, never on its company.

Numbers: router weights, products, inner values and sums are in float32, but for two paths of torch's (see
``torch_compute.py``).

Shape legend: T tokens, K experts per token, H hidden size, I intermediate size, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from .batch import Batch, group
from .layout import ExpertForm, ExpertLayout
from .native import Kernels, describe_form, for_hidden, load_kernels, padded
from .torch_compute import TorchExperts, has_bf16_arithmetic

__all__ = ["Batch", "HostExperts"]

FEW_ROWS = 16  # up to here reading the weights costs more than multiplying
NATIVE_VALUES = 1 << 23  # inner values or outputs of one native call, if of several experts: 32 MiB of each


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
        self._torch = TorchExperts(form, layout.codec)
        self._kernels = load_kernels() if kernels == "auto" else kernels
        self._native_form = describe_form(layout, form)
        self._native_short = for_hidden(self._native_form, torch.bfloat16)
        columns = form.transposed or form.down_is_transposed
        self._native_rows = FEW_ROWS if columns or has_bf16_arithmetic() else 1 << 62
        if self._kernels is None or self._native_form is None:
            self._native_rows = 0
        self._width = max(form.hidden, padded(form.intermediate))
        self._scratch = torch.empty(0)

    def begin(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Batch:
        """Group the tokens of a layer by expert. hidden [T, H], ids [T, K], weights [T, K]; an id outside
        0..count-1 is padding and adds nothing."""
        return group(hidden, ids, weights, self.count)

    def run(self, batch: Batch, experts: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        """Compute chosen experts, whose bytes lie in ``slots`` (uint8 [nbytes] each)."""
        starts, few = batch.starts, self._native_rows
        positions: list[int] = []  # of what one native call computes,
        addresses: list[int] = []  # and where those experts lie
        total = 0
        for expert, slot in zip(experts, slots, strict=True):
            position = batch.position(expert)
            rows = starts[position + 1] - starts[position]
            if rows > few:
                batch.add(position, self._run_torch(batch, position, slot))
                continue
            if total and (total + rows) * self._width > NATIVE_VALUES:
                self._run_native(batch, positions, addresses, total)
                positions, addresses, total = [], [], 0
            positions.append(position)
            addresses.append(slot.data_ptr())
            total += rows
        if total:
            self._run_native(batch, positions, addresses, total)

    def finish(self, batch: Batch) -> torch.Tensor:
        """[T, H] in the dtype of hidden: the sum over every token's experts."""
        return self.total(batch).to(batch.hidden.dtype)

    def total(self, batch: Batch) -> torch.Tensor:
        """The same in float32, not rounded: for who adds something to it."""
        if batch.turn != len(batch.experts):
            raise ValueError(f"expert {batch.experts[batch.turn]} was chosen but not run")
        return batch.sum

    def _run_torch(self, batch: Batch, position: int, slot: torch.Tensor) -> torch.Tensor:
        pairs = batch.pairs_of(position)
        return self._torch(self.layout.views(slot), batch.hidden[pairs // batch.top_k], batch.weights[pairs])

    def _run_native(self, batch: Batch, positions: list[int], addresses: list[int], rows: int) -> None:
        single = batch.hidden.dtype == torch.float32
        kernels, form = self._kernels, self._native_form if single else self._native_short
        if kernels is None or form is None:
            raise AssertionError("only experts that the kernels know come here")
        if batch.prepared is None:
            batch.prepared = kernels.prepare(form, batch.hidden)
        starts = [0]
        for position in positions:
            starts.append(starts[-1] + batch.starts[position + 1] - batch.starts[position])
        first, last = positions[0], positions[-1] + 1
        in_order = positions == list(range(first, last))
        if in_order:
            pairs = batch.pairs[batch.starts[first] : batch.starts[last]]
        else:
            each = [batch.pairs[batch.starts[i] : batch.starts[i + 1]] for i in positions]
            pairs = np.concatenate(each)
        if self._scratch.numel() < rows * self._width:
            self._scratch = torch.empty(rows * self._width)
        out = torch.empty(rows, self.form.hidden)
        kernels.run(
            form,
            batch.prepared,
            addresses,
            starts,
            pairs,
            batch.weights,
            batch.top_k,
            self._scratch,
            out,
            batch.hidden.dtype,
        )
        if in_order and first == batch.turn:
            kernels.add(out, pairs, batch.top_k, batch.sum)  # all at once: it is their turn, in this order
            batch.turn = last
            batch.catch_up()
        else:
            for i, position in enumerate(positions):
                batch.add(position, out[starts[i] : starts[i + 1]])
