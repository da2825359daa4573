"""What the next layer's experts will see, told from what this layer's see: a learnt correction, per layer.

    guess(x_l) = x_l * scale_l + (x_l @ down_l) @ up_l + shift_l

``scale`` is the ratio of the two layers' norm weights, ``shift`` holds the mean residual (as DALI's), and the
low-rank term is fitted by reduced-rank ridge regression of what is left. Its cost beside an expert's is
nothing: 2 * H * R products. Fitted by ``daop train`` where a trace has features (``daop trace capture
--features``), and kept in the profile as ``input.LAYER.NAME``.

Shape legend: T tokens, H hidden size, R rank, n samples, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError, FloatArray

from .profile import Profile

PARTS = ("scale", "down", "up", "shift")
RANK = 64
RIDGE = 1e-3
_GAIN_FLOOR = 1e-3  # a norm weight of 0 leaves nothing to rescale


class InputCorrection:
    """``arrays``: as ``fit`` gives them. A layer without any is not corrected."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], name: str = "the profile") -> None:
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        for layer in {int(key.split(".")[1]) for key in arrays if key.startswith("input.")}:
            parts = [arrays.get(f"input.{layer}.{part}") for part in PARTS]
            scale, down, up, shift = parts
            if scale is None or down is None or up is None or shift is None:
                raise DaopError(
                    f"{name}: the input correction of layer {layer} is incomplete; train it again"
                )
            shapes = (scale.shape, down.shape[:1], up.shape[1:], shift.shape)
            if len(set(shapes)) != 1 or down.ndim != 2 or down.shape[1:] != up.shape[:1]:
                raise DaopError(
                    f"{name}: the input correction of layer {layer} has parts of shapes {shapes}, which do "
                    "not belong together; train it again"
                )
            self._layers[layer] = tuple(torch.from_numpy(np.asarray(p, dtype=np.float32)) for p in parts)

    @classmethod
    def of(cls, profile: Profile | None, hidden: int) -> InputCorrection | None:
        """The profile's correction; None if it has none. Raises DaopError if it is of another model."""
        arrays = (profile.arrays if profile is not None else None) or {}
        found = {key: value for key, value in arrays.items() if key.startswith("input.")}
        if not found:
            return None
        width = next(value.shape[0] for key, value in found.items() if key.endswith(".scale"))
        if width != hidden:
            raise DaopError(
                f"the profile corrects inputs of {width} values, this model's have {hidden}: it is of "
                "another model; train one for this"
            )
        return cls(found)

    def __call__(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] as layer ``layer`` sees it -> what ``layer + 1`` will see, in x's dtype."""
        parts = self._layers.get(layer)
        if parts is None:
            return x
        if parts[0].device != x.device:
            parts = self._layers[layer] = tuple(part.to(x.device) for part in parts)
        scale, down, up, shift = parts
        wide = x.float()
        return torch.addmm(wide * scale + shift, wide @ down, up).to(x.dtype)


def fit(
    hidden: NDArray[Any], norms: Sequence[FloatArray | None], *, rank: int = RANK
) -> dict[str, FloatArray]:
    """Arrays for ``InputCorrection`` from the routers' inputs [n, L, H] of sampled tokens and the norms
    before them."""
    out: dict[str, FloatArray] = {}
    for layer in range(hidden.shape[1] - 1):
        x, y = hidden[:, layer].astype(np.float64), hidden[:, layer + 1].astype(np.float64)
        own, other = norms[layer], norms[layer + 1]
        scale = np.ones(x.shape[1])
        if own is not None and other is not None:
            scale = np.asarray(
                other / np.where(np.abs(own) < _GAIN_FLOOR, _GAIN_FLOOR, own), dtype=np.float64
            )
        left = y - x * scale
        middle, mean = x.mean(axis=0), left.mean(axis=0)
        down, up = _reduced_rank(x - middle, left - mean, min(rank, x.shape[1]))
        arrays = {"scale": scale, "down": down, "up": up, "shift": mean - middle @ down @ up}
        out |= {f"input.{layer}.{part}": value.astype(np.float32) for part, value in arrays.items()}
    return out


def _reduced_rank(x: NDArray[Any], y: NDArray[Any], rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """[H, R], [R, H]: the ridge regression of y on x, its fitted values projected on their main axes."""
    square = x.T @ x
    square += np.eye(len(square)) * (RIDGE * np.trace(square) / len(square) + 1e-9)
    full = np.linalg.solve(square, x.T @ y)
    fitted = x @ full
    _, axes = np.linalg.eigh(fitted.T @ fitted)
    main = axes[:, ::-1][:, :rank]  # [H, R]
    return full @ main, main.T
