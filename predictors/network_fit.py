"""Fitting the network of ``network.py`` with torch: AdamW, one-cycle rate, binary cross-entropy per expert.

Functional, and torch is loaded only when something is fitted. Shapes as in ``network.py``; B tokens of a
batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from daop.core import Geometry

from .data import Routing, next_use, popularity
from .history import walk
from .network import EPSILON, FLOOR, Sight, Weights, shapes, usual_share

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MAX_FEATURE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast; the predictors' constructor arguments of the same names."""

    width: int
    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    dropout: float
    max_tokens: int
    seed: int

    @classmethod
    def of(cls, model: object) -> Schedule:
        return cls(**{f.name: getattr(model, f.name) for f in fields(cls)})


class Task(Protocol):
    """What the heads forecast, and their loss; ``fixed`` names weights that stay as they begin."""

    forecasts: int
    fixed: frozenset[str]

    def labels(self, data: Routing) -> dict[str, torch.Tensor]: ...
    def bias(self, popular: Any, geometry: Geometry, layer: int, forecast: int) -> Any: ...
    def loss(self, layer: int, said: Any, x: dict[str, torch.Tensor], w: Any, geometry: Geometry) -> Any: ...


def fit(data: Routing, schedule: Schedule, task: Task, sight: Sight, start: Weights | None = None) -> Weights:
    """Fitted weights, from scratch or (at a third of the rate) from ``start``."""
    import torch

    fits = MAX_FEATURE_BYTES // (data.geometry.total * len(sight.windows) * 2)
    chosen = data.sample(min(schedule.max_tokens, fits), schedule.seed)
    if len(chosen) < len(data):
        log.info("fitting on %d of %d tokens, whole sequences drawn at random", len(chosen), len(data))
    inputs = _inputs(chosen, sight) | task.labels(chosen)
    generator = torch.Generator().manual_seed(schedule.seed)
    first = _initial(schedule, task, sight, chosen, generator) if start is None else _tensors(start)
    weights = {name: value.clone().requires_grad_(name not in task.fixed) for name, value in first.items()}
    rate = schedule.learning_rate * (1.0 if start is None else 1 / 3)
    learnt = [value for value in weights.values() if value.requires_grad]
    optimiser = torch.optim.AdamW(learnt, lr=rate, weight_decay=schedule.weight_decay)
    batches = max(1, len(chosen) // schedule.batch)
    steps = schedule.epochs * batches + 1
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    for epoch in range(schedule.epochs):
        total = 0.0
        for rows in torch.randperm(len(chosen), generator=generator).tensor_split(batches):
            batch = {k: v[rows] for k, v in inputs.items()}
            value = _loss(schedule, task, sight, weights, batch, data.geometry, generator)
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            cycle.step()
            total += float(value.detach())
        log.info("epoch %d of %d, loss %.4f", epoch + 1, schedule.epochs, total / batches)
    return {name: value.detach().numpy().copy() for name, value in weights.items()}


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.tensor(value) for name, value in weights.items()}


def _inputs(data: Routing, sight: Sight) -> dict[str, torch.Tensor]:
    import torch

    n, geometry = len(data), data.geometry
    frequency = np.zeros((n, len(sight.windows), geometry.total), dtype=np.float16)
    previous = np.zeros((n, geometry.layers * geometry.top_k), dtype=np.int32)
    base = usual_share(geometry)
    for rows, before, _ in walk(data):
        frequency[rows] = before.frequency[:, sight.windows] - base
        previous[rows] = before.previous.reshape(rows.stop - rows.start, -1)
    absent = geometry.total
    return {
        "flat": torch.from_numpy(np.where(data.flat < 0, absent, data.flat)),
        "previous": torch.from_numpy(np.where(previous < 0, absent, previous)),
        "frequency": torch.from_numpy(frequency),
    }


def _initial(
    schedule: Schedule, task: Task, sight: Sight, data: Routing, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch

    geometry, d = data.geometry, schedule.width
    scale = {"chosen": 0.15, "previous": 0.05, "frequency": 0.02, "in": d**-0.5, "head": 0.3 * d**-0.5}
    out: dict[str, torch.Tensor] = {}
    for name, shape in shapes(geometry, d, task.forecasts, sight).items():
        out[name] = scale.get(name, 0.0) * torch.randn(shape, generator=generator)
    out["rank"] = torch.ones(geometry.top_k)
    if "rank" not in task.fixed and geometry.top_k > 1:
        out["rank"] = torch.linspace(1.3, 0.7, geometry.top_k)
    out["chosen"][-1] = 0.0
    out["previous"][-1] = 0.0
    popular = popularity(data)
    for layer in range(geometry.layers):
        for f in range(task.forecasts):
            chance = task.bias(popular, geometry, layer, f)
            if chance is not None:
                odds = np.log(chance / (1 - np.minimum(chance, 0.999)))
                out["head_bias"][layer, f, : len(odds)] = torch.from_numpy(odds)
    return out


def _loss(
    schedule: Schedule,
    task: Task,
    sight: Sight,
    w: dict[str, torch.Tensor],
    x: dict[str, torch.Tensor],
    geometry: Geometry,
    generator: torch.Generator,
) -> Any:
    import torch

    def norm(v: Any) -> Any:
        return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + float(EPSILON))

    keep = 1.0 - schedule.dropout
    flat, frequency, previous = x["flat"].long(), x["frequency"].float(), x["previous"].long()
    n = len(flat)
    blank = torch.zeros(n, geometry.total + 1)
    x["target"] = blank.scatter(1, flat.reshape(n, -1), 1.0)[:, : geometry.total]
    x["before"] = blank.scatter(1, previous, 1.0)[:, : geometry.total]
    x["seen"] = frequency
    if sight.logs:
        base = torch.from_numpy(usual_share(geometry))
        x["seen"] = torch.cat([frequency, (frequency + base).clamp_min(float(FLOOR)).log()], 1)
    rows = (w["chosen"][flat] * w["rank"][:, None]).sum(2)  # [B, L, D]
    state = w["previous"][previous].sum(1) + frequency.reshape(n, -1) @ w["frequency"]
    terms: list[Any] = []
    for layer in range(geometry.layers):
        state = state + rows[:, layer]
        inner = torch.relu(norm(state) @ w["in"][layer] + w["bias"][layer])
        state = state + inner @ w["out"][layer]
        read = torch.relu(norm(state))
        mask = torch.rand(read.shape, generator=generator) < keep
        said = (read * mask / keep) @ w["head"][layer]
        terms += task.loss(layer, said, x, w, geometry)
    if not terms:  # a single layer has no next one; nothing to learn, nothing to forecast
        terms = [w["bias"].sum() * 0.0]
    return torch.stack(terms).sum() / geometry.layers


def logits_of(layer: int, f: int, target: int, said: Any, last: Any, x: Any, w: Any, g: Geometry) -> Any:
    """[B, E] the training twin of ``Network.logits``."""
    count, span = g.experts[target], slice(g.offsets[target], g.offsets[target + 1])
    widest, direct = max(g.experts), w["direct"][layer, f]
    out = said[:, f * widest : f * widest + count] + w["head_bias"][layer, f, :count]
    for i in range(len(direct) - 1):
        out = out + direct[i] * x["seen"][:, i, span]
    return out + direct[-1] * last[:, span]


class NextTask:
    """Forecast f: does the token choose the expert, f + 1 layers ahead? Nearer layers weigh more."""

    fixed = frozenset[str]()

    def __init__(self, horizons: int) -> None:
        self.forecasts = horizons

    def labels(self, data: Routing) -> dict[str, torch.Tensor]:
        return {}

    def bias(self, popular: Any, geometry: Geometry, layer: int, forecast: int) -> Any:
        target = layer + forecast + 1
        if target >= geometry.layers:
            return None
        return popular[geometry.offsets[target] : geometry.offsets[target + 1]]

    def loss(self, layer: int, said: Any, x: dict[str, torch.Tensor], w: Any, geometry: Geometry) -> Any:
        import torch.nn.functional as F

        out = []
        for f in range(min(self.forecasts, geometry.layers - 1 - layer)):
            target = layer + f + 1
            span = slice(geometry.offsets[target], geometry.offsets[target + 1])
            logits = logits_of(layer, f, target, said, x["before"], x, w, geometry)
            known = (x["flat"][:, target, 0] < geometry.total).float()[:, None]
            each = F.binary_cross_entropy_with_logits(logits, x["target"][:, span], reduction="none")
            share = (1.0 if f == 0 else 0.35) / geometry.top_k
            out.append(share * (each * known).sum() / len(said))
        return out


class ReuseTask:
    """Forecast f: is the expert of the layer at hand chosen again within ``within[f]`` tokens?"""

    fixed = frozenset[str]()

    def __init__(self, within: tuple[int, ...]) -> None:
        self.within = within
        self.forecasts = len(within)

    def labels(self, data: Routing) -> dict[str, torch.Tensor]:
        import torch

        return {"wait": torch.from_numpy(next_use(data, max(self.within) + 1))}

    def bias(self, popular: Any, geometry: Geometry, layer: int, forecast: int) -> Any:
        once = popular[geometry.offsets[layer] : geometry.offsets[layer + 1]]
        return 1 - (1 - once) ** self.within[forecast]

    def loss(self, layer: int, said: Any, x: dict[str, torch.Tensor], w: Any, geometry: Geometry) -> Any:
        import torch.nn.functional as F

        span = slice(geometry.offsets[layer], geometry.offsets[layer + 1])
        wait, out = x["wait"][:, span], []
        for f, within in enumerate(self.within):
            logits = logits_of(layer, f, layer, said, x["target"], x, w, geometry)
            soon = ((wait > 0) & (wait <= within)).float()
            known = ((wait > 0) | (wait <= -within)).float()  # the sequence may end before the answer
            each = F.binary_cross_entropy_with_logits(logits, soon, reduction="none")
            out.append((each * known).sum() / (len(said) * geometry.top_k))
        return out
