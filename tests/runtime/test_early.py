"""Approximate policies on a real executor, against plain implementations written from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from early_definition import Plain
from early_runs import (
    APPROXIMATE,
    OPTIONS,
    PROMPT,
    E,
    Everything,
    H,
    K,
    rows,
    scores,
)
from tiny_models import save_tiny

from daop.api import load
from daop.core import DaopError, Geometry, Phase
from daop.quality import Batch, teacher
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.early import EarlyResults
from daop.runtime.model import build_model
from daop.runtime.policies.approximate import Routing
from daop.runtime.policies.base import make_policy
from daop.runtime.policies.bounded import Bounded
from daop.runtime.policies.daop import Daop
from daop.runtime.reference import compute_expert, read_expert
from daop.runtime.sequence_placement import RecentPlacement, SequencePlacement
from daop.runtime.statistics import Statistics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("mixtral", path)
    return path


@pytest.mark.parametrize("ecr", [0.0, 0.4, 0.7])
@pytest.mark.parametrize("name", APPROXIMATE)
def test_the_output_is_that_of_the_definition(model: Path, name: str, ecr: float) -> None:
    """Side by side in the executor, one by one in the plain one; and not the exact output."""
    make: Callable[[], Any] = lambda: make_policy(name, options=OPTIONS[name])  # noqa: E731
    sequences = rows(3)
    found, calls = scores(model, make(), sequences, ecr)
    plain = Plain(model, make(), ecr)
    wanted = torch.stack([plain.run(tokens) for tokens in sequences])
    assert torch.allclose(found, wanted, atol=2e-4), (found - wanted).abs().max()
    with load(model, policy="static", ecr=ecr) as runtime:
        exact = teacher(runtime)(Batch(tokens=sequences, prompt=PROMPT)).logits
    assert (found - exact).abs().max() > 1e-2
    assert (calls[:, 0] > 0).all()


@pytest.mark.parametrize("name", APPROXIMATE)
def test_a_request_gives_the_same_alone_and_in_a_batch(model: Path, name: str) -> None:
    sequences = rows(5, seed=8)
    together, calls = scores(model, make_policy(name, options=OPTIONS[name]), sequences, 0.5)  # type: ignore[arg-type]
    for index, tokens in enumerate(sequences):
        alone, own = scores(model, make_policy(name, options=OPTIONS[name]), (tokens,), 0.5)  # type: ignore[arg-type]
        assert torch.allclose(alone[0], together[index], atol=1e-5)
        assert own[0].tolist() == calls[index].tolist()


@pytest.mark.parametrize("name", APPROXIMATE)
def test_answers_depend_neither_on_padding_nor_on_earlier_requests(model: Path, name: str) -> None:
    prompts = [list(row[:n]) for row, n in zip(rows(3, seed=9), (12, 5, 9), strict=True)]
    with load(model, policy=name, policy_options=OPTIONS[name], ecr=0.5) as runtime:
        one = [runtime.generate([prompt], 8)[0].token_ids for prompt in prompts]
        again = [runtime.generate([prompt], 8)[0].token_ids for prompt in reversed(prompts)]
        together = [answer.token_ids for answer in runtime.generate(prompts, 8)]
    assert one == again[::-1] == together


def test_tolerance_zero_is_exact_bit_for_bit(model: Path) -> None:
    batch = Batch(tokens=rows(3), prompt=PROMPT)
    with load(model, policy="static", ecr=0.4) as runtime:
        exact = teacher(runtime)(batch).logits
    with load(model, policy="bounded", policy_options={"tolerance": 0}, ecr=0.4) as runtime:
        scored = teacher(runtime)(batch)
        assert runtime.statistics()["approximate"]["approximated"] == 0
    assert torch.equal(scored.logits, exact)


def test_a_larger_tolerance_approximates_more(model: Path) -> None:
    sequences, shares = rows(3), []
    for tolerance in (0.0, 0.9, 1.0, 1.2, 5.0):
        _, calls = scores(model, make_policy("bounded", options={"tolerance": tolerance}), sequences, 0.4)  # type: ignore[arg-type]
        shares.append(calls[:, 0].sum() / calls[:, 1].sum())
    assert shares == sorted(shares)
    assert shares[0] == 0 < shares[-1]


def test_heavy_calls_stay_exact(model: Path) -> None:
    """``light``: no call whose share of the router weight is above it."""
    policy = make_policy("bounded", options={"tolerance": 9.0, "calls": 3, "light": 0.2})
    geometry = Geometry.uniform(2, E, K)
    assert isinstance(policy, Bounded)
    policy.geometry, policy._usual = geometry, {}
    policy.placement = policy.book = RecentPlacement(geometry, 0, None)
    routing = Routing(
        np.asarray([[0, 1, 2]], dtype=np.int32), np.asarray([[0.7, 0.2, 0.1]], dtype=np.float32)
    )
    policy.announce(0, [0], routing, None)
    settled = policy.settle(1, [0], routing, np.zeros(1, dtype=np.float32))
    assert settled.early is not None
    assert settled.early.tolist() == [[False, True, True]]


def test_early_results_computed_apart_give_the_same(model: Path) -> None:
    """What an executor with a processor beside its device does, as the module's docstring tells it."""
    tokens = rows(3)
    logits, _ = scores(model, Everything(), tokens, 0.5)

    checkpoint = open_checkpoint(model)
    policy = Everything()
    policy.start(checkpoint.geometry, 0)
    statistics = Statistics(checkpoint.geometry)
    started: dict[tuple[int, int], torch.Tensor] = {}

    def one(layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        views = checkpoint.layouts[layer].views(read_expert(checkpoint, layer * E + expert))
        return compute_expert(built.forms[layer], views, x[None])[0].float()

    def experts(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        decided = early.enter(layer, hidden, ids, weights, statistics, apart=True)
        total = torch.zeros(len(decided.hidden), H)
        for row, (x, chosen, shares) in enumerate(
            zip(decided.hidden, decided.ids, decided.weights, strict=True)
        ):
            for expert, share in zip(chosen.tolist(), shares.tolist(), strict=True):
                if expert < E:
                    total[row] += share * one(layer, expert, x)
        if decided.early is not None:
            for row, k in np.argwhere(decided.early).tolist():
                expert = int(decided.routing[0][row, k])
                total[row] += float(decided.routing[1][row, k]) * started[row, expert]
        out = early.leave(decided, total)
        started.clear()
        if (calls := early.look_ahead(layer, hidden)) is not None:
            for row, k in np.argwhere(calls.calls).tolist():
                expert = int(calls.routing.ids[row, k])
                started[row, expert] = one(calls.layer, expert, calls.input[row])
        return out

    built = build_model(checkpoint, experts)
    early = EarlyResults(policy, built, checkpoint.geometry)
    with torch.inference_mode():
        early.begin(Phase.PREFILL, 3 * PROMPT, 3, True, None)
        ids = torch.tensor(tokens)
        out = built.model(ids[:, :PROMPT], use_cache=True)
        for at in range(PROMPT, ids.shape[1] - 1):
            early.begin(Phase.DECODE, 3, 3, False, None)
            out = built.model(ids[:, at : at + 1], cache=out.cache, use_cache=True)
            assert torch.allclose(out.logits[:, 0], logits[:, at - PROMPT], atol=2e-4)
    assert statistics.approximate["early"] > 0 < statistics.approximate["late"]


def test_a_family_whose_router_does_not_tell_is_refused(tmp_path: Path) -> None:
    save_tiny("dbrx", tmp_path)
    with (
        load(tmp_path, policy="bounded", ecr=0.5) as runtime,
        pytest.raises(DaopError, match="does not tell ids"),
    ):
        runtime.generate([[5, 6, 7]], 3)
    with load(tmp_path, policy="deferral", ecr=0.5) as runtime:
        assert len(runtime.generate([[5, 6, 7]], 3)[0].token_ids) == 3


def test_a_family_that_weighs_inputs_is_refused(tmp_path: Path) -> None:
    save_tiny("llama4_text", tmp_path)
    with pytest.raises(DaopError, match="weighs inputs"):
        load(tmp_path, policy="bounded", ecr=0.5)


class Doubling:
    """Routers that give twice the weights that the model used."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def router_input(self, layer: int) -> torch.Tensor | None:
        return None

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.tensor([[1, 0]])
        return ids, torch.tensor([[0.3, 0.7]]) * self.factor, torch.full((1, E), 1 / E)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_router_that_answers_otherwise_than_the_model_is_refused(factor: float) -> None:
    geometry = Geometry.uniform(3, E, 2)
    policy = Daop(first=0)
    policy.geometry = geometry
    policy.placement = policy.book = SequencePlacement(geometry, [], 1.05)
    early = EarlyResults(policy, Doubling(factor), geometry)
    early.begin(Phase.DECODE, 1, 1, True, None)
    chosen = (torch.zeros(1, H), torch.tensor([[0, 1]]), torch.tensor([[0.7, 0.3]]))
    early.enter(0, *chosen, Statistics(geometry))
    if factor == 1.0:
        early.enter(1, *chosen, Statistics(geometry))
        return
    with pytest.raises(DaopError, match="weighs its experts otherwise than its routers say"):
        early.enter(1, *chosen, Statistics(geometry))
