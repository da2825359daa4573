"""Carries approximate policies out on real numbers: announced inputs, early results, late outputs.

Device-independent: tensors stay on the device that they come from; decisions are made on small numpy copies.
An executor calls, for every MoE layer of a forward pass, in this order:

    decided = early.enter(layer, hidden, ids, weights, statistics)
    started = early.look_ahead(layer, hidden)
    total = ... run decided.hidden, decided.ids, decided.weights as a layer's own, [n, H] ...
    out = early.leave(decided, total)

``enter`` hands out *more rows than tokens*: after the T true rows come, where any call needs them, T rows
whose input is the announced one, with only the early calls, and T rows with only the late calls. Every other
id of a row is the layer's number of experts, which is padding. So any executor computes the right numbers
with no code of its own (``around.ApproximateExperts`` does the above around it), but gains no time.

An executor whose host computes beside its device (``host_beside``) starts the calls that ``look_ahead``
returns (``Started``: rows and choices of the next layer, and their input) on its host pool at once, weighted
by 1. At the next ``enter`` it passes ``apart=True``. Then ``decided`` has no rows for early calls, and
``decided.early`` names those whose results count, a subset of what was started: they are added to
``total[:T]`` with the weights of ``decided.routing`` before ``leave``. The others are dropped or, where
begun, forgotten.

Shape legend: T rows, K experts per token, E experts of the layer, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import BoolArray, DaopError, Geometry, Phase

from .announcing import Announced, Announcer, Routers, distances, routing_of
from .input_correction import InputCorrection
from .policies.approximate import Approximate, Routing, Settled, count_calls
from .statistics import Statistics


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """A layer's work. ``hidden`` [n, H], ``ids`` [n, K], ``weights`` [n, K]: what is to be run; ``rows`` T of
    them are the tokens, whose ids and weights are ``routing``. ``early`` and ``late`` [T, K]; ``late_at``:
    where the late rows begin."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    rows: int
    routing: tuple[torch.Tensor, torch.Tensor]
    early: BoolArray | None = None
    late: BoolArray | None = None
    late_at: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """Calls of layer ``layer`` that may start now: ``calls`` [T, K] of ``routing``, on ``input`` [T, H]."""

    layer: int
    input: torch.Tensor
    routing: Routing
    calls: BoolArray


class EarlyResults:
    """The state between layers, for one executor and one policy."""

    def __init__(
        self,
        policy: Approximate,
        routers: Routers,
        geometry: Geometry,
        *,
        correction: InputCorrection | None = None,
        scales_input: bool = False,
    ) -> None:
        name = type(policy).__name__.lower()
        if policy.weighs and scales_input:
            raise DaopError(
                f"policy {name} weighs outputs when the true router is known, but this model's family weighs "
                "inputs: use another policy"
            )
        self.policy = policy
        self._geometry = geometry
        self._routers = routers
        self._known: set[int] = set()  # layers whose router was seen to answer as the model itself does
        self._announcer = Announcer(routers, correction if policy.corrects else None, f"policy {name}")
        self._phase = Phase.PREFILL
        self._sequences: list[int] = []
        self._row_sequence: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._real: NDArray[np.intp] | None = None
        self._announced: Announced | None = None
        self._pending: torch.Tensor | None = None  # [T, H] float32, to be added to the next layer's output
        self.calls: NDArray[np.int64] = np.zeros((0, 2), dtype=np.int64)

    def begin(
        self, phase: Phase, rows: int, sequences: int, new: bool, real: NDArray[np.intp] | None
    ) -> None:
        """A forward pass of ``rows`` tokens of so many sequences, in their order; ``new``: they begin with
        it; ``real``: the rows that are not padding (None: all)."""
        self._phase, self._real = phase, real
        self._announced = self._pending = None
        if new or sequences != len(self._sequences):
            self._sequences = list(range(sequences))
            self.policy.placement.forget_all()
            self.policy.open(self._sequences)
            self.calls = np.zeros((sequences, 2), dtype=np.int64)
        self._row_sequence = np.repeat(np.arange(sequences), rows // sequences)

    def enter(
        self,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        statistics: Statistics,
        *,
        apart: bool = False,
    ) -> Decided:
        """hidden [T, H], ids [T, K], weights [T, K] as the model's router gave them."""
        if self._phase is Phase.PREFILL:
            real = slice(None) if self._real is None else self._real
            self.policy.placement.prompt(layer, ids.cpu().numpy()[real], self._row_sequence[real])
            return Decided(hidden, ids, weights, len(hidden), (ids, weights))
        if not self.policy.weighs and layer and self.policy.asks(layer - 1) and layer not in self._known:
            self._compare_router(layer, hidden, ids, weights)
        announced = self._announced
        away = None if announced is None else distances(hidden, announced.input)
        true = routing_of(ids, weights)
        settled = self.policy.settle(layer, self._row_sequence.tolist(), true, away)
        if settled.changed:
            ids = torch.from_numpy(settled.routing.ids).to(ids.device, ids.dtype)
            weights = torch.from_numpy(settled.routing.weights).to(weights.device, weights.dtype)
        self._count(true, settled, statistics)
        guess = None if announced is None else announced.input
        return self._extend(layer, hidden, guess, ids, weights, settled, apart)

    def _compare_router(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Once per layer: a forecast stands for the routing only if the router answers as the model does."""
        seen = self._routers.router_input(layer)
        found = self._routers.route(layer, hidden if seen is None else seen)
        if found is not None:
            order, theirs = ids.argsort(dim=1), found[0].argsort(dim=1)
            same = torch.equal(ids.gather(1, order), found[0].gather(1, theirs).to(ids.dtype))
            mine, other = weights.float().gather(1, order), found[1].float().gather(1, theirs)
            if not (same and torch.allclose(mine, other, rtol=0.02, atol=1e-3)):
                raise DaopError(
                    "this model weighs its experts otherwise than its routers say, so a forecast cannot "
                    f"stand for the routing of MoE layer {layer}: use bounded, deferral or an exact policy"
                )
        self._known.add(layer)

    def look_ahead(self, layer: int, hidden: torch.Tensor) -> Started | None:
        """After ``enter``, with its ``hidden``: what is announced of the next layer; None: nothing."""
        self._announced = None
        if self._phase is Phase.PREFILL or not self.policy.asks(layer):
            return None
        self._announced = announced = self._announcer(layer, hidden)
        started = self.policy.announce(
            layer, self._row_sequence.tolist(), announced.routing, announced.scores
        )
        if started.early is None:
            return None
        return Started(layer + 1, announced.input, started.routing, started.early)

    def leave(self, decided: Decided, total: torch.Tensor) -> torch.Tensor:
        """``total`` [n, H]: what ``decided``'s rows gave -> [T, H] in the model's dtype."""
        rows, pending, self._pending = decided.rows, self._pending, None
        if len(total) == rows and pending is None:
            return total.to(decided.hidden.dtype)
        out = total[:rows].float()
        if len(total) > rows:
            out = out.clone()
            early_end = len(total) if decided.late_at is None else decided.late_at
            if early_end > rows:
                out += total[rows:early_end].float()
            if decided.late_at is not None:
                self._pending = total[decided.late_at :].float().clone()
        if pending is not None:
            out = out + pending
        return out.to(decided.hidden.dtype)

    def _extend(
        self,
        layer: int,
        hidden: torch.Tensor,
        guess: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        settled: Settled,
        apart: bool,
    ) -> Decided:
        early = settled.early if settled.early is not None and settled.early.any() else None
        late = settled.late if settled.late is not None and settled.late.any() else None
        if early is None and late is None:
            return Decided(hidden, ids, weights, len(hidden), (ids, weights))
        padding = self._geometry.experts[layer]
        taken = np.zeros(ids.shape, dtype=np.bool_)
        inputs, choices = [hidden], [ids]
        late_at = None
        for mask, input_ in ((early, guess), (late, hidden)):
            if mask is None or input_ is None:
                continue
            taken |= mask
            if mask is early and apart:
                continue
            if mask is late:
                late_at = len(hidden) * len(inputs)
            inputs.append(input_)
            choices.append(ids.masked_fill(torch.from_numpy(~mask).to(ids.device), padding))
        choices[0] = ids.masked_fill(torch.from_numpy(taken).to(ids.device), padding)
        return Decided(
            torch.cat(inputs),
            torch.cat(choices),
            weights.repeat(len(inputs), 1),
            len(hidden),
            (ids, weights),
            early,
            late,
            late_at,
        )

    def _count(self, true: Routing, settled: Settled, statistics: Statistics) -> None:
        touched = count_calls(true, settled, statistics)
        np.add.at(self.calls[:, 0], self._row_sequence, touched)
        np.add.at(self.calls[:, 1], self._row_sequence, true.ids.shape[1])
