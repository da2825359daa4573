"""What makes the demo's model: the experts used in training, batches, checkpoints, text extraction."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=61, hidden_size=16, moe_intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip


def streams() -> list[np.ndarray[Any, Any]]:
    """Two "domains" with no token in common."""
    rng = np.random.default_rng(0)
    return [rng.integers(low, low + 30, 2000).astype(np.uint16) for low in (0, 30)]


def recipe(train: Any, folder: Path, tokens: int) -> Any:
    return train.Recipe(
        minutes=None,
        tokens=tokens,
        checkpoint=folder / "checkpoint.safetensors",
        start=folder / "start.safetensors",
        workers=1,
        sequence=((0.0, 16),),
    )


def test_sorted_experts_equal_transformers(scripts: Any) -> None:
    train = scripts("demo_train")
    torch.manual_seed(0)
    model = train.build(config())
    ids = torch.randint(61, (3, 11))
    with torch.no_grad():
        ours = model(ids).logits
        model.set_experts_implementation("eager")
        torch.testing.assert_close(ours, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_batches_take_one_domain_per_row_and_depend_on_the_step_alone(scripts: Any, tmp_path: Path) -> None:
    train = scripts("demo_train")
    setting = recipe(train, tmp_path, 1000)
    first, again = (train.batch(streams(), setting, 7, 16, 0) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (2, 17)
    assert first[0].max() < 30 <= first[1].min()
    assert not torch.equal(first, train.batch(streams(), setting, 8, 16, 0))


def test_training_starts_from_bigrams_learns_and_resumes(scripts: Any, tmp_path: Path) -> None:
    train, start = scripts("demo_train"), scripts("demo_start")
    start.fit(streams(), 61, 16, tmp_path / "start.safetensors", batches=100)
    train.train(config(), streams(), recipe(train, tmp_path, 320))
    model = train.build(config())
    checkpoint = tmp_path / "checkpoint.safetensors"
    assert train.load_progress(checkpoint, model)["steps"] == 10
    ids = train.batch(streams(), recipe(train, tmp_path, 320), 99, 16, 0)
    loss, _, share = train.Loss(model)(ids)
    assert loss.item() < np.log(61) - 0.4  # the domains alone are worth log 2
    assert share.shape == (2, 8)
    train.train(config(), streams(), recipe(train, tmp_path, 640))
    assert train.load_progress(checkpoint, model)["steps"] == 20


def test_text_is_extracted(scripts: Any) -> None:
    corpus = scripts("demo_corpus")
    page = ".TH LS 1\n.SH BEZEICHNUNG\nls \\- \\fBVerzeichnis\\fP\n.PP\nText.\n.SH ÜBERSETZUNG\nVon X\n"
    assert corpus.manual_page(page).split() == ["BEZEICHNUNG", "ls", "-", "Verzeichnis", "Text."]
    assert corpus.pod("=head1 NAME\n\nC<print> it\n") == "NAME\n\nprint it\n"
    assert corpus.web_page("<p>a\nb</p><script>x</script><pre>c\n d</pre>").split("\n")[1:2] == ["a b"]
    assert corpus.code("// Copyright X\n// more\n\nint x;\n") == "int x;\n"


def test_no_file_is_in_both_splits(scripts: Any) -> None:
    corpus = scripts("demo_corpus")
    assert {source.reader for source in corpus.SOURCES} <= corpus.READERS.keys()
    assert len(corpus.DOMAINS) == 8
    document = corpus.Document(domain="c", source="p", path="a/b.c", licence="MIT", text="x")
    twin = corpus.Document(domain="c", source="p", path="a/b.c", licence="MIT", text="y")
    assert document.heldout == twin.heldout
    others = [
        corpus.Document(domain="c", source="p", path=f"{n}", licence="", text="").heldout for n in range(2000)
    ]
    assert 0.03 < np.mean(others) < 0.1
