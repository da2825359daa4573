"""Quality beside speed in ``daop compare``; ``--exact``; what ``daop run`` says of an approximate policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_model import save_chat_model
from typer.testing import CliRunner, Result

from daop.cli.main import app


def daop(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(ran: Result) -> str:
    return " ".join(ran.output.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "One two three"}\n{"prompt": "Another prompt"}\n')
    return path


@pytest.fixture(scope="module")
def traces(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With and without distances."""
    folder = tmp_path_factory.mktemp("traces")
    found = {}
    for name, extra in (("plain", ()), ("distances", ("--distances",))):
        found[name] = folder / f"{name}.parquet"
        asked = ("--prompts", prompts, "-o", found[name], "--max-new-tokens", 6, *extra)
        assert daop("trace", "capture", model, *asked).exit_code == 0
    return found


def test_a_simulated_comparison_marks_and_measures_what_is_not_exact(
    model: Path, prompts: Path, traces: dict[str, Path], tmp_path: Path
) -> None:
    asked = ("--trace", traces["distances"], "--ecr", "0.5", "--policies", "lru,deferral,bounded")
    size = ("--expert-bytes", "1MB", "--max-new-tokens", 6)
    ran = daop(
        "compare", *asked, *size, "--quality-model", model, "--prompts", prompts, "--json", tmp_path / "j"
    )
    assert ran.exit_code == 0, ran.output
    assert "deferral ~" in ran.output
    assert "lru ~" not in ran.output
    assert "approximated expert calls" in said(ran)
    rows = {row["policy"]: row for row in json.loads((tmp_path / "j").read_text())["rows"]}
    assert rows["deferral"]["quality"]["mean_kl"]["value"] > 0
    assert rows["deferral"]["quality"]["tokens"] == 2 * 5
    assert "quality" not in rows["lru"]
    without = daop("compare", *asked, *size)
    assert without.exit_code == 0, without.output
    assert "deferral ~" in without.output


def test_a_measured_comparison_does_so_too(model: Path, prompts: Path, tmp_path: Path) -> None:
    asked = ("--model", model, "--prompts", prompts, "--ecr", "0.5", "--repeats", 1, "--max-new-tokens", 6)
    ran = daop("compare", *asked, "--policies", "static,deferral", "--json", tmp_path / "j")
    assert ran.exit_code == 0, ran.output
    assert "deferral ~" in ran.output
    rows = {row["policy"]: row for row in json.loads((tmp_path / "j").read_text())["rows"]}
    assert rows["deferral"]["quality"]["approximated"]["value"] > 0
    assert "quality" not in rows["static"]


def test_bad_input(model: Path, prompts: Path, traces: dict[str, Path]) -> None:
    size = ("--expert-bytes", "1MB")
    ran = daop("compare", "--trace", traces["plain"], *size, "--policies", "bounded")
    assert ran.exit_code == 2
    assert "it has no distances; record it with `daop trace capture --distances`" in said(ran)
    for command in (
        ("compare", "--trace", traces["plain"], *size, "--policies", "lru,daop", "--exact"),
        ("run", model, "--prompt", "Hi", "--policy", "daop", "--exact"),
    ):
        ran = daop(*command)
        assert ran.exit_code == 2
        assert "--exact forbids daop, whose output is approximate" in said(ran)
    ran = daop("quality", model, "--prompts", prompts, "--policy", "bounded", "--tolerance", -0.5)
    assert ran.exit_code == 2
    assert "--tolerance is -0.5" in said(ran)
    ran = daop("compare", "--trace", traces["plain"], *size, "--quality-model", model)
    assert ran.exit_code == 2
    assert "needs --prompts" in said(ran)
    ran = daop(
        *("trace", "capture", model, "--prompts", prompts, "-o", traces["plain"].with_name("n.parquet")),
        *("--profile", traces["plain"].parent),
    )
    assert ran.exit_code == 2
    assert "--profile is for --distances" in said(ran)


def test_run_says_that_an_output_is_approximate(model: Path) -> None:
    asked = ("run", model, "--prompt", "Hello", "--max-new-tokens", 3, "--ecr", 0.5, "--policy")
    assert "--policy daop: the output is approximate" in said(daop(*asked, "daop"))
    exact = daop(*asked, "lru", "--exact")
    assert exact.exit_code == 0
    assert "approximate" not in said(exact)


def test_training_on_features_teaches_the_input_correction(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    from daop.runtime.checkpoint import open_checkpoint
    from daop.runtime.input_correction import InputCorrection
    from daop.runtime.profile import Profile

    trace = tmp_path / "t.parquet"
    asked = ("--prompts", prompts, "-o", trace, "--max-new-tokens", 12, "--features")
    assert daop("trace", "capture", model, *asked).exit_code == 0
    ran = daop("train", trace, "-o", tmp_path / "learnt", "--predictor", "popularity", "--test-share", 0.5)
    assert ran.exit_code == 0, ran.output
    profile = Profile.load(tmp_path / "learnt", open_checkpoint(model).geometry)
    assert InputCorrection.of(profile, 32) is not None
