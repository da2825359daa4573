"""A linear forecast of the next experts from the routing so far: cheap enough to be asked at every layer.

For a target layer m that is reached in ``lead`` more layers (1: the next one; L: the same layer of the next
token), expert e is chosen with probability sigmoid(z), where z sums

    bias[m, e]                                                how frequent it is
    table[m, lag, c, e] for the c chosen in the last LAGS layers that are known (what co-occurs)
    table[m, LAGS, c, e] for the c that layer m chose last    (what follows what)
    gain[m, f] * feature[f, m, e]                             (what was used lately, over four windows)

All tables of one lead are one float32 array; a forecast is one small product. E is the largest number of
experts of any layer; smaller layers are padded. Fitted with Adam on the log loss; only numpy is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, FloatArray, Geometry

LAGS = 3
DECAYS = (0.5, 0.8, 0.93, 0.98)
FEATURES = 2 * len(DECAYS)
FLOOR = 1e-3
LEADS = (1, 2, 3)


def features_of(averages: FloatArray) -> FloatArray:
    """[..., D, E] moving averages of use -> [..., 2D, E]: themselves and their logarithms."""
    return np.concatenate([averages, np.log(np.maximum(averages, FLOOR))], axis=-2)


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextModel:
    """``leads`` [R]; ``table`` [R, L, (LAGS + 1) * E, E]; ``bias`` [R, L, E]; ``gain`` [R, L, FEATURES]."""

    leads: tuple[int, ...]
    table: FloatArray
    bias: FloatArray
    gain: FloatArray

    @classmethod
    def empty(cls, geometry: Geometry, leads: tuple[int, ...], frequency: FloatArray | None) -> ContextModel:
        """Knows only how frequent each expert is (None: all alike): a start for learning."""
        clipped = np.clip(padded(geometry, frequency), FLOOR, 1 - FLOOR)
        layers, experts = clipped.shape
        bias = np.log(clipped / (1 - clipped)).astype(np.float32)
        shape = (len(leads), layers, (LAGS + 1) * experts, experts)
        return cls(
            leads=leads,
            table=np.zeros(shape, dtype=np.float32),
            bias=np.repeat(bias[None], len(leads), axis=0),
            gain=np.zeros((len(leads), layers, FEATURES), dtype=np.float32),
        )

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """For a profile's ``arrays``."""
        return {
            "context.leads": np.asarray(self.leads, dtype=np.int32),
            "context.table": self.table.astype(np.float16),
            "context.bias": self.bias,
            "context.gain": self.gain,
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]], geometry: Geometry) -> ContextModel | None:
        """Out of a profile's ``arrays``; None if there is none."""
        if "context.table" not in arrays:
            return None
        if not {f"context.{part}" for part in ("leads", "bias", "gain")} <= arrays.keys():
            raise DaopError("the profile's context model is incomplete; fit it again")
        layers, experts = geometry.layers, max(geometry.experts)
        leads = tuple(int(n) for n in arrays["context.leads"])
        table = arrays["context.table"].astype(np.float32)
        bias, gain = arrays["context.bias"], arrays["context.gain"]
        good = (
            table.shape == (len(leads), layers, (LAGS + 1) * experts, experts)
            and bias.shape == (len(leads), layers, experts)
            and gain.shape == (len(leads), layers, FEATURES)
        )
        if not good:
            raise DaopError("the profile's context model does not fit the model's geometry; fit it again")
        return cls(leads=leads, table=table, bias=bias.astype(np.float32), gain=gain.astype(np.float32))


def turns(leads: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The leads that a model of so many layers has, its whole turn last."""
    return (*(lead for lead in leads if lead < layers), layers)


def padded(geometry: Geometry, frequency: FloatArray | None) -> FloatArray:
    """[L, E] how often each expert is used per visit; without ``frequency`` [total] all alike."""
    out = np.zeros((geometry.layers, max(geometry.experts)), dtype=np.float32)
    for layer, experts in enumerate(geometry.experts):
        begin = geometry.offsets[layer]
        usual = geometry.top_k / experts if frequency is None else frequency[begin : begin + experts]
        out[layer, :experts] = usual
    return out


def fit(
    geometry: Geometry,
    ids: NDArray[Any],
    sequence: NDArray[Any],
    *,
    leads: tuple[int, ...] = LEADS,
    epochs: int = 4,
    rate: float = 0.01,
    seed: int = 0,
) -> ContextModel:
    """Learn from decode traffic: ``ids`` [N, L, K], ``sequence`` [N] in ascending runs."""
    layers, experts = geometry.layers, max(geometry.experts)
    leads = turns(leads, layers)
    tokens = len(ids)
    used = np.zeros((tokens, layers, experts), dtype=np.float32)
    np.put_along_axis(used, ids.astype(np.int64), 1.0, axis=2)
    frequency = np.concatenate([used[:, m, :n].mean(axis=0) for m, n in enumerate(geometry.experts)])
    start = ContextModel.empty(geometry, leads, frequency)
    averages = _averages(used)
    follows = np.flatnonzero(sequence[2:] == sequence[:-2]) + 2  # tokens with two before them
    if not len(follows):
        return start
    for index in range(len(leads)):
        _fit_lead(start, index, used, averages, follows, epochs, rate, np.random.default_rng(seed))
    return start


def _averages(used: FloatArray) -> NDArray[np.float16]:
    """[N, L, E] -> [N, L, D, E]: moving averages before each token."""
    decay = np.asarray(DECAYS, dtype=np.float32)[:, None]
    now = np.zeros((used.shape[1], len(DECAYS), used.shape[2]), dtype=np.float32)
    out = np.empty((len(used), *now.shape), dtype=np.float16)
    for token, chosen in enumerate(used):
        out[token] = now
        now = now * decay + (1 - decay) * chosen[:, None]
    return out


def _fit_lead(
    model: ContextModel,
    index: int,
    used: FloatArray,
    averages: NDArray[np.float16],
    follows: NDArray[Any],
    epochs: int,
    rate: float,
    rng: np.random.Generator,
) -> None:
    lead = model.leads[index]
    layers = used.shape[1]
    source = np.arange(layers) + 2 * layers - lead  # in [two tokens before, the one before, this one]
    parameters = [model.table[index], model.bias[index], model.gain[index]]
    first = [np.zeros_like(p) for p in parameters]
    second = [np.zeros_like(p) for p in parameters]
    batch, step = min(1024, max(32, len(follows) // 16)), 0
    total = epochs * max(1, len(follows) // batch)
    for _ in range(epochs):
        order = rng.permutation(follows)
        for at in range(0, max(1, len(order) - batch + 1), batch):
            rows = order[at : at + batch]
            three = np.concatenate([used[rows - 2], used[rows - 1], used[rows]], axis=1)  # [B, 3L, E]
            seen = [three[:, np.maximum(source - lag, 0)] for lag in range(LAGS)]
            inputs = np.concatenate([*seen, used[rows - 1]], axis=2).transpose(1, 0, 2)  # [L, B, X]
            extra = features_of(averages[rows].astype(np.float32)).transpose(1, 0, 2, 3)  # [L, B, F, E]
            z = inputs @ parameters[0] + parameters[1][:, None]
            z += np.einsum("lbfe,lf->lbe", extra, parameters[2], optimize=True)
            error = (1 / (1 + np.exp(-z)) - used[rows].transpose(1, 0, 2)) / len(rows)  # [L, B, E]
            slopes = [
                inputs.transpose(0, 2, 1) @ error + 1e-6 * parameters[0],
                error.sum(axis=1),
                np.einsum("lbfe,lbe->lf", extra, error, optimize=True),
            ]
            step += 1
            pace = rate * max(0.02, 1 - step / total)
            for p, m, v, slope in zip(parameters, first, second, slopes, strict=True):
                m += 0.1 * (slope - m)
                v += 0.001 * (slope * slope - v)
                p -= pace * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
