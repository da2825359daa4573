"""A layer's router on its own: which experts would it choose for this input?

Gate look-ahead asks the next layer's router about this layer's input. The families' routers differ in what
they add and return (softmax, sigmoid, correction bias, groups), so the router itself is run and its answer
read, and nothing of it is written twice.

Shape legend: T tokens, E experts, K experts per token, H hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from daop.runtime.experts import Experts


class LastInput:
    """What the router that ran last saw: one tensor for the whole model, not one per layer."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self.hidden: torch.Tensor | None = None  # [T, H]
        self.batched = False  # whether the family's routers are handed [B, S, H]


class Router:
    """One layer's router; notes in ``last`` what it sees."""

    def __init__(self, layer: int, module: nn.Module, block: nn.Module, count: int, last: LastInput) -> None:
        self.module = module
        self._layer = layer
        self._last = last
        self._block = block
        self._count = count
        # A correction bias that the block keeps and hands to its router (lfm2_moe, minimax_m2, afmoe).
        self._extras = [
            name for name in list(inspect.signature(module.forward).parameters)[1:] if hasattr(block, name)
        ]
        module.register_forward_pre_hook(self._remember)

    @classmethod
    def watch(cls, layer: int, experts: Experts, last: LastInput) -> Router | None:
        """The router of a layer's experts, or None if it is not found."""
        module = experts.router
        return None if module is None else cls(layer, module, experts.block, experts.count, last)

    def _remember(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs:
            self._last.layer = self._layer
            self._last.batched = inputs[0].dim() == 3
            self._last.hidden = inputs[0].detach().reshape(-1, inputs[0].shape[-1])

    @torch.no_grad()
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 [T, E]; the chosen experts score 1 to 2, the others 0 to 1, by logit."""
        _, ids, scores = self._ask(x)
        if ids is not None:
            scores.scatter_add_(-1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores

    @torch.no_grad()
    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """[T, H] -> ids [T, K], router weights [T, K], softmax of the logits [T, E]; None where the family's
        router does not tell ids and weights."""
        tensors, ids, scores = self._ask(x)
        if ids is None:
            return None
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.shape == ids.shape:
                return ids, tensor, scores
        for tensor in tensors[1:]:  # weights of all experts, zero where not chosen
            if tensor.is_floating_point() and tensor.shape == scores.shape:
                return ids, tensor.gather(-1, ids), scores
        return None

    def _ask(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
        """What the router answers [T, ...], the ids among it, and the softmax of its logits [T, E]."""
        extras = (getattr(self._block, name) for name in self._extras)
        out = self.module.forward(x[None] if self._last.batched else x, *extras)
        # [T, ...] each; some routers give back the batch axis that they were given.
        tensors = [tensor.reshape(len(x), -1) for tensor in ([out] if isinstance(out, torch.Tensor) else out)]
        ids = next((tensor for tensor in tensors if not tensor.is_floating_point()), None)
        full = [
            tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape[-1] == self._count
        ]
        # (logits, weights, ids) in most families; (scores, logits) in llama4; logits alone in dbrx.
        logits = full[0] if ids is not None else full[-1]
        return tensors, ids, logits.float().softmax(dim=-1)
