"""Plain implementations of approximate policies, written from their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from early_runs import LAYERS, PROMPT, E, H, K, correction, profile

from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.input_correction import InputCorrection
from daop.runtime.model import BuiltModel, build_model
from daop.runtime.policies.approximate import Approximate
from daop.runtime.reference import compute_expert, read_expert


class Plain:
    """One sequence at a time, one token at a time, no batches, no slots: what a policy is defined to give."""

    def __init__(self, model: Path, policy: Approximate, ecr: float) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self.built: BuiltModel = build_model(self.checkpoint, self)
        known = profile(model)
        policy.profile = known
        self.frequency = known.frequency.reshape(LAYERS, E)
        self.correct = InputCorrection(correction())
        self.policy = policy
        self.slots = int(LAYERS * E * ecr)
        self.counts = np.zeros((LAYERS, E), dtype=np.int64)
        self.guess: Any = None
        self.pending: Any = None

    def run(self, tokens: tuple[int, ...]) -> torch.Tensor:
        self.counts[:] = 0
        self.uses: list[list[list[int]]] = [[] for _ in range(LAYERS)]
        self.usual: dict[int, float] = {}
        with torch.inference_mode():
            out = self.built.model(torch.tensor([tokens[:PROMPT]]), use_cache=True)
            logits = []
            for token in tokens[PROMPT:-1]:
                out = self.built.model(torch.tensor([[token]]), cache=out.cache, use_cache=True)
                logits.append(out.logits[0, -1].float())
        return torch.stack(logits)

    def expert(self, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        views = self.checkpoint.layouts[layer].views(read_expert(self.checkpoint, layer * E + expert))
        return compute_expert(self.built.forms[layer], views, x[None])[0].float()

    def resident(self, layer: int) -> set[int]:
        """Share by layer of the most frequent, the rest by the global ranking; then the prompt's swaps."""
        share = self.slots // LAYERS
        chosen = {
            m: set(np.argsort(-self.frequency[m], kind="stable")[:share].tolist()) for m in range(LAYERS)
        }
        rest = sorted(
            (-self.frequency[m, e], m, e) for m in range(LAYERS) for e in range(E) if e not in chosen[m]
        )
        for _, m, e in rest[: self.slots - share * LAYERS]:
            chosen[m].add(e)
        mine, n = chosen[layer], self.counts[layer]
        busy = sorted((e for e in range(E) if e not in mine), key=lambda e: -n[e])[: E // 2]
        idle = sorted(mine, key=lambda e: n[e])[: E // 2]
        for into, out in zip(busy, idle, strict=False):
            if n[into] > 1.05 * n[out]:
                mine = (mine - {out}) | {into}
        return mine

    def recent(self, layer: int) -> set[int]:
        """A third of the slots: the most used by this sequence of late, before this token."""
        score = {
            e: 4.0 * float(self.frequency[layer, e]) * 0.97 ** len(self.uses[layer][:-1]) for e in range(E)
        }
        for age, chosen in enumerate(reversed(self.uses[layer][:-1])):
            for e in chosen:
                score[e] += 0.97**age
        return set(sorted(score, key=lambda e: -score[e])[: self.slots // LAYERS])

    def by_frequency(self, layer: int) -> set[int]:
        best = np.argsort(-self.frequency.ravel(), kind="stable")[: self.slots]
        return {int(flat) - layer * E for flat in best if flat // E == layer}

    def __call__(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            self.counts[layer] += np.bincount(ids.numpy().ravel(), minlength=E)
            self.uses[layer] += ids.tolist()
            return torch.stack(
                [
                    sum(
                        (w * self.expert(layer, int(e), one) for e, w in zip(i, ws, strict=True)),
                        torch.zeros(H),
                    )
                    for one, i, ws in zip(x, ids, weights, strict=True)
                ]
            ).to(x.dtype)
        chosen = list(zip(ids[0].tolist(), weights[0].float().tolist(), strict=True))
        ways = {"Daop": self._daop, "Deferral": self._deferral, "Bounded": self._bounded}
        out = ways[type(self.policy).__name__](layer, x[0], chosen)
        return out[None].to(x.dtype)

    def _asked(self, layer: int, x: torch.Tensor) -> list[tuple[int, float]]:
        found = self.built.route(layer, x[None])
        assert found is not None
        return list(zip(found[0][0].tolist(), found[1][0].float().tolist(), strict=True))

    def _daop(self, layer: int, x: torch.Tensor, chosen: list[tuple[int, float]]) -> torch.Tensor:
        out, mine = torch.zeros(H), self.resident(layer)
        if layer > self.policy.first:  # type: ignore[attr-defined]
            chosen, stale = self.guess
            if mine and not any(e in mine for e, _ in chosen):
                found = self.built.route(layer, stale[None])
                assert found is not None
                p = found[2][0]
                first = max(chosen, key=lambda pair: pair[1])
                others = sorted(mine, key=lambda e: -float(p[e]))[: K - 1]
                left = sorted((pair for pair in chosen if pair != first), key=lambda pair: -pair[1])
                new = [(e, first[1] * float(p[e] / p[first[0]])) for e in others]
                whole = [first, *new, *left[len(new) :]]
                scale = sum(w for _, w in chosen) / sum(w for _, w in whole)
                chosen = [(e, w * scale) for e, w in whole]
            for e, w in chosen:
                out += w * self.expert(layer, e, x if e in mine else stale)
        else:
            for e, w in chosen:
                out += w * self.expert(layer, e, x)
        if self.policy.first <= layer < LAYERS - 1:  # type: ignore[attr-defined]
            self.guess = (self._asked(layer + 1, x), x)
        return out

    def _deferral(self, layer: int, x: torch.Tensor, chosen: list[tuple[int, float]]) -> torch.Tensor:
        mine = self.by_frequency(layer)
        host = sorted((pair for pair in chosen if pair[0] not in mine), key=lambda pair: pair[1])
        late = [] if layer == LAYERS - 1 else host[: min(2, K - 1)]
        out = torch.zeros(H)
        for e, w in chosen:
            if (e, w) not in late:
                out += w * self.expert(layer, e, x)
        if self.pending is not None:
            out += self.pending
        self.pending = sum((w * self.expert(layer, e, x) for e, w in late), torch.zeros(H))
        return out

    def _bounded(self, layer: int, x: torch.Tensor, chosen: list[tuple[int, float]]) -> torch.Tensor:
        policy: Any = self.policy
        out, early, guess = torch.zeros(H), set(), x
        self.uses[layer].append([e for e, _ in chosen])
        if layer > 0 and self.guess is not None:
            named, guess = self.guess
            host = [pair for pair in named if pair[0] not in self.recent(layer)]
            early = {e for e, _ in sorted(host, key=lambda pair: -pair[1])[: policy.calls]}
            away, usual = float((x - guess).norm() / x.norm()), self.usual.get(layer, 0.0)
            if max(away, usual) >= policy.tolerance:
                early = set()
            self.usual[layer] = away if layer not in self.usual else usual + 0.2 * (away - usual)
        for e, w in chosen:
            out += w * self.expert(layer, e, guess if e in early else x)
        if layer < LAYERS - 1:
            ahead = self.correct(layer, x[None])[0]
            self.guess = (self._asked(layer + 1, ahead), ahead)
        return out
