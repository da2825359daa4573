"""``daop run`` end to end on a tiny model, and what it says to nonsense."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_model import EXPERTS, LAYERS, save_chat_model
from typer.testing import CliRunner, Result

from daop.cli.main import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def daop(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def figures(model: Path, *arguments: object) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    ran = daop("run", model, "--max-new-tokens", 6, "--json", "-", *arguments)
    assert ran.exit_code == 0, ran.output
    document: dict[str, Any] = json.loads(ran.stdout)  # and nothing else on standard output
    return document


def test_every_figure_is_there_and_adds_up(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    ran = daop("run", model, "--prompt", "Hello", "--ecr", 0.25, "--max-new-tokens", 6, "--json", target)
    assert ran.exit_code == 0, ran.output
    run = json.loads(target.read_text())
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"], "no temporary file is left"
    assert (run["policy"], run["ecr"]) == ("adaptive", 0.25)
    assert run["memory_bytes"].keys() >= {"experts", "non_experts", "kv_cache", "workspace", "peak"}
    assert run["bytes"].keys() >= {"demand", "useful", "late", "wasted"}
    assert run["tpot_ms"]["p50"] <= run["tpot_ms"]["p95"] <= run["tpot_ms"]["p99"]
    assert run["ttft_ms"] > 0
    assert run["tokens_per_second"] == pytest.approx(5 / run["seconds"]["decode"])
    assert 0 <= run["hit_rate"] <= 1
    assert all(value >= 0 for value in run["stall_ms"].values())
    assert [len(ids) for ids in run["token_ids"]] == [6]
    assert run["bytes"]["read"] > 0
    assert f"{EXPERTS * LAYERS // 4} of {EXPERTS * LAYERS} experts" in ran.stdout
    assert "tokens/s" in ran.stdout


def test_tokens_depend_neither_on_policy_nor_on_budget(model: Path) -> None:
    asked = ("--prompt", "Hello", "--prompt", "def f(x):")
    runs = [(1, "static"), (0, "on_demand"), (0.3, "lru"), (0.5, "speculative")]
    tokens = [figures(model, *asked, "--ecr", ecr, "--policy", name)["token_ids"] for ecr, name in runs]
    assert all(ids == tokens[0] for ids in tokens)


def test_batch_and_conversation(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["One", "Two", "Three"]}\n{"prompt": "A longer prompt"}\n{"question": "Q"}\n')
    alone = figures(model, "--prompts", file)
    assert len(alone["token_ids"]) == 5, "three turns, one prompt, one question"
    together = figures(model, "--prompts", file, "--batch", 2)
    order = [0, 3, 1, 2, 4]  # the first turn runs beside the second prompt, the later ones alone
    assert together["token_ids"] == [alone["token_ids"][index] for index in order]


def test_an_answer_is_part_of_the_next_turn(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["One", "Two"]}\n{"prompt": "unused"}\n')
    run = figures(model, "--prompts", file, "--limit", 1)
    assert run["tokens"]["prompt"] > len("One") + len("One\n") + len("\nTwo")


def test_the_chat_template_is_applied(tmp_path: Path) -> None:
    chat = save_chat_model(tmp_path, template=True)
    assert figures(chat, "--prompt", "Hi")["tokens"]["prompt"] == len("[user]Hi[assistant]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--prompt TEXT"),
        (("--prompt", "x", "--prompts", "y.txt"), "either"),
        (("--prompt", "x", "--limit", "1"), "--limit is for"),
        (("--prompts", "missing.txt"), "missing.txt: No such file"),
        (("--prompt", " "), "is empty"),
        (("--prompt", "x", "--ecr", "1.5"), "--ecr is 1.5"),
        (("--prompt", "x", "--ecr", "nan"), "--ecr is nan"),
        (("--prompt", "x", "--ecr", "1", "--fast-memory", "1G"), "not both"),
        (("--prompt", "x", "--fast-memory", "lots"), "--fast-memory is 'lots'"),
        (("--prompt", "x", "--policy", "best"), "unknown policy 'best'; known: .*lru"),
        (("--prompt", "x", "--policy", "nowhere:Best"), "PYTHONPATH"),
        (("--prompt", "x", "--policy", ":"), "cannot import policy"),
        (("--prompt", "x", "--policy", ".a:B"), "cannot import policy"),
        (("--prompt", "x", "--policy", "os:path"), "not a class derived from .*Policy"),
        (("--prompt", "x", "--policy", "os:getcwd"), "not a class derived from .*Policy"),
        (("--prompt", "x", "--trace", __file__), "--trace .* exists: give --force"),
        (("--prompt", "x", "--policy-option", "colour=red"), "no option colour"),
        (("--prompt", "x", "--policy", "bounded", "--tolerance", "-1"), "--tolerance is -1"),
        (("--prompt", "x", "--policy", "lru", "--tolerance", "0.1"), "no option tolerance"),
        (("--prompt", "x", "--device", "abacus"), "--device abacus"),
        (("--prompt", "x", "--dtype", "int3"), "--dtype int3"),
        (("--prompt", "x", "--json", "/no/such/folder/x.json"), "--json /no/such"),
        (("--prompt", "x", "--context", "8"), "give --context 65"),
        (("--prompt", "x", "--context", "9000", "--max-new-tokens", "8000"), "the model's is 512"),
        (("--prompt", "x", "--context", "900000000"), "does not fit.*Lower --context"),
    ],
)
def test_nonsense_is_one_paragraph_and_exit_code_2(
    model: Path, arguments: tuple[str, ...], words: str
) -> None:
    ran = daop("run", model, *arguments)
    assert ran.exit_code == 2, ran.output
    error = ran.stderr.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert "Traceback" not in ran.output
    assert re.search(words, error), error


def test_a_model_that_is_none(tmp_path: Path) -> None:
    for name in (tmp_path / "missing", tmp_path, ""):
        ran = daop("run", name, "--prompt", "x")
        assert ran.exit_code == 2, ran.output
        assert ran.stderr.startswith("error: ")


def test_debugging_shows_where_an_error_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAOP_DEBUG", "1")
    ran = daop("run", "no/such/place/here", "--prompt", "x")
    assert type(ran.exception).__name__ == "DaopError"


def test_ctrl_c_ends_with_130_and_leaves_no_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from daop.api import Runtime

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runtime, "generate", interrupted)
    ran = daop("run", model, "--prompt", "x", "--json", tmp_path / "figures.json")
    assert ran.exit_code == 130
    assert ran.stderr.strip() == "interrupted"
    assert not list(tmp_path.iterdir())
