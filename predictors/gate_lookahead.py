"""Gate look-ahead: ask the routers of coming layers about this layer's router input.

Four variants, each adding to the one before:
    gate_lookahead            plain: gate_t(x_l), as DAOP does (arXiv 2501.10375) gate_lookahead_norm
    x_l rescaled from layer l's norm weight to layer t's gate_lookahead_residual   plus the mean difference
    between that and what layer t saw (as DALI's residual) gate_lookahead_corrected  plus a low-rank
    correction of the logits from x_l, x_{l-1}, the experts that were
                              chosen (by router weight) and those of the previous token, fitted to the true
                              router's distribution (KL)
All need hidden states; chances come from a logistic of the distance to the k-th best score, fitted per layer.

Shapes: T tokens, E experts of the target layer t, H hidden size, R rank, K choices.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from daop.core import FloatArray, Geometry, IntArray

from .base import PREDICTORS, Needs, NextLayer, State
from .data import Gates, Routing
from .history import Context, previous_choices
from .network import sigmoid

log = logging.getLogger(__name__)

_GAIN_FLOOR = 1e-3  # a norm weight of 0 leaves nothing to rescale


def router_scores(gates: Gates, layer: int, logits: Any) -> Any:
    """What the router ranks experts by, from its logits; on a scale where differences are comparable."""
    correction = gates.corrections[layer]
    return logits if correction is None else sigmoid(logits) + correction


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What a forecast may look at: router inputs by layer [T, H], choices of this and the previous token, and
    router weights [T, L, K]."""

    hidden: dict[int, FloatArray]
    chosen: IntArray
    previous: IntArray
    weights: Any


class GateLookahead(NextLayer):
    """Base of the variants, which set the three flags."""

    needs = Needs(hidden=True)
    uses_norm = False
    uses_residual = False
    uses_correction = False

    def __init__(
        self,
        *,
        horizons: int = 4,
        rank: int = 32,
        steps: int = 600,
        learning_rate: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.horizons = horizons
        self.rank = rank
        self.steps = steps
        self.learning_rate = learning_rate
        self.seed = seed

    # -- fitting ---------------------------------------------------------------------------------

    def fit(self, data: Routing) -> Self:
        self.check_needs(data)
        assert data.hidden is not None
        self.geometry_ = data.geometry
        self.gates_ = data.hidden.gates
        self.extra_: dict[str, FloatArray] = {}
        self.chance_: dict[str, FloatArray] = {}
        rows, values = data.hidden.rows, data.hidden.values
        seen = Seen(
            hidden={layer: values[:, layer].astype(np.float32) for layer in range(data.geometry.layers)},
            chosen=data.flat[rows],
            previous=previous_choices(data, rows),
            weights=None if data.weights is None else data.weights[rows],
        )
        for layer in range(data.geometry.layers):
            for h in range(1, min(self.horizons, data.geometry.layers - 1 - layer) + 1):
                self._fit_pair(layer, layer + h, seen)
        return self

    def _fit_pair(self, layer: int, target: int, seen: Seen) -> None:
        key, x, true = f"{layer}.{target}", seen.hidden[layer], seen.hidden[target]
        if self.uses_residual:
            self.extra_[f"residual.{key}"] = (true - self._input(layer, target, x)).mean(axis=0)
        if self.uses_correction:
            start = self._gate(target, self._input(layer, target, x))
            self._fit_correction(key, self._shown(layer, target, seen), start, self._gate(target, true))
        scores = self._scores(layer, target, seen)
        local = seen.chosen[:, target] - self.geometry_.offsets[target]
        known = (local >= 0).all(axis=1)
        chosen = np.zeros(scores[known].shape, dtype=np.bool_)
        np.put_along_axis(chosen, local[known], True, axis=1)
        self.chance_[key] = _fit_logistic(self._margin(scores[known]), chosen)

    def _fit_correction(self, key: str, shown: FloatArray, start: FloatArray, wanted: FloatArray) -> None:
        """Fit logits = start + shown A B + c to the router's own softmax by cross-entropy (KL up to a
        constant)."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        n, width = shown.shape
        experts, rank = wanted.shape[1], min(self.rank, wanted.shape[1])
        steps = min(self.steps, 50 + n // 4)  # few tokens are learned by heart soon enough
        scale = np.maximum(shown.std(axis=0), 1e-3)
        inputs, first = torch.from_numpy(shown / scale), torch.from_numpy(start)
        soft = torch.from_numpy(wanted).softmax(dim=1)
        a = (torch.randn(width, rank, generator=generator) * 0.3 / width**0.5).requires_grad_()
        b = torch.zeros(rank, experts, requires_grad=True)
        c = torch.zeros(experts, requires_grad=True)
        optimiser = torch.optim.AdamW([a, b, c], lr=self.learning_rate, weight_decay=0.01)
        cycle = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            rows = torch.randint(n, (min(n, 512),), generator=generator)
            logits = first[rows] + inputs[rows] @ a @ b + c
            loss = -(soft[rows] * logits.log_softmax(dim=1)).sum(dim=1).mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            cycle.step()
        self.extra_[f"down.{key}"] = (a.detach().numpy() / scale[:, None]).astype(np.float32)
        self.extra_[f"up.{key}"] = b.detach().numpy().copy()
        self.extra_[f"shift.{key}"] = c.detach().numpy().copy()

    # -- forecasting -----------------------------------------------------------------------------

    def _input(self, layer: int, target: int, x: FloatArray) -> FloatArray:
        """[T, H] layer ``layer``'s router input as far as this variant turns it into layer ``target``'s."""
        if self.uses_norm:
            own, other = self.gates_.norms[layer], self.gates_.norms[target]
            if own is not None and other is not None:
                scale = other / np.where(np.abs(own) < _GAIN_FLOOR, _GAIN_FLOOR, own)
                x = x * scale.astype(np.float32)
        residual = self.extra_.get(f"residual.{layer}.{target}")
        return x if residual is None else np.asarray(x + residual, dtype=np.float32)

    def _gate(self, target: int, x: FloatArray) -> FloatArray:
        logits = x @ self.gates_.weights[target].T
        bias = self.gates_.biases[target]
        return np.asarray(logits if bias is None else logits + bias, dtype=np.float32)

    def _shown(self, layer: int, target: int, seen: Seen) -> FloatArray:
        """[T, features] what the correction sees; see the module's docstring."""
        weights = None if seen.weights is None else np.asarray(seen.weights[:, layer], dtype=np.float32)
        before = seen.hidden.get(layer - 1)
        x = seen.hidden[layer]
        return np.concatenate(
            [
                x,
                np.zeros_like(x) if before is None else before,
                self._marks(layer, seen.chosen, weights),
                self._marks(layer, seen.previous, None),
                self._marks(target, seen.previous, None),
            ],
            axis=1,
        )

    def _marks(self, layer: int, flat: Any, weights: FloatArray | None) -> FloatArray:
        """[T, E] the choices of a layer, marked with their share of the router weight (1 / K: not known)."""
        chosen, offsets = flat[:, layer], self.geometry_.offsets
        n, k = chosen.shape
        out = np.zeros((n, offsets[layer + 1] - offsets[layer] + 1), dtype=np.float32)
        share: Any = 1.0 / k
        if weights is not None:
            share = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-6)
        out[np.arange(n)[:, None], np.where(chosen < 0, -1, chosen - offsets[layer])] = share
        return out[:, :-1]

    def _scores(self, layer: int, target: int, seen: Seen) -> FloatArray:
        logits = self._gate(target, self._input(layer, target, seen.hidden[layer]))
        key = f"{layer}.{target}"
        down = self.extra_.get(f"down.{key}")
        if down is not None:
            shown = self._shown(layer, target, seen)
            shift = shown @ down @ self.extra_[f"up.{key}"] + self.extra_[f"shift.{key}"]
            logits = np.asarray(logits + shift, dtype=np.float32)
        return np.asarray(router_scores(self.gates_, target, logits), dtype=np.float32)

    def _margin(self, scores: FloatArray) -> FloatArray:
        """[T, E] distance to the middle between the k-th and the next best score."""
        k, experts = self.geometry_.top_k, scores.shape[1]
        if k == experts:
            return np.asarray(scores - scores.min(axis=1, keepdims=True), dtype=np.float32)
        best = -np.partition(-scores, (k - 1, k), axis=1)
        return np.asarray(scores - (best[:, k - 1 : k] + best[:, k : k + 1]) / 2, dtype=np.float32)

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        layer, target = context.layer, context.layer + horizon
        if context.hidden is None or layer not in context.hidden:
            raise ValueError(f"{type(self).__name__} needs the input of layer {layer}'s router")
        seen = Seen(
            hidden=context.hidden,
            chosen=context.chosen,
            previous=context.past.previous,
            weights=context.weights,
        )
        scores = self._scores(layer, target, seen)
        slope, bias = self.chance_[f"{layer}.{target}"]
        return sigmoid(slope * self._margin(scores) + bias)

    # -- saving ----------------------------------------------------------------------------------

    def state(self) -> State:
        arrays = {f"extra.{k}": v for k, v in self.extra_.items()}
        arrays |= {f"chance.{k}": v for k, v in self.chance_.items()}
        for layer in range(self.geometry_.layers):
            arrays[f"weight.{layer}"] = self.gates_.weights[layer]
            for name in ("biases", "corrections", "norms"):
                value = getattr(self.gates_, name)[layer]
                if value is not None:
                    arrays[f"{name}.{layer}"] = value
        return State(arrays=arrays)

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        layers = range(geometry.layers)

        def column(name: str) -> list[FloatArray | None]:
            return [state.arrays.get(f"{name}.{layer}") for layer in layers]

        weights = [state.arrays[f"weight.{layer}"] for layer in layers]
        if [len(w) for w in weights] != list(geometry.experts):
            raise ValueError("the routers' sizes are not those of the geometry")
        self.gates_ = Gates(
            weights=weights, biases=column("biases"), corrections=column("corrections"), norms=column("norms")
        )
        self.extra_ = _under("extra.", state)
        self.chance_ = _under("chance.", state)
        return self


def _under(prefix: str, state: State) -> dict[str, FloatArray]:
    return {k.removeprefix(prefix): v for k, v in state.arrays.items() if k.startswith(prefix)}


def _fit_logistic(margin: FloatArray, chosen: Any, steps: int = 30) -> FloatArray:
    """[2] slope and bias of P(chosen | margin), by Newton's method with a light pull of the slope to 1 over
    its scale."""
    x, y = margin.ravel().astype(np.float64), chosen.ravel().astype(np.float64)
    scale = x.std() or 1.0
    design = np.stack([x / scale, np.ones_like(x)], axis=1)
    theta = np.array([1.0, 0.0])
    for _ in range(steps):
        p = 1 / (1 + np.exp(-np.clip(design @ theta, -30, 30)))
        gradient = design.T @ (p - y) + 1e-3 * theta
        curvature = design.T @ (design * (p * (1 - p))[:, None]) + 1e-3 * np.eye(2)
        move = np.linalg.solve(curvature, gradient)
        theta = theta - np.clip(move, -2, 2)
        if np.abs(move).max() < 1e-6:
            break
    # a forecast must not turn the router's order round
    return np.asarray([max(theta[0], 1e-3) / scale, theta[1]], dtype=np.float32)


@PREDICTORS.register("gate_lookahead")
class Plain(GateLookahead):
    """Layer t's router on layer l's input as it is."""


@PREDICTORS.register("gate_lookahead_norm")
class Norm(GateLookahead):
    """The input first brought to layer t's norm."""

    uses_norm = True


@PREDICTORS.register("gate_lookahead_residual")
class Residual(GateLookahead):
    """And moved by the mean difference to what layer t sees."""

    uses_norm = True
    uses_residual = True


@PREDICTORS.register("gate_lookahead_corrected")
class Corrected(GateLookahead):
    """And the logits corrected by what the input and the chosen experts say."""

    uses_norm = True
    uses_residual = True
    uses_correction = True
