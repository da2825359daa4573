"""The name of the arithmetic between an expert's two products, found by trying it.

transformers gives a function. Native kernels need to know which one it is. Comparing values over the whole
useful range says so for certain, where comparing classes or configuration strings would guess.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
CUSTOM = "custom"  # none of the above: call apply_gate


def gpt_oss(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt_oss's gate: both sides clamped, a sigmoid scaled by alpha, and 1 added to up."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def name_activation(
    apply_gate: Activation, *, gated: bool, interleaved: bool, arguments: tuple[float, ...] = ()
) -> tuple[str, tuple[float, ...]]:
    """``(name, arguments)`` of a function: a key of ``ACTIVATIONS``, "gpt_oss" (alpha, limit), or ``CUSTOM``.

    ``arguments`` are the constants that the module carries; a name that uses none of them returns none.
    """
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.rand(2, 4, 256, generator=generator) * 40 - 20).unbind(0)
    if not gated:
        fused = gate
    elif interleaved:
        fused = torch.stack((gate, up), dim=-1).flatten(-2)
    else:
        fused = torch.cat((gate, up), dim=-1)
    wanted = apply_gate(fused.clone())
    for name, act in ACTIVATIONS.items():
        if _same(wanted, act(gate) * up if gated else act(gate)):
            return name, ()
    if gated and len(arguments) == 2 and _same(wanted, gpt_oss(gate, up, *arguments)):
        return "gpt_oss", arguments
    return CUSTOM, ()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
