"""Scoring fitted predictors on traffic they have not seen: quality, calibration and cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from daop.core import DaopError
from daop.predictors.base import NextLayer, Predictor, Reuse
from daop.predictors.data import Routing, next_use
from daop.predictors.history import Context, contexts, hidden_contexts
from daop.predictors.mlp_reuse import CAP
from daop.predictors.session import Session

from .metrics import NextScores, interval
from .reuse_replay import replay, score_waits

log = logging.getLogger(__name__)

ECRS = (0.125, 0.25, 0.5)
MAX_TOKENS = 10_000


def evaluate(
    predictors: Mapping[str, Predictor], data: Routing, *, max_tokens: int = MAX_TOKENS, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """A report per predictor; see ``metrics.DEFINITIONS``. Tokens beyond ``max_tokens`` are sampled away."""
    for name, predictor in predictors.items():
        predictor.geometry_.check_same_shape(data.geometry, f"the predictor {name}", "the trace")
    if len(data) == 0:
        raise DaopError("nothing to evaluate on: the trace (or its test side) is empty")
    small = data.sample(max_tokens, seed)
    if len(small) < len(data):
        log.info("evaluating on %d of %d tokens, whole sequences drawn at random", len(small), len(data))
    following = {n: p for n, p in predictors.items() if isinstance(p, NextLayer)}
    waiting = {n: p for n, p in predictors.items() if isinstance(p, Reuse)}
    reports = evaluate_next(following, small) | evaluate_reuse(waiting, small)
    for name, predictor in predictors.items():
        reports[name] |= {"kind": predictor.kind} | costs(predictor, small)
    return reports


def evaluate_next(predictors: Mapping[str, NextLayer], data: Routing) -> dict[str, dict[str, Any]]:
    """Recall and calibration at every horizon; the figures at the top are those of the next layer."""
    geometry = data.geometry
    sequence = np.repeat(np.arange(data.sequences), np.diff(data.offsets))
    sums = {
        name: [NextScores.empty(geometry, data.sequences) for _ in range(p.horizons)]
        for name, p in predictors.items()
    }
    by_history = {n: p for n, p in predictors.items() if not p.needs.hidden}
    by_hidden = {n: p for n, p in predictors.items() if p.needs.hidden}
    if by_hidden and data.hidden is None:
        raise DaopError(f"{', '.join(by_hidden)}: needs hidden states; record the trace with --features")
    for rows, context in contexts(data) if by_history else ():
        _score(by_history, context, data.flat[rows], sequence[rows], sums)
    for index, context in hidden_contexts(data) if by_hidden else ():
        _score(by_hidden, context, data.flat[index], sequence[index], sums)
    out = {}
    for name, horizons in sums.items():
        reports = [s.report() for s in horizons]
        out[name] = reports[0] | {
            "by_horizon": {
                str(h + 1): {"recall_at_k": r["recall_at_k"], "interval": r["recall_at_k_interval"]}
                for h, r in enumerate(reports)
            }
        }
    return out


def _score(
    predictors: Mapping[str, NextLayer],
    context: Context,
    flat: Any,
    sequence: Any,
    sums: Mapping[str, list[NextScores]],
) -> None:
    geometry = context.geometry
    for name, predictor in predictors.items():
        own = replace(context, memo={})
        for layer in range(geometry.layers):
            own.layer = layer
            for h in range(1, min(predictor.horizons, geometry.layers - 1 - layer) + 1):
                scores = predictor.probabilities(own, h)
                chosen = flat[:, layer + h] - geometry.offsets[layer + h]
                sums[name][h - 1].add(layer + h, scores, chosen, sequence)


def evaluate_reuse(predictors: Mapping[str, Reuse], data: Routing) -> dict[str, dict[str, Any]]:
    """Hits with the forecast as victim rule, one pool, beside LRU, LFU and the optimum; error of the
    waits."""
    if not predictors:
        return {}
    geometry = data.geometry
    slots = {ecr: max(geometry.top_k, round(ecr * geometry.total)) for ecr in ECRS}
    rivals = {
        ecr: {rule: replay(data, n, rule) for rule in ("lru", "lfu", "optimum")} for ecr, n in slots.items()
    }
    actual = next_use(data, CAP)
    out: dict[str, dict[str, Any]] = {}
    for name, predictor in predictors.items():
        waits = score_waits(predictor, data)
        known = actual > 0
        error = np.abs(np.minimum(waits, CAP) - actual)[known].mean() if known.any() else None
        pools = {}
        for ecr, n in slots.items():
            ours = replay(data, n, "forecast", waits)
            lru, lfu, best = (rivals[ecr][r].hit_rate for r in ("lru", "lfu", "optimum"))
            ends = data.offsets[:-1]
            pools[str(ecr)] = {
                "hit_rate": ours.hit_rate,
                "interval": interval(np.add.reduceat(ours.hits, ends), np.add.reduceat(ours.lookups, ends)),
                "lru": lru,
                "lfu": lfu,
                "optimum": best,
                "gap_closed": (ours.hit_rate - lru) / (best - lru) if best > lru else None,
            }
        out[name] = {
            "hit_rate": pools["0.25"]["hit_rate"],
            "wait_error": None if error is None else float(error),
            "pools": pools,
        }
    return out


def costs(predictor: Predictor, data: Routing, tokens: int = 64) -> dict[str, Any]:
    """Median microseconds of one forecast in a run (one sequence), and bytes: of the run's memory, of the
    model."""
    model = sum(a.nbytes for a in predictor.state().arrays.values())
    model += sum(len(t) for t in predictor.state().texts.values())
    following = predictor if isinstance(predictor, NextLayer) else None
    session = Session(data.geometry, following, predictor if isinstance(predictor, Reuse) else None)
    session.begin()
    hidden = data.hidden
    times: list[float] = []
    for i in range(min(tokens, len(data) if hidden is None else len(hidden.rows))):
        row = i if hidden is None else int(hidden.rows[i])
        for layer in range(data.geometry.layers):
            ids = data.flat[row : row + 1, layer] - data.geometry.offsets[layer]
            seen = None if hidden is None else hidden.values[i : i + 1, layer].astype(np.float32)
            token = None if data.token_ids is None else data.token_ids[row : row + 1]
            session.observe(layer, ids, hidden=seen, token_ids=token)
            start = time.perf_counter()
            made = session.forecast(1)
            if made is not None:
                times.append(time.perf_counter() - start)
        start = time.perf_counter()
        if session.wait() is not None:
            times.append(time.perf_counter() - start)
    return {
        "microseconds_per_forecast": 1e6 * float(np.median(times)) if times else None,
        "state_bytes": session.nbytes,
        "model_bytes": int(model),
    }
