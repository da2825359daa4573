"""What a report draws beside the totals: residency over time, use and reuse of experts, honest forecasts.

A bounded watcher: a run of any length gives at most ``samples`` samples of residency, evenly spread.

    reuse distance   forward passes since the expert's last use, in bins 1, 2, 3-4, 5-8, ...
    reliability      of all (expert, visit) pairs whose forecast chance lay in a tenth of 0..1: their mean
                     forecast, and how often they were in fact used
    recall           of the experts that single-token visits used, the share among as many of highest forecast
The forecast judged is the predictor's for the next layer, or else what the policy expects itself
(``Policy.expected``) just before the layer is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daop.core import BoolArray, FloatArray, Forecast, Phase, Step

from .watching import Watcher

if TYPE_CHECKING:
    from .conductor import Conductor, Work

SAMPLES = 240
TENTHS = 10
BINS = 32


class History(Watcher):
    """``resident`` [S, total] at ``tokens`` [S]; ``uses`` [total]; ``reuse`` [BINS] and ``first_uses``;
    ``forecasts``, ``came_true`` and ``scores`` [TENTHS]: pairs, how many were used, sum of the forecasts."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._limit = samples

    def attach(self, conductor: Conductor) -> None:
        self.geometry = conductor.residency.geometry
        self._residency = conductor.residency
        self._policy = conductor.policy
        self.reset()

    def reset(self) -> None:
        total = self.geometry.total
        self.stride = 1
        self.passes = 0
        self._token = 0
        self._samples: list[tuple[int, bool, NDArray[np.uint8]]] = []
        self._uses = [0] * total
        self._last = [-1] * total
        self._reuse = [0] * BINS
        self.first_uses = 0
        self._pending: dict[int, FloatArray] = {}
        self.forecasts = np.zeros(TENTHS, dtype=np.int64)
        self.came_true = np.zeros(TENTHS, dtype=np.int64)
        self.scores = np.zeros(TENTHS, dtype=np.float64)
        self.recalled = self.wanted = 0

    # -- what was seen ---------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        return [token for token, _, _ in self._samples]

    @property
    def prefetching(self) -> list[bool]:
        """[S] whether the policy was looking ahead."""
        return [on for _, on, _ in self._samples]

    @property
    def resident(self) -> BoolArray:
        bits = [bits for _, _, bits in self._samples]
        if not bits:
            return np.zeros((0, self.geometry.total), dtype=np.bool_)
        out: BoolArray = np.unpackbits(np.stack(bits), axis=1, count=self.geometry.total).astype(np.bool_)
        return out

    @property
    def uses(self) -> NDArray[np.int64]:
        return np.asarray(self._uses, dtype=np.int64)

    @property
    def reuse(self) -> NDArray[np.int64]:
        return np.asarray(self._reuse, dtype=np.int64)

    @property
    def recall(self) -> float | None:
        return self.recalled / self.wanted if self.wanted else None

    # -- watching --------------------------------------------------------------------------------

    def begin(self, phase: Phase, rows: int) -> None:
        if self.passes % self.stride == 0:
            self._samples.append(
                (self._token, self._policy.prefetching, np.packbits(self._residency.resident))
            )
            if len(self._samples) > self._limit:
                self._samples = self._samples[::2]
                self.stride *= 2
        self.passes += 1
        self._token += rows

    def forecast(self, step: Step, forecasts: Sequence[Forecast]) -> None:
        for forecast in forecasts:
            if forecast.layer == step.layer + 1:
                self._pending[forecast.layer] = forecast.scores

    def planned(self, step: Step, work: Work) -> None:
        uses, last, reuse, now = self._uses, self._last, self._reuse, self.passes
        for flat in step.experts:
            uses[flat] += 1
            if last[flat] >= 0:
                reuse[(max(now - last[flat], 1) - 1).bit_length()] += 1
            else:
                self.first_uses += 1
            last[flat] = now
        scores = self._pending.pop(step.layer, None)
        if scores is not None:
            self._judge(step, scores)

    def finished(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        following = (step.layer + 1) % self.geometry.layers
        if following not in self._pending:
            expected = self._policy.expected(following)
            if expected is not None:
                self._pending[following] = expected.copy()

    def _judge(self, step: Step, scores: FloatArray) -> None:
        chosen = np.asarray(step.experts) - self.geometry.offsets[step.layer]
        tenth = np.clip((scores * TENTHS).astype(np.int64), 0, TENTHS - 1)
        self.forecasts += np.bincount(tenth, minlength=TENTHS)
        self.scores += np.bincount(tenth, weights=scores, minlength=TENTHS)
        self.came_true += np.bincount(tenth[chosen], minlength=TENTHS)
        if step.rows == 1:
            best = np.argpartition(-scores, len(chosen) - 1)[: len(chosen)]
            self.recalled += len(np.intersect1d(best, chosen, assume_unique=True))
            self.wanted += len(chosen)
