"""``--device cuda`` of the commands that load one model after another: ``daop compare``, ``daop quality``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from cuda_runs import DEVICES, standin
from cuda_standin import StandIn
from typer.testing import CliRunner, Result

from daop.cli.main import app
from daop.runtime.cuda import machinery


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "daop"))
        folder: Path = importlib.import_module("chat_model").save_chat_model(tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "One two three"}\n{"prompt": "Another prompt"}\n')
    return path


@pytest.fixture(params=DEVICES)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """The stand-ins that were opened, if it is they that ``--device cuda`` finds."""
    opened: list[StandIn] = []

    def open_standin() -> StandIn:
        opened.append(standin(len(opened)))
        return opened[-1]

    if request.param == "standin":
        monkeypatch.setattr(machinery, "open_gpu", open_standin)
    return opened


def daop(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document(ran: Result, path: Path) -> Any:
    assert ran.exit_code == 0, ran.output
    return json.loads(path.read_text())


def test_a_measured_comparison(model: Path, prompts: Path, gpus: list[StandIn], tmp_path: Path) -> None:
    asked = ("--model", model, "--prompts", prompts, "--ecr", "0.5", "--repeats", 1, "--max-new-tokens", 6)
    ran = daop("compare", *asked, "--policies", "static,daop", "--device", "cuda", "--json", tmp_path / "j")
    found = document(ran, tmp_path / "j")
    assert found["subject"]["device"] == "cuda"
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == ["static", "daop"]
    for row in rows.values():
        assert row["device"] == "cuda"
        assert row["tokens"] == 2 * 6
        assert row["tokens_per_second"] > 0
        assert row["memory_bytes"]["host_pinned"] > 0, "this is of the device cuda alone"
    assert rows["daop"]["quality"]["approximated"]["value"] >= 0
    if gpus:  # float32 on one processor: the same tokens
        assert not any(row["differs"] for row in rows.values())
    for gpu in gpus:
        assert gpu.faults == []
        assert gpu.locked == {}, "host memory is unlocked before the next model comes"


def test_quality(model: Path, prompts: Path, gpus: list[StandIn], tmp_path: Path) -> None:
    asked = ("--prompts", prompts, "--max-new-tokens", 6, "--ecr", 0.5, "--policy", "deferral")
    found = document(
        daop("quality", model, *asked, "--device", "cuda", "--json", tmp_path / "j"), tmp_path / "j"
    )
    assert found["device"] == "cuda"
    assert found["mean_kl"]["value"] > 0
    assert found["tokens"] == 2 * 5
    assert len(gpus) in (0, 2)
    for gpu in gpus:
        assert gpu.faults == []


def test_a_device_needs_a_model(tmp_path: Path) -> None:
    ran = daop("compare", "--trace", tmp_path / "t.parquet", "--device", "cuda")
    assert ran.exit_code == 2
    assert "--device is for --model" in " ".join(ran.output.split())


def test_answers_that_differ_are_counted() -> None:
    from daop.measured_comparison import _differences

    runs: Any = {
        "daop": [{"all_token_ids": [[9], [9]]}],
        "static": [{"all_token_ids": [[1], [2]]}],
        "lru": [{"all_token_ids": [[1], [2]]}, {"all_token_ids": [[1], [3]]}],
    }
    assert _differences(runs) == {"daop": 0, "static": 0, "lru": 1}
