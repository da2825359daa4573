"""The running side of the predictor ``visits``: its network, carried on from layer to layer of a run.

What ``predictors/network.py`` computes from a whole past, this keeps up to date step by step, for one token
or for the mean of several: the state vector of the pass, the summed embeddings of the token before and of its
past, and the frequencies of use. The tests hold both to the same forecasts.

D width, F forecasts per expert, W windows of use, S = 2W numbers of an expert's past; L, E, R as in
``RunningForecast``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daop.core import FloatArray, Geometry, Phase, Step
from daop.predictors.history import HALF_LIVES
from daop.predictors.network import FLOOR, normalise, sigmoid

from .context_model import turns
from .native_context import load_context
from .native_visits import NativeVisits
from .running_forecast import RunningForecast

if TYPE_CHECKING:
    from daop.predictors.visits import Visits

Ids = NDArray[np.int64]
NEVER = -30.0  # log-odds of the experts that a narrow layer does not have


class VisitState(RunningForecast):
    """Trusts the predictor half until it has been seen at work."""

    source = "visits"
    native: NativeVisits | None

    def __init__(
        self,
        predictor: Visits,
        geometry: Geometry,
        frequency: FloatArray | None,
        *,
        use_native: bool = True,
    ) -> None:
        leads = turns(predictor.leads, geometry.layers)
        super().__init__(geometry, frequency, leads, 0.5)
        w = {name: np.ascontiguousarray(a, np.float32) for name, a in predictor.network_.weights.items()}
        half_lives = [HALF_LIVES[i] for i in predictor.sight.windows]
        windows, total, width = len(half_lives), geometry.total, w["bias"].shape[1]
        layers, experts = self.layers, self.experts
        past = w["frequency"].reshape(windows, total, width)
        self._embeddings = np.concatenate([w["chosen"][None, :-1], w["previous"][None, :-1], past])
        self._short = {name: shortened(w[name]) for name in ("in", "out", "head")}
        self._in, self._out, self._head = (lengthened(self._short[name]) for name in ("in", "out", "head"))
        self._bias = w["bias"]
        self._head_bias, self._direct = w["head_bias"], w["direct"]
        self._absent = np.arange(experts) >= np.asarray(geometry.experts)[:, None]  # [L, E]
        self._heads = np.asarray([*(lead - 1 for lead in leads[:-1]), predictor.turn], dtype=np.int64)
        self._later = predictor.later
        self._base = (geometry.top_k / np.asarray(geometry.experts)).astype(np.float32)
        self._blank = np.einsum("e,wed->wd", self._base[geometry.layer_of], past)
        self._decay = np.asarray([0.5 ** (1 / h) for h in half_lives], dtype=np.float32)
        self._before_all = geometry.layers * geometry.top_k * w["previous"][-1]  # nobody came before
        self._state = np.zeros(width, dtype=np.float32)
        self._sums = np.zeros((1 + windows, width), dtype=np.float32)
        self._coming = np.zeros_like(self._sums)
        self._shown = np.zeros((layers, 2 * windows, experts), dtype=np.float32)
        self._decayed = np.zeros((windows, layers, experts), dtype=np.float32)
        self._mass = np.zeros(windows, dtype=np.float32)
        self._at = np.asarray(
            [-1, 1, 0], dtype=np.int64
        )  # layer that came last (-1: a pass begins), its tokens
        self._visited = np.zeros(layers, dtype=np.int64)
        self._flat_offsets = np.asarray(geometry.offsets, dtype=np.int64)
        self._rows = 1
        self._sums[0] = self._before_all
        self.native = self._make_native() if use_native else None

    def _make_native(self) -> NativeVisits | None:
        library = load_context()
        if library is None:
            return None
        names = ("embeddings", "bias", "head_bias", "direct", "base", "blank", "decay")
        kept = ("state", "sums", "coming", "shown", "decayed", "mass", "heads", "at", "visited")
        arrays = {**self._short, **{name: getattr(self, f"_{name}") for name in (*names, *kept)}}
        arrays["offsets"] = self._flat_offsets
        return NativeVisits(library, self._shared(), arrays, self._later)

    def begin_sequences(self, count: int) -> None:
        """If none of the running sequences goes on, their past is forgotten."""
        if count < self._rows:
            return
        for kept in (self._sums, self._coming, self._decayed, self._mass, self._hot, self._visited):
            kept.fill(0)
        self._sums[0] = self._before_all
        if self.native is not None:
            self.native.forget()
        self._at[0] = -1

    def absorb(self, step: Step) -> None:
        if step.phase is Phase.DECODE:
            self._rows = step.rows
        super().absorb(step)

    def _absorb(self, layer: int, chosen: list[int], step: Step) -> None:
        done = int(self._at[0])
        if layer <= done:
            self._end_pass()
        if layer <= done or done < 0:
            done = -1
            self._begin_pass()
        self._count(layer, chosen, step)
        for skipped in range(done + 1, layer):  # of these nothing is known
            self._refine(skipped)
        hot = self._hot[layer, chosen]
        rows = self._embeddings[:, self._flat_offsets[layer] + np.asarray(chosen, dtype=np.int64)]
        found = np.einsum("k,nkd->nd", hot, rows)
        self._state += found[0]
        self._coming += found[1:]
        self._visited[layer] = 1
        self._refine(layer)
        self._at[:2] = layer, tokens_of(step)
        said = np.maximum(normalise(self._state), 0.0) @ self._head[layer]
        said = said.reshape(-1, self.experts) + self._head_bias[layer]
        targets = self.targets[layer]
        self._expect(targets, self._chances(said, layer, self._heads, targets), step.rows)
        later = self._chances(said, layer, np.asarray([self._later]), np.asarray([layer]))[0]
        self.rate[layer] = self.trust * later + (1.0 - self.trust) * self.usual[layer]

    def _chances(self, said: FloatArray, layer: int, heads: Ids, targets: Ids) -> FloatArray:
        """[R, E] what these forecasts say of these layers' experts."""
        direct = self._direct[layer, heads]  # [R, S + 1]
        logits = said[heads] + np.einsum("rs,rse->re", direct[:, :-1], self._shown[targets])
        logits += direct[:, -1:] * self._hot[targets]
        return sigmoid(np.where(self._absent[targets], np.float32(NEVER), logits))

    def _refine(self, layer: int) -> None:
        inner = normalise(self._state) @ self._in[layer] + self._bias[layer]
        self._state += np.maximum(inner, 0.0) @ self._out[layer]

    def _end_pass(self) -> None:
        self._hot[self._visited == 0] = 0.0
        kept = self._decay ** np.float32(self._at[1])
        fresh = (1.0 - kept) / (1.0 - self._decay)
        self._decayed *= kept[:, None, None]
        self._decayed += fresh[:, None, None] * self._hot
        self._mass[:] = self._mass * kept + fresh
        self._sums[1:] = self._sums[1:] * kept[:, None] + fresh[:, None] * self._coming[1:]
        self._sums[0] = self._coming[0]
        self._coming.fill(0.0)
        self._visited.fill(0)

    def _begin_pass(self) -> None:
        mass = self._mass[:, None]
        share = 1.0 / (mass + 1.0)
        base = self._base[:, None]
        frequency = ((self._decayed + base) * share[:, :, None]).transpose(1, 0, 2)  # [L, W, E]
        self._shown[:] = np.concatenate(
            [frequency - base[:, None], np.log(np.maximum(frequency, FLOOR))], axis=1
        )
        self._state[:] = self._sums[0] + ((self._sums[1:] - mass * self._blank) * share).sum(axis=0)


def shortened(values: FloatArray) -> NDArray[np.uint16]:
    """Rounded to bfloat16: the running network reads half as much, and its forecasts stay what they were."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def lengthened(short: NDArray[np.uint16]) -> FloatArray:
    """bfloat16 as float32."""
    return (short.astype(np.uint32) << 16).view(np.float32)


def tokens_of(step: Step) -> int:
    """How many tokens the pass brings one after the other: a prompt's, or one of each sequence."""
    return step.rows if step.phase is Phase.PREFILL else 1
