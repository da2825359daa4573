"""What the heads of ``visits`` are fitted to: the next visits of the layers ahead, and the uses after them.

Torch is loaded when something is fitted. Shapes as in ``network_fit.py``; B tokens of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry

from .data import Routing, one_hot
from .network_fit import logits_of

if TYPE_CHECKING:
    import torch

AHEAD = 3  # layers whose next visit is forecast, beside the own one
FORECASTS = AHEAD + 2
TURN, LATER = AHEAD, AHEAD + 1  # the heads about the own layer: its next visit, and the visits after that
FADE = 0.8  # what a visit counts, of the one before it
SHARES = (1.0, 0.6, 0.5, 1.0, 1.0)  # of the heads in the loss


class VisitTask:
    """Head f < AHEAD: is the expert of the layer f + 1 ahead used at its next visit (by this token, or, past
    the last layer, by the next)? Then, of the own layer: at its next visit; how often after that."""

    forecasts = FORECASTS
    fixed = frozenset({"rank"})  # a running layer knows which experts it uses, not their order

    def labels(self, data: Routing) -> dict[str, torch.Tensor]:
        import torch

        absent = data.geometry.total
        following = np.full_like(data.flat, absent)
        following[:-1] = np.where(data.flat[1:] < 0, absent, data.flat[1:])
        following[data.offsets[1:] - 1] = absent
        later, known = later_uses(data)
        return {
            "following": torch.from_numpy(following),
            "later": torch.from_numpy(later),
            "known": torch.from_numpy(known),
        }

    def bias(self, popular: Any, geometry: Geometry, layer: int, forecast: int) -> Any:
        target = (layer + forecast + 1) % geometry.layers if forecast < AHEAD else layer
        return popular[geometry.offsets[target] : geometry.offsets[target + 1]]

    def loss(self, layer: int, said: Any, x: dict[str, torch.Tensor], w: Any, geometry: Geometry) -> Any:
        import torch
        import torch.nn.functional as F

        total, count = geometry.total, len(said)
        if layer == 0:
            following = x["following"].long().reshape(count, -1)
            x["next"] = torch.zeros(count, total + 1).scatter(1, following, 1.0)[:, :total]
        follows = (x["following"][:, 0, 0] < total).float()
        out = []
        for f in range(self.forecasts):
            ahead = layer + f + 1 if f < AHEAD else geometry.layers + layer
            if f < AHEAD and f + 1 >= geometry.layers:
                continue  # that is the layer itself, or beyond it
            target = ahead % geometry.layers
            span = slice(geometry.offsets[target], geometry.offsets[target + 1])
            wraps = ahead >= geometry.layers
            logits = logits_of(layer, f, target, said, x["target" if wraps else "before"], x, w, geometry)
            if f == LATER:
                truth, known = x["later"][:, span].float(), x["known"]
            elif wraps:
                truth, known = x["next"][:, span], follows
            else:
                truth, known = x["target"][:, span], (x["flat"][:, target, 0] < total).float()
            each = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
            out.append(SHARES[f] / geometry.top_k * (each * known[:, None]).sum() / count)
        return out


def later_uses(data: Routing) -> tuple[NDArray[np.float16], FloatArray]:
    """[N, total] how often each expert is used from the second next token on, the nearer the more, per visit;
    and [N] how much of that the sequence's rest tells (0: nothing, 1: all)."""
    total = data.geometry.total
    later = np.zeros((len(data), total), dtype=np.float16)
    known = np.zeros(len(data), dtype=np.float32)
    for first, end in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        used = one_hot(data.flat[first:end], total)
        summed, mass = np.zeros(total, dtype=np.float32), 0.0
        for row in range(int(end - first) - 3, -1, -1):
            summed *= FADE
            summed += used[row + 2]
            mass = 1.0 + FADE * mass
            later[first + row] = summed / mass
            known[first + row] = mass * (1.0 - FADE)
    return later, known
