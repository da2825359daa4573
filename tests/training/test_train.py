"""Training, evaluation and drift, end to end on small made-up traffic, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from typer.testing import CliRunner

from daop.cli.main import app
from daop.core import DaopError, FloatArray, Geometry
from daop.predictors.base import NextLayer, State
from daop.predictors.data import Routing
from daop.predictors.history import Context
from daop.training.dataset import read_bounded
from daop.training.parquet import read_trace
from daop.training.report import evaluate_saved
from daop.training.split import split_by_sequence
from daop.training.trace import Trace, counts_of
from daop.training.train import Options, train
from daop.training.writer import write_trace

runner = CliRunner()


def quiet(_: str) -> None:
    pass


class Constant(NextLayer):
    """A person's own predictor: expert 0 always."""

    def fit(self, data: Routing) -> Self:
        self.geometry_ = data.geometry
        return self

    def probabilities(self, context: Context, horizon: int) -> FloatArray:
        scores = np.zeros((len(context.chosen), self.geometry_.experts[context.layer + horizon]), np.float32)
        scores[:, 0] = 1.0
        return scores

    def state(self) -> State:
        return State()

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        return self


def traffic(path: Path, *, sequences: int = 12, seed: int = 0, taste: int = 0, **change: Any) -> Path:
    """Tokens of a few kinds, each with its own experts; ``taste`` changes which."""
    rng = np.random.default_rng(seed)
    layers, experts, k, length = 3, 8, 2, 20
    n = sequences * length
    liked = np.random.default_rng(1000 + taste)
    favourite = np.argsort(liked.random((5, layers, experts)), axis=2)[:, :, :k]
    kind = rng.integers(5, size=n)
    ids = favourite[kind].astype(np.uint16)
    noisy = rng.random((n, layers)) < 0.15
    ids[noisy] = np.argsort(rng.random((n, layers, experts)), axis=2)[:, :, :k][noisy]
    columns: dict[str, Any] = {
        "geometry": Geometry.uniform(layers, experts, k),
        "sequence": np.repeat(np.arange(sequences, dtype=np.int32), length),
        "position": np.tile(np.arange(length, dtype=np.int32), sequences),
        "phase": np.ones(n, np.uint8),
        "ids": ids,
        "token_ids": kind.astype(np.int32),
    }
    write_trace(Trace(**{**columns, **change}), path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    trace = traffic(folder / "t.parquet")
    document = train([trace], folder / "p", Options(), progress=quiet)
    return trace, folder / "p", document


@pytest.mark.slow
def test_everything_is_trained_saved_and_ranked(trained: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, document = trained
    found = document["predictors"]
    assert {"popularity", "transition", "token_table", "mlp", "lightgbm", "recency", "lightgbm_reuse"} <= set(
        found
    )
    assert "gate_lookahead" not in found  # no hidden states in this trace
    assert found["transition"]["recall_at_k"] > found["popularity"]["recall_at_k"] + 0.1
    low, high = found["transition"]["recall_at_k_interval"]
    assert low <= found["transition"]["recall_at_k"] <= high
    assert found["recency"]["pools"]["0.25"]["optimum"] >= found["recency"]["hit_rate"]
    on_disk = json.loads((out / "leaderboard.json").read_text())
    assert on_disk["predictors"]["mlp"]["recall_at_k"] == found["mlp"]["recall_at_k"]
    card = json.loads((out / "mlp" / "card.json").read_text())
    assert card["data"]["held_out_sequences"] == 2
    assert card["cost"]["cpu_seconds"] > 0
    assert {"python", "numpy", "torch"} <= set(card["versions"])
    assert json.loads((out / "split.json").read_text())["test_sequences"]
    assert not [p for p in out.rglob("*") if p.suffix in (".pkl", ".pickle", ".joblib", ".tmp")]


@pytest.mark.slow
def test_evaluating_on_the_trace_of_training_uses_the_held_out_side(
    trained: tuple[Path, Path, dict[str, Any]],
) -> None:
    trace, out, document = trained
    again = evaluate_saved(str(out), trace, only="transition", max_tokens=10_000, progress=quiet)
    report = again["predictors"]["transition"]
    assert report["recall_at_k"] == pytest.approx(document["predictors"]["transition"]["recall_at_k"])
    assert again["drift"]["transition"]["figures"]["recall_at_k"] == pytest.approx(0.0)


@pytest.mark.slow
def test_drift_is_seen_and_an_update_mends_it(
    trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, out, _ = trained
    other = traffic(tmp_path / "other.parquet", taste=1, seed=5)
    result = runner.invoke(
        app,
        [
            "evaluate",
            str(out),
            "--trace",
            str(other),
            "--predictor",
            "transition",
            "--json",
            str(tmp_path / "e.json"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "since training: recall_at_k -" in result.output
    drift = json.loads((tmp_path / "e.json").read_text())["drift"]["transition"]
    assert drift["figures"]["recall_at_k"] < -0.1
    assert len(drift["per_layer"]["recall_at_k"]) == 3
    for name in ("transition", "mlp"):
        arguments = [
            "train",
            str(other),
            "-o",
            str(tmp_path / "new"),
            "--update",
            str(out),
            "--predictor",
            name,
        ]
        assert runner.invoke(app, arguments).exit_code == 0
        fresh = json.loads((tmp_path / "new" / "leaderboard.json").read_text())["predictors"][name]
        old = evaluate_saved(str(out), other, only=name, max_tokens=10_000, progress=quiet)["predictors"][
            name
        ]
        assert fresh["recall_at_k"] > old["recall_at_k"] + 0.1
        assert json.loads((tmp_path / "new" / name / "card.json").read_text())["updated"]


def test_a_persons_own_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    name = "test_train:Constant"
    trace = traffic(tmp_path / "t.parquet")
    result = runner.invoke(app, ["train", str(trace), "-o", str(tmp_path / "p"), "--predictor", name])
    assert result.exit_code == 0, result.output
    assert "test_train:Constant" in result.output
    plain = ["evaluate", str(tmp_path / "p"), "--trace", str(trace)]
    refused = runner.invoke(app, plain)
    assert refused.exit_code == 2
    assert "code outside daop" in refused.output
    assert runner.invoke(app, [*plain, "--predictor", name]).exit_code == 0


def test_a_name_is_fitted_and_scored_at_once(tmp_path: Path) -> None:
    trace = traffic(tmp_path / "t.parquet")
    for nowhere in ("no/such", str(trace)):
        missing = runner.invoke(app, ["evaluate", nowhere, "--trace", str(trace)])
        assert missing.exit_code == 2
        assert f"there is no folder {nowhere}" in missing.output
    arguments = ["evaluate", "transition", "--trace", str(trace), "--json", str(tmp_path / "e.json")]
    assert runner.invoke(app, arguments).exit_code == 0
    report = json.loads((tmp_path / "e.json").read_text())["predictors"]["transition"]
    assert 0 < report["recall_at_k"] < 1
    other = traffic(tmp_path / "o.parquet", seed=1)
    assert runner.invoke(app, [*arguments, "--train-on", str(other)]).exit_code == 0


def test_copies_of_the_scored_sequences_are_left_out_of_fitting(tmp_path: Path) -> None:
    trace = traffic(tmp_path / "t.parquet")
    part = read_trace(trace).select([0, 1, 2])
    write_trace(part, tmp_path / "part.parquet")
    said: list[str] = []
    evaluate_saved(
        "popularity", tmp_path / "part.parquet", train_on=trace, max_tokens=1000, progress=said.append
    )
    assert any("3 sequences" in line and "left out" in line for line in said)


def test_counts_train_what_they_can(tmp_path: Path) -> None:
    trace = read_trace(traffic(tmp_path / "t.parquet"))
    write_trace(counts_of(trace), tmp_path / "c.parquet")
    document = train([tmp_path / "c.parquet"], tmp_path / "p", Options(), progress=quiet)
    assert set(document["predictors"]) == {"popularity", "frequency"}
    with pytest.raises(DaopError, match="single tokens"):
        train([tmp_path / "c.parquet"], tmp_path / "q", Options(predictor="mlp"), progress=quiet)
    assert not (tmp_path / "q").exists()


def test_several_traces_are_one(tmp_path: Path) -> None:
    paths = [traffic(tmp_path / f"{i}.parquet", seed=i) for i in range(2)]
    document = train(paths, tmp_path / "p", Options(predictor="popularity"), progress=quiet)
    assert document["data"]["sequences"] == 24


def test_memory_is_bounded_by_sampling_and_it_says_so(tmp_path: Path) -> None:
    trace = traffic(tmp_path / "t.parquet")
    out = str(tmp_path / "p")
    arguments = ["train", str(trace), "-o", out, "--predictor", "popularity", "--max-tokens", "60"]
    result = runner.invoke(app, arguments)
    assert "3 of 12 sequences, drawn at random" in " ".join(result.output.split())
    part = read_bounded(trace, 100)
    assert isinstance(part, Trace)
    assert 0 < len(part) <= 100
    assert len(part) == 20 * len(part.grouped().sequences)


def test_two_tokens_in_one_place_are_refused(tmp_path: Path) -> None:
    trace = traffic(tmp_path / "t.parquet", position=np.zeros(240, dtype=np.int32))
    with pytest.raises(DaopError, match="position 0 of sequence 0"):
        train([trace], tmp_path / "p", Options(predictor="popularity"), progress=quiet)


def test_bad_input_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    trace = traffic(tmp_path / "t.parquet")
    single = traffic(tmp_path / "single.parquet", sequences=1)
    other = tmp_path / "geometry.parquet"
    rng = np.random.default_rng(0)
    write_trace(
        Trace(
            geometry=Geometry.uniform(2, 8, 2),
            sequence=np.repeat(np.arange(4, dtype=np.int32), 5),
            position=np.tile(np.arange(5, dtype=np.int32), 4),
            phase=np.ones(20, np.uint8),
            ids=np.argsort(rng.random((20, 2, 8)), axis=2)[:, :, :2].astype(np.uint16),
        ),
        other,
    )
    cases: list[tuple[list[str], str]] = [
        (["train", str(single)], "at least 2 different sequences"),
        (["train", str(tmp_path / "none.parquet")], "no trace at"),
        (["train", str(trace), "--predictor", "magic"], "unknown predictor 'magic'"),
        (["train", str(trace), "--predictor", "gate_lookahead"], "needs hidden states"),
        (["train", str(trace), "--predictor", "os:getcwd"], "not a class derived from daop.predictors"),
        (["train", str(trace), "--target", "sideways"], "--target"),
        (["train", str(trace), "--predictor", "mlp", "--target", "reuse"], "drop --target"),
        (["train", str(trace), "--test-share", "0"], "--test-share"),
        (["train", str(trace), str(other)], "MoE layers"),
        (["train", str(trace), "--update", str(tmp_path / "nowhere")], "train them first"),
    ]
    for arguments, message in cases:
        result = runner.invoke(app, [*arguments, "-o", str(tmp_path / "out")])
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.output.replace("\n", " "), (arguments, result.output)
        assert not (tmp_path / "out").exists(), arguments
    train([trace], tmp_path / "p", Options(predictor="popularity"), progress=quiet)
    result = runner.invoke(app, ["evaluate", str(tmp_path / "p"), "--trace", str(other)])
    assert result.exit_code == 2
    assert "has 3 MoE layers" in result.output.replace("\n", " ")
    result = runner.invoke(
        app, ["evaluate", str(tmp_path / "p"), "--trace", str(trace), "--predictor", "mlp"]
    )
    assert result.exit_code == 2


def test_trace_commands(tmp_path: Path) -> None:
    source = Path(__file__).parent / "data" / "big_moe_on_edge.csv"
    target = tmp_path / "e.parquet"
    arguments = ["trace", "import", str(source), "-o", str(target), "--format", "big-moe-on-edge"]
    assert runner.invoke(app, arguments).exit_code == 0
    again = runner.invoke(app, arguments)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert runner.invoke(app, [*arguments, "--force", "--expert-bytes", "77"]).exit_code == 0
    assert read_trace(target).geometry.expert_bytes == (77, 77, 77)
    unknown = runner.invoke(app, [*arguments[:-1], "csv", "--force"])
    assert unknown.exit_code == 2
    assert "sglang-recorder" in unknown.output
    shown = runner.invoke(app, ["trace", "info", str(target), "--json", str(tmp_path / "i.json")])
    assert shown.exit_code == 0
    document = json.loads((tmp_path / "i.json").read_text())
    assert document["tokens"] == 5
    assert document["recorded_hit_rate"] == pytest.approx(0.5, abs=0.5)
    assert sum(row["share"] for row in document["reuse_distance"]) == pytest.approx(1.0)
    listed = runner.invoke(app, ["trace", "formats"])
    assert "gpt-oss-npz" in listed.output


def test_split_is_the_same_in_training_and_by_hand(tmp_path: Path) -> None:
    trace = traffic(tmp_path / "t.parquet")
    train([trace], tmp_path / "p", Options(predictor="popularity", seed=3), progress=quiet)
    held_out = json.loads((tmp_path / "p" / "split.json").read_text())["test_sequences"]
    assert held_out == split_by_sequence(read_trace(trace), seed=3).test.tolist()
