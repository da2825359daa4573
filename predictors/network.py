"""The small network behind ``mlp`` and ``mlp_reuse``: it walks the layers together with the token.

A state vector starts from the sequence's past (the previous token's whole routing, decayed frequencies). At
every layer the chosen experts' embeddings are added to it, a two-layer network of that layer refines it,
and linear heads read forecasts from it. Routing history only. torch fits it (``network_fit.py``); at run
time it is a handful of numpy products per layer, carried on from layer to layer.

Shapes: T tokens, L layers, K choices, D width, E experts of the widest layer, F forecasts per expert,
total = all experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daop.core import FloatArray, Geometry

from .history import HALF_LIVES, Context, Past

EPSILON = np.float32(1e-6)
FLOOR = np.float32(1e-3)

Weights = dict[str, FloatArray]


@dataclass(frozen=True)
class Sight:
    """Of the past the network sees the frequencies of these half-lives (indices), W of them. Of the very
    expert that it forecasts also, where ``logs``, their logarithms, and whether it was chosen last."""

    windows: tuple[int, ...] = (HALF_LIVES.index(8), HALF_LIVES.index(128))
    logs: bool = False

    @property
    def direct(self) -> int:
        """How many numbers of the expert itself."""
        return len(self.windows) * (2 if self.logs else 1) + 1


PLAIN = Sight()


def shapes(geometry: Geometry, width: int, forecasts: int, sight: Sight) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight; the last row of the embeddings stands for an absent choice."""
    layers, total, widest = geometry.layers, geometry.total, max(geometry.experts)
    return {
        "chosen": (total + 1, width),  # embedding of a choice of this token
        "rank": (geometry.top_k,),  # how much the first, second ... choice counts
        "previous": (total + 1, width),  # embedding of a choice of the previous token
        "frequency": (len(sight.windows) * total, width),
        "in": (layers, width, width),
        "bias": (layers, width),
        "out": (layers, width, width),
        "head": (layers, width, forecasts * widest),
        "head_bias": (layers, forecasts, widest),
        "direct": (layers, forecasts, sight.direct),
    }


def usual_share(geometry: Geometry) -> FloatArray:
    """[total] share of tokens that would choose each expert if all were alike."""
    return (geometry.top_k / np.repeat(geometry.experts, geometry.experts)).astype(np.float32)


def normalise(x: Any) -> Any:
    """Root-mean-square norm over the last axis."""
    return x / np.sqrt(np.einsum("...d,...d->...", x, x)[..., None] / np.float32(x.shape[-1]) + EPSILON)


class Network:
    """The run-time form, on numpy. Immutable; what is carried along lies in the context's memo."""

    def __init__(self, weights: Weights, geometry: Geometry, key: str, sight: Sight = PLAIN) -> None:
        self.sight = sight
        self.weights = weights
        self.geometry = geometry
        self.base = usual_share(geometry)
        self._spans = [slice(a, b) for a, b in zip(geometry.offsets[:-1], geometry.offsets[1:], strict=True)]
        self._key = key  # of this network in memos that several networks share

    def start(self, past: Past) -> FloatArray:
        """[T, D] the state before layer 0."""
        w = self.weights
        frequency = past.frequency[:, self.sight.windows] - self.base  # [T, W, total]
        previous = w["previous"][past.previous.reshape(len(past.previous), -1)].sum(axis=1)
        return np.asarray(previous + frequency.reshape(len(frequency), -1) @ w["frequency"], dtype=np.float32)

    def read(self, context: Context) -> FloatArray:
        """[T, F * E] what the heads of ``context.layer`` say, carried on from where the memo left off."""
        w = self.weights
        done, state, said = context.memo.get(self._key, (-1, None, None))
        if said is not None and done == context.layer:
            return np.asarray(said, dtype=np.float32)
        if state is None or done > context.layer:
            done, state = -1, self.start(context.past)
        for layer in range(done + 1, context.layer + 1):
            rows = w["chosen"][context.chosen[:, layer]]  # [T, K, D]
            state = state + w["rank"] @ rows
            inner = normalise(state) @ w["in"][layer]
            inner += w["bias"][layer]
            np.maximum(inner, 0.0, out=inner)
            state += inner @ w["out"][layer]
        said = np.maximum(normalise(state), 0.0) @ w["head"][context.layer]
        context.memo[self._key] = (context.layer, state, said)
        return np.asarray(said, dtype=np.float32)

    def logits_of_own(self, context: Context, just: Any) -> FloatArray:
        """[T, F, E] every forecast about the experts of ``context.layer``; ``just`` [T, E] were chosen."""
        w, layer = self.weights, context.layer
        span, count = self._spans[layer], self.geometry.experts[layer]
        widest = max(self.geometry.experts)
        seen = np.concatenate([self._seen(context.past, span), just[:, None]], axis=1)
        out = w["direct"][layer] @ seen  # [T, F, E]
        out += w["head_bias"][layer, :, :count]
        out += self.read(context).reshape(len(just), -1, widest)[:, :, :count]
        return np.asarray(out, dtype=np.float32)

    def logits(self, context: Context, forecast: int, target: int, last: Any) -> FloatArray:
        """[T, E of ``target``] log-odds of one of the F forecasts about layer ``target``.

        ``last`` [T, E] says which of its experts were chosen last (by the previous token, or just now).
        """
        w, geometry = self.weights, self.geometry
        span = self._spans[target]
        count, first = geometry.experts[target], forecast * max(geometry.experts)
        out = self.read(context)[:, first : first + count] + w["head_bias"][context.layer, forecast, :count]
        direct = w["direct"][context.layer, forecast]
        out = out + np.einsum("f,tfe->te", direct[:-1], self._seen(context.past, span))
        return np.asarray(out + direct[-1] * last, dtype=np.float32)

    def _seen(self, past: Past, span: slice) -> FloatArray:
        """[T, W or 2W, E] what the heads see of the past of these experts."""
        frequency = past.frequency[:, self.sight.windows, span]
        seen = frequency - self.base[span]
        if self.sight.logs:
            seen = np.concatenate([seen, np.log(np.maximum(frequency, FLOOR))], axis=1)
        return np.asarray(seen, dtype=np.float32)


def sigmoid(logits: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0))), dtype=np.float32)
