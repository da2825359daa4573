"""How good forecasts are, with what each number means written beside it.

Sums are kept per sequence, so that every figure gets an interval from resampling whole sequences: tokens
of one sequence are alike, and intervals from single tokens would be far too narrow.
Shapes: S sequences, L target layers, T tokens, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, IntArray

DEFINITIONS = {
    "recall_at_k": "share of a token's k chosen experts that are among the k highest scored (mean over "
    "tokens and layers); naming k experts at random gets k / experts",
    "recall_at_k1": "the same with the k + 1 highest scored",
    "recall_at_2k": "the same with the 2k highest scored",
    "whole_set": "share of (token, layer) whose k chosen experts are exactly the k highest scored",
    "top_1": "share of (token, layer) whose highest scored expert was chosen at all",
    "brier": "mean squared difference between forecast chance and outcome over all experts of a layer; most "
    "are never chosen, so compare it only with that of popularity",
    "ece": "expected calibration error: mean distance of forecast chance and observed share, over ten bins",
    "hit_rate": "share of lookups found in one pool of so many experts when the forecast picks the victims",
    "gap_closed": "share of the distance from LRU to the optimum (Belady) that the forecast closed",
    "wait_error": "mean distance in tokens between forecast and actual wait, both cut at 6",
    "interval": "95 % by resampling whole sequences 1000 times",
}
RATES = ("recall_at_k", "recall_at_k1", "recall_at_2k", "whole_set", "top_1", "brier")
BINS = 10


@dataclass(kw_only=True)
class NextScores:
    """Sums for one predictor at one horizon. ``sums`` [rates, S, L], ``seen`` [S, L] (token, layer) pairs;
    ``bins`` [BINS, 3] of chances: count, sum of chances, sum of outcomes."""

    geometry: Geometry
    sums: NDArray[np.float64]
    seen: NDArray[np.float64]
    bins: NDArray[np.float64] = field(default_factory=lambda: np.zeros((BINS, 3)))

    @classmethod
    def empty(cls, geometry: Geometry, sequences: int) -> NextScores:
        shape = (sequences, geometry.layers)
        return cls(geometry=geometry, sums=np.zeros((len(RATES), *shape)), seen=np.zeros(shape))

    def add(self, target: int, scores: FloatArray, chosen: IntArray, sequence: NDArray[Any]) -> None:
        """``scores`` [T, E], ``chosen`` [T, K] of layer ``target`` (own numbers, negative: not known),
        ``sequence`` [T] row of each token's sequence."""
        known = (chosen >= 0).all(axis=1)
        if not known.all():
            scores, chosen, sequence = scores[known], chosen[known], sequence[known]
        if not len(scores):
            return
        (n, experts), k = scores.shape, chosen.shape[1]
        outcome = np.zeros((n, experts), dtype=np.float32)
        outcome[np.arange(n)[:, None], chosen] = 1.0
        order = np.argsort(-scores, axis=1, kind="stable")[:, : min(2 * k, experts)]
        found = np.cumsum(outcome[np.arange(n)[:, None], order], axis=1)
        at = [min(j, order.shape[1]) - 1 for j in (k, k + 1, 2 * k)]
        error = ((scores - outcome) ** 2).mean(axis=1)
        rates = [*(found[:, j] / k for j in at), found[:, at[0]] == k, found[:, 0], error]
        for i, rate in enumerate(rates):
            np.add.at(self.sums[i, :, target], sequence, rate.astype(np.float64))
        np.add.at(self.seen[:, target], sequence, 1.0)
        bin_of = np.minimum((scores * BINS).astype(np.int64), BINS - 1).ravel()
        for column, values in enumerate((np.ones(n * experts), scores.ravel(), outcome.ravel())):
            self.bins[:, column] += np.bincount(bin_of, weights=values, minlength=BINS)

    def report(self) -> dict[str, Any]:
        """Every rate with its interval and per layer, and the reliability of the chances."""
        out: dict[str, Any] = {}
        for i, name in enumerate(RATES):
            out[name] = _ratio(self.sums[i].sum(), self.seen.sum())
            out[f"{name}_interval"] = interval(self.sums[i].sum(axis=1), self.seen.sum(axis=1))
        out["per_layer"] = {
            "recall_at_k": [_ratio(a, b) for a, b in zip(self.sums[0].sum(0), self.seen.sum(0), strict=True)]
        }
        count, chance, outcome = self.bins.T
        with np.errstate(invalid="ignore"):
            gap = np.abs(chance - outcome).sum() / max(count.sum(), 1)
            out["ece"] = float(gap)
            out["reliability"] = [
                {"chances": int(n), "forecast": float(c / n), "observed": float(o / n)}
                for n, c, o in zip(count, chance, outcome, strict=True)
                if n
            ]
        return out


def _ratio(a: float, b: float) -> float | None:
    return float(a / b) if b else None


def interval(sums: NDArray[Any], seen: NDArray[Any], draws: int = 1000, seed: int = 0) -> list[float] | None:
    """95 % interval of sum(sums) / sum(seen) over resampled sequences; None for fewer than two."""
    present = seen > 0
    sums, seen = sums[present], seen[present]
    if len(seen) < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(seen), np.full(len(seen), 1 / len(seen)), size=draws)
    low, high = np.percentile((drawn @ sums) / (drawn @ seen), [2.5, 97.5])
    return [float(low), float(high)]
