"""``daop.quality``: figures that can be worked out by hand, exact against exact, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_model import save_chat_model
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import daop
from daop.cli.main import app
from daop.core import DaopError, Phase
from daop.quality import Batch, Scored, compare, measure, summarise, teacher, windows

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under an old tree for a while. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def fixed(logits: torch.Tensor, calls: Any = None) -> Any:
    return lambda batch: Scored(logits=logits, calls=calls)


def test_the_figures_are_those_of_their_definitions() -> None:
    """Two words; the reference gives them 3:1 and 1:1, the candidate 1:1 and 1:3."""
    p, q = [[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75]]
    batch = Batch(tokens=((0, 0, 1),), prompt=1)
    both = [batch, Batch(tokens=((1, 0, 0),), prompt=1)]
    scored = [
        compare(
            both[i], Scored(logits=torch.tensor([[p[i]]]).log()), Scored(logits=torch.tensor([[q[i]]]).log())
        )
        for i in range(2)
    ]
    found = summarise([one for each in scored for one in each])
    kl = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)]
    assert (found.sequences, found.tokens) == (2, 2)
    assert found.mean_kl.value == pytest.approx(sum(kl) / 2)
    assert found.p99_kl.value == pytest.approx(np.percentile(kl, 99))
    assert found.perplexity_reference.value == pytest.approx((0.25 * 0.5) ** -0.5)
    assert found.perplexity.value == pytest.approx((0.5 * 0.25) ** -0.5)
    assert found.mean_kl.low == pytest.approx(min(kl))
    assert found.mean_kl.high == pytest.approx(max(kl))


def test_changed_tokens_and_calls_are_shares_with_intervals_by_sequence() -> None:
    rng = np.random.default_rng(0)
    reference = torch.from_numpy(rng.normal(size=(4, 50, 7))).float()
    other = reference.clone()
    other[1, :10] = -reference[1, :10]
    calls = np.asarray([[0, 100], [30, 100], [0, 100], [10, 100]])
    batch = Batch(tokens=tuple(tuple([1] * 53) for _ in range(4)), prompt=2)
    found = measure(fixed(reference), fixed(other, calls), [batch])
    assert found.changed_tokens.value == pytest.approx(10 / 200)
    assert found.approximated.value == pytest.approx(0.1)
    assert found.approximated.low is not None
    assert found.approximated.high is not None
    assert found.approximated.low < 0.1 < found.approximated.high <= 0.3


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0, 5))
def test_kl_is_not_negative_and_zero_only_without_a_difference(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(2, 5, 9, generator=generator)
    batch = Batch(tokens=((3,) * 7, (4,) * 7), prompt=1)
    other = reference + scale * torch.randn(2, 5, 9, generator=generator)
    assert measure(fixed(reference), fixed(reference + 0.5), [batch]).mean_kl.value == pytest.approx(
        0, abs=1e-12
    )
    assert measure(fixed(reference), fixed(other), [batch]).mean_kl.value >= (1e-6 if scale > 0.1 else -1e-12)


def test_one_sequence_has_no_interval() -> None:
    logits = torch.zeros(1, 3, 5)
    found = measure(fixed(logits), fixed(logits), [Batch(tokens=((1, 2, 3, 4, 0),), prompt=1)])
    assert found.perplexity.value == pytest.approx(5)
    assert found.mean_kl.low is found.mean_kl.high is found.p99_kl.low is None
    assert str(found.mean_kl) == "0"


def test_windows_do_not_overlap_and_leave_the_rest() -> None:
    cut = windows(list(range(25)), length=6, prompt=2, batch=3, limit=None)
    assert [len(one.tokens) for one in cut] == [3, 1]
    assert [row for one in cut for row in one.tokens] == [tuple(range(i, i + 6)) for i in range(0, 24, 6)]
    assert len(windows(list(range(25)), length=6, prompt=2, batch=3, limit=2)) == 1


def test_what_cannot_be_scored_is_said() -> None:
    with pytest.raises(DaopError, match="two tokens longer"):
        Batch(tokens=((1, 2, 3),), prompt=2)
    with pytest.raises(DaopError, match="one length"):
        Batch(tokens=((1, 2, 3, 4), (1, 2, 3)), prompt=1)
    batch = Batch(tokens=((0, 1, 2, 3),), prompt=1)
    with pytest.raises(DaopError, match="one vocabulary"):
        measure(fixed(torch.zeros(1, 2, 5)), fixed(torch.zeros(1, 2, 6)), [batch])
    with pytest.raises(DaopError, match="not finite"):
        measure(fixed(torch.zeros(1, 2, 5)), fixed(torch.full((1, 2, 5), torch.nan)), [batch])
    with pytest.raises(DaopError, match="nothing to score"):
        measure(fixed(torch.zeros(1)), fixed(torch.zeros(1)), [])


def test_the_scored_logits_are_those_of_decode_steps(model: Path) -> None:
    """One prefill pass, then one decode step a token; logits as of the whole text at once."""
    with daop.load(model, policy="lru", ecr=0.3) as runtime:
        tokens = runtime.encode(TEXT)[:20]
        batch = Batch(tokens=(tuple(tokens), tuple(reversed(tokens))), prompt=6)
        logits = teacher(runtime)(batch).logits
        statistics = runtime._executor.conductor.statistics
        layers = runtime.geometry.layers
        assert statistics.steps == layers * (1 + 13)
        row = list(Phase).index(Phase.DECODE)
        decode = sum(int(kind[row].sum()) for kind in (statistics.hits, statistics.misses, statistics.lates))
        assert 13 * layers * 2 <= decode <= 13 * layers * 4, "experts of two tokens, top-2"
        whole = runtime.model(torch.tensor(batch.tokens)).logits[:, 6:-1]
    assert logits.shape == whole.shape
    assert torch.allclose(logits, whole, atol=1e-5)


@pytest.mark.parametrize("policy", ["lru", "speculative", "adaptive", "on_demand"])
def test_exact_policies_differ_by_nothing(model: Path, policy: str) -> None:
    with (
        daop.load(model, policy="static", ecr=0.5) as one,
        daop.load(model, policy=policy, ecr=0.25) as other,
    ):
        batches = windows(one.encode(TEXT), length=24, prompt=8, batch=4, limit=8)
        found = measure(teacher(one), teacher(other), batches)
        assert found.mean_kl.value == found.p99_kl.value == found.changed_tokens.value == 0.0
        assert found.perplexity == found.perplexity_reference
        assert found.approximated.value == 0
        alone = measure(
            teacher(one), teacher(other), windows(one.encode(TEXT), length=24, prompt=8, batch=1, limit=8)
        )
    assert alone.perplexity.value == pytest.approx(found.perplexity.value, rel=1e-5)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quality", *map(str, arguments)])


def test_the_command_on_a_text_and_on_prompts(model: Path, tmp_path: Path) -> None:
    text, prompts, out = tmp_path / "text.txt", tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    text.write_text(TEXT)
    prompts.write_text('{"prompt": "One"}\n{"prompt": "Another one"}\n')
    asked = ("--window", 30, "--prefill", 10, "--batch", 2, "--policy", "lru", "--ecr", 0.3, "--json", out)
    ran = run(model, "--text", text, *asked, "--limit", 4)
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    assert (found["sequences"], found["tokens"], found["exact"]) == (4, 4 * 19, True)
    assert found["mean_kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert "KL, mean" in ran.output
    ran = run(model, "--prompts", prompts, "--max-new-tokens", 7, "--json", out)
    assert ran.exit_code == 0, ran.output
    assert json.loads(out.read_text())["tokens"] == 2 * 6


def test_another_model_is_judged_with_candidate(model: Path, tmp_path: Path) -> None:
    other = save_chat_model(tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    tensors["lm_head.weight"] += 0.05 * torch.randn_like(tensors["lm_head.weight"])
    save_file(tensors, weights, metadata={"format": "pt"})
    text, out = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text(TEXT)
    asked = ("--text", text, "--window", 30, "--limit", 2, "--prefill", 10, "--json", out)
    assert run(model, "--candidate", other, *asked).exit_code == 0
    assert json.loads(out.read_text())["mean_kl"]["value"] > 1e-3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "either --text FILE or --prompts"),
        (("--text", "none.txt"), "none.txt: there is no such file"),
        (("--text", "short.txt"), "fewer than one --window"),
        (("--text", "short.txt", "--window", 20, "--prefill", 19), "leaves nothing to score"),
        (("--text", "short.txt", "--policy", "magic"), "unknown policy"),
        (("--text", "short.txt", "--policy", "lru", "--tolerance", 0.1), "has no option tolerance"),
    ],
)
def test_bad_input(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Too short a text.")
    ran = run(model, *arguments)
    assert ran.exit_code == 2
    assert said in " ".join(ran.output.split())
