"""Approximate policies on a real executor, against plain implementations written from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny

from daop.api import load
from daop.core import DaopError, Geometry, Phase
from daop.quality import Batch, teacher
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.early import EarlyResults
from daop.runtime.input_correction import InputCorrection, fit
from daop.runtime.model import BuiltModel, build_model
from daop.runtime.policies.approximate import Approximate, Routing, Settled
from daop.runtime.policies.base import POLICIES, make_policy
from daop.runtime.policies.bounded import Bounded
from daop.runtime.policies.daop import Daop
from daop.runtime.profile import Profile
from daop.runtime.reference import compute_expert, read_expert
from daop.runtime.sequence_placement import RecentPlacement, SequencePlacement, swapped
from daop.runtime.statistics import Statistics

LAYERS, E, K, H = 3, 6, 3, 48  # of tiny_models
PROMPT = 7
OPTIONS: dict[str, dict[str, Any]] = {
    "daop": {"first": 0},
    "deferral": {"immediate": 1},
    "bounded": {"tolerance": 1.15, "calls": 2},
}
APPROXIMATE = sorted(name for name, policy in POLICIES.items() if not policy.exact)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("mixtral", path)
    return path


def rows(count: int, length: int = 20, seed: int = 3) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(2, 89, length).tolist()) for _ in range(count))


def correction() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return fit(rng.normal(size=(64, LAYERS, H)).astype(np.float32), [None] * LAYERS, rank=5)


def profile(model: Path) -> Profile:
    geometry = open_checkpoint(model).geometry
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.gumbel(size=(90, LAYERS, E)) + np.arange(E) * 0.3, axis=2)[:, :, :K]
    learnt = Profile.from_routing(geometry, ids, np.repeat([0, 1, 2], 30))
    return Profile(geometry=geometry, frequency=learnt.frequency, arrays=correction())


def scores(
    model: Path, policy: Approximate, sequences: tuple[tuple[int, ...], ...], ecr: float
) -> tuple[torch.Tensor, Any]:
    policy.profile = profile(model)
    with load(model, policy=policy, ecr=ecr) as runtime:
        found = teacher(runtime)(Batch(tokens=sequences, prompt=PROMPT))
        counts = runtime.statistics()["approximate"]
    assert found.calls is not None
    assert counts["approximated"] == found.calls[:, 0].sum()
    assert counts["calls"] == found.calls[:, 1].sum() == len(sequences) * 12 * LAYERS * K
    return found.logits, found.calls


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


class Everything(Approximate):
    """Starts all that the next router names, and defers the last choice: early and late calls at once."""

    weighs = True

    def start(self, geometry: Geometry, slots: int, *_: Any) -> list[int]:
        self.geometry = geometry
        self.placement = SequencePlacement(geometry, [], None)
        return []

    def asks(self, layer: int) -> bool:
        return layer < self.geometry.layers - 1

    def announce(self, layer: int, sequences: Any, forecast: Routing, scores: Any) -> Settled:
        self.named = forecast.ids
        return Settled(forecast, early=np.ones(forecast.ids.shape, dtype=np.bool_))

    def settle(self, layer: int, sequences: Any, routing: Routing, distances: Any) -> Settled:
        late = np.zeros(routing.ids.shape, dtype=np.bool_)
        late[:, -1] = layer < self.geometry.layers - 1
        if distances is None:
            return Settled(routing, late=late)
        named = (routing.ids[:, :, None] == self.named[:, None, :]).any(axis=2)
        return Settled(routing, early=named & ~late, late=late)


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


# -- policies by themselves ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(APPROXIMATE),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    slots=st.integers(0, 16),
)
def test_a_row_is_decided_by_itself(name: str, seed: int, count: int, slots: int) -> None:
    """The same answers for a row alone and among others, whatever those are."""
    rng = np.random.default_rng(seed)
    geometry = Geometry.uniform(2, 8, 3)
    chosen = rng.permutation(16)[:slots].tolist()

    def routing() -> Routing:
        logits = rng.normal(size=(count, 8)) * 2
        ids = np.argsort(-logits, axis=1)[:, :3].astype(np.int32)
        weights = np.take_along_axis(np.exp(logits), ids, axis=1)
        return Routing(ids, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))

    prompts = [rng.integers(0, 8, size=(5, 3)) for _ in range(count)]
    forecast, true = routing(), routing()
    ranks = rng.random((count, 8)).astype(np.float32)
    away = rng.random(count).astype(np.float32)

    def decide(which: list[int]) -> Settled:
        policy = make_policy(name, options=OPTIONS[name] | ({"tolerance": 0.5} if name == "bounded" else {}))
        assert isinstance(policy, Approximate)
        policy.geometry = geometry
        book: Any = SequencePlacement(geometry, chosen, None if name == "deferral" else 1.05)
        if isinstance(policy, Bounded):
            book, policy._usual = RecentPlacement(geometry, slots, None), {}
        policy.placement = policy.book = book  # type: ignore[attr-defined]
        for row in which:
            for layer in range(2):
                policy.placement.prompt(layer, prompts[row], np.full(5, row))
        for layer in range(2):
            settled = policy.settle(layer, which, part(true, which), away[which] if layer else None)
            if policy.asks(layer):
                policy.announce(layer, which, part(forecast, which), ranks[which])
            if not policy.asks(layer):
                return settled
        raise AssertionError

    def part(of: Routing, which: list[int]) -> Routing:
        return Routing(of.ids[which], of.weights[which])

    together = decide(list(range(count)))
    for row in range(count):
        alone = decide([row])
        assert np.array_equal(alone.routing.ids[0], together.routing.ids[row])
        assert np.allclose(alone.routing.weights[0], together.routing.weights[row])
        for mine, theirs in ((alone.early, together.early), (alone.late, together.late)):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or np.array_equal(mine[0], theirs[row])


def test_swaps_of_a_prompt_by_hand() -> None:
    resident = np.asarray([True, True, False, False, False, False])
    counts = np.asarray([4, 20, 3, 9, 4, 0])
    assert swapped(resident, counts, 1.05).tolist() == [False, True, False, True, False, False]
    assert swapped(resident, np.asarray([9, 20, 3, 9, 4, 0]), 1.05).tolist() == resident.tolist()


def test_degradation_keeps_the_first_and_the_sum_of_weights() -> None:
    policy = make_policy("daop", options={"first": 0})
    geometry = Geometry.uniform(2, 6, 2)
    assert isinstance(policy, Daop)
    policy.geometry = geometry
    policy.placement = policy.book = SequencePlacement(geometry, [6 + 4, 6 + 5], None)
    forecast = Routing(np.asarray([[1, 2]], dtype=np.int32), np.asarray([[0.3, 0.6]], dtype=np.float32))
    ranks = np.asarray([[0.1, 0.2, 0.4, 0.05, 0.05, 0.2]], dtype=np.float32)
    settled = policy.announce(0, [0], forecast, ranks)
    assert settled.routing.ids.tolist() == [[5, 2]]
    assert settled.routing.weights[0] == pytest.approx([0.3, 0.6])
    assert settled.early is not None
    assert settled.early.tolist() == [[False, True]]


# -- what cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("bounded", {"tolerance": -0.1}, "--tolerance is -0.1, but must be a relative distance of 0"),
        ("bounded", {"tolerance": float("nan")}, "--tolerance is nan"),
        ("bounded", {"tolerance": "much"}, "--tolerance is 'much'"),
        ("bounded", {"light": 1.5}, "light is 1.5, but must lie between 0 and 1"),
        ("bounded", {"calls": -1}, "calls is -1"),
        ("daop", {"first": 1.5}, "first is 1.5, but must be a whole number"),
        ("deferral", {"deferred": -2}, "deferred is -2"),
    ],
)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DaopError, match=said):
        make_policy(name, options=options)


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


def test_a_correction_of_another_model_is_refused(model: Path) -> None:
    known = profile(model)
    other = fit(np.ones((8, 3, 5), dtype=np.float32), [None] * 3)
    policy = make_policy("bounded", Profile(geometry=known.geometry, frequency=known.frequency, arrays=other))
    with pytest.raises(DaopError, match="inputs of 5 values, this model's have 48"):
        load(model, policy=policy, ecr=0.5)
    broken = {key: value for key, value in correction().items() if key != "input.0.up"}
    with pytest.raises(DaopError, match="layer 0 is incomplete"):
        InputCorrection(broken)


def test_the_correction_learns_what_is_linear() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(400, 8)).astype(np.float32)
    mix = rng.normal(size=(8, 2)) @ rng.normal(size=(2, 8))
    y = (x * 1.5 + x @ mix + 0.7).astype(np.float32)
    norms: Any = [np.ones(8, dtype=np.float32), np.full(8, 1.5, dtype=np.float32)]
    guess = InputCorrection(fit(np.stack([x, y], axis=1), norms, rank=2))(0, torch.from_numpy(x))
    assert float((guess - torch.from_numpy(y)).norm() / np.linalg.norm(y)) < 0.02
    plain = InputCorrection(fit(np.stack([x, y], axis=1), norms, rank=1))(0, torch.from_numpy(x))
    assert float((plain - torch.from_numpy(y)).norm() / np.linalg.norm(y)) > 0.02
