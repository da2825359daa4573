"""The tokens of one MoE layer grouped by expert, and the sum of what the experts return.

A token's outputs are added in float32 in ascending order of expert, whatever the order in which they come:
what is ahead of its turn waits. So the result does not depend on the order, bit for bit.

Shape legend: T tokens, K experts per token, H hidden size, n rows of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(eq=False, slots=True)
class Batch:
    """One MoE layer of one forward pass.

    ``experts`` are the distinct chosen experts, ascending; ``tokens`` says how many tokens chose each.
    A *pair* is an index into [T * K]: token * K + rank.
    """

    hidden: torch.Tensor  # [T, H], contiguous
    weights: torch.Tensor  # [T * K] float32
    experts: list[int]
    tokens: list[int]
    pairs: NDArray[np.int64]  # grouped by expert in the order of ``experts``
    starts: list[int]  # where each expert's pairs begin, and their end
    top_k: int
    sum: torch.Tensor  # [T, H] float32
    positions: dict[int, int]  # expert -> its index in ``experts``
    prepared: torch.Tensor | None = None  # hidden as the native kernels read it
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)  # position -> output [n, H]
    turn: int = 0  # position of the expert whose output is added next

    def position(self, expert: int) -> int:
        """Where an expert that is to be run stands among the chosen ones."""
        position = self.positions.get(expert)
        if position is None:
            raise ValueError(f"expert {expert} was not chosen by any token")
        if position < self.turn or position in self.waiting:
            raise ValueError(f"expert {expert} has already been run")
        return position

    def pairs_of(self, position: int) -> torch.Tensor:
        return torch.from_numpy(self.pairs[self.starts[position] : self.starts[position + 1]])

    def weight_sums(self) -> list[float]:
        """Sum of the router weights that each chosen expert got."""
        if not self.experts:
            return []
        chosen = self.weights.numpy()[self.pairs]
        sums = chosen if len(chosen) == len(self.experts) else np.add.reduceat(chosen, self.starts[:-1])
        out: list[float] = sums.tolist()
        return out

    def add(self, position: int, output: torch.Tensor) -> None:
        """Take an expert's outputs [n, H] float32, and add all whose turn it is."""
        self.waiting[position] = output
        self.catch_up()

    def catch_up(self) -> None:
        """Add the outputs whose turn it is."""
        while self.turn in self.waiting:
            rows = self.pairs_of(self.turn) // self.top_k
            self.sum.index_add_(0, rows, self.waiting.pop(self.turn))
            self.turn += 1


def group(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, count: int) -> Batch:
    """hidden [T, H], ids [T, K], weights [T, K]; an id outside 0..count-1 is padding and gets no pair."""
    if ids.shape[0] == 1:
        chosen = ids.tolist()[0]
        order = sorted((k for k, expert in enumerate(chosen) if 0 <= expert < count), key=chosen.__getitem__)
        pairs, ordered = np.array(order, dtype=np.int64), [chosen[k] for k in order]
        experts = list(dict.fromkeys(ordered))
        starts = [ordered.index(expert) for expert in experts]
    else:
        flat = ids.detach().reshape(-1).numpy()
        pairs = np.argsort(flat, kind="stable")
        first, last = np.searchsorted(flat[pairs], (0, count))
        pairs = pairs[first:last]
        distinct, begins = np.unique(flat[pairs], return_index=True)
        experts, starts = distinct.tolist(), begins.tolist()
    starts.append(len(pairs))
    return Batch(
        hidden=hidden.detach().contiguous(),
        weights=weights.detach().reshape(-1).float(),
        experts=experts,
        tokens=[end - begin for begin, end in pairwise(starts)],
        pairs=pairs,
        starts=starts,
        top_k=ids.shape[1],
        sum=torch.zeros(hidden.shape, dtype=torch.float32),
        positions={expert: position for position, expert in enumerate(experts)},
    )
