"""What a reuse forecast is worth as a victim rule: hits of one pool of experts over a recorded routing.

No clock, no transfers, no admission: every miss is brought in and the worst resident goes. It scores
forecasts; how policies fare on a machine is the simulator's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError
from daop.predictors.base import Reuse
from daop.predictors.data import Routing
from daop.predictors.history import Context, walk

RULES = ("lru", "lfu", "forecast", "optimum")
# Called after every layer with (token, layer, its distinct experts, the keys); the resident with the
# largest key goes.
Touch = Callable[[int, int, NDArray[Any], NDArray[np.float64]], None]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """``hits`` [N] among the ``lookups`` [N] of each token; one lookup per chosen expert and layer."""

    hits: NDArray[np.int64]
    lookups: NDArray[np.int64]

    @property
    def hit_rate(self) -> float:
        return float(self.hits.sum() / max(1, self.lookups.sum()))


def replay(data: Routing, capacity: int, rule: str, waits: NDArray[Any] | None = None) -> Replay:
    """Run the tokens in order through one pool of ``capacity`` experts.

    ``waits`` [N, total] (rule ``forecast``) as ``Reuse.wait`` gives them, row t after token t. An expert's
    key is the moment of its forecast next use, counted in layers; the forecast of layer l's experts counts
    from the moment layer l has passed.
    """
    top_k = data.geometry.top_k
    if capacity < top_k:
        raise DaopError(f"a pool of {capacity} experts cannot hold the {top_k} that one token needs at once")
    touch = _touch(data, rule, waits)
    total = data.geometry.total
    key, resident = np.zeros(total), np.zeros(total, dtype=np.bool_)
    hits, lookups = np.zeros(len(data), dtype=np.int64), np.zeros(len(data), dtype=np.int64)
    used = 0
    complete = bool((data.flat >= 0).all())
    for token, layers in enumerate(data.flat):
        for layer, chosen in enumerate(layers):
            need = chosen if complete else chosen[chosen >= 0]
            present = resident[need]
            here = int(np.count_nonzero(present))
            hits[token] += here
            lookups[token] += len(need)
            touch(token, layer, need, key)
            if here == len(need):
                continue
            resident[need] = True
            used += len(need) - here
            if used > capacity:
                ranked = np.where(resident, key, -np.inf)
                ranked[need] = -np.inf
                for _ in range(used - capacity):
                    victim = ranked.argmax()
                    ranked[victim] = -np.inf
                    resident[victim] = False
                used = capacity
    return Replay(hits=hits, lookups=lookups)


def _touch(data: Routing, rule: str, waits: NDArray[Any] | None) -> Touch:
    geometry, layers = data.geometry, data.geometry.layers
    if rule == "lru":

        def lru(token: int, layer: int, need: NDArray[Any], key: NDArray[np.float64]) -> None:
            key[need] = -(token * layers + layer)

        return lru
    if rule == "lfu":

        def lfu(token: int, layer: int, need: NDArray[Any], key: NDArray[np.float64]) -> None:
            key[need] -= 1

        return lfu
    if rule == "optimum":
        upcoming = _next_step(data)

        def optimum(token: int, layer: int, need: NDArray[Any], key: NDArray[np.float64]) -> None:
            key[need] = upcoming[token, layer, : len(need)]

        return optimum
    if rule == "forecast" and waits is not None and waits.shape == (len(data), geometry.total):
        spans = [slice(a, b) for a, b in zip(geometry.offsets[:-1], geometry.offsets[1:], strict=True)]

        def forecast(token: int, layer: int, need: NDArray[Any], key: NDArray[np.float64]) -> None:
            span = spans[layer]
            key[span] = (token + waits[token, span].astype(np.float64)) * layers + layer

        return forecast
    raise DaopError(f"victim rule {rule!r} is not one of {', '.join(RULES)}, or its waits have another shape")


def _next_step(data: Routing) -> NDArray[np.float64]:
    """[N, L, K] when each chosen expert is chosen next, in layer steps; known choices come first."""
    n, layers, _ = data.flat.shape
    out = np.full(data.flat.shape, np.inf)
    upcoming = np.full(data.geometry.total, np.inf)
    for token in range(n - 1, -1, -1):
        for layer in range(layers - 1, -1, -1):
            chosen = data.flat[token, layer]
            known = chosen[chosen >= 0]
            out[token, layer, : len(known)] = upcoming[known]
            upcoming[known] = token * layers + layer
    return out


def score_waits(predictor: Reuse, data: Routing, dtype: Any = np.float32, chunk: int = 256) -> NDArray[Any]:
    """[N, total] the predictor's waits after every token, as ``replay`` and the simulator take them."""
    out = np.empty((len(data), data.geometry.total), dtype=dtype)
    for rows, before, after in walk(data, chunk):
        context = Context(
            geometry=data.geometry,
            layer=data.geometry.layers - 1,
            chosen=data.flat[rows],
            past=before,
            weights=None if data.weights is None else data.weights[rows],
        )
        out[rows] = predictor.wait(context, after)
    return out
