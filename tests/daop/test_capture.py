"""Recording a real run: every token x layer x choice of real tokens, at any batch size, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_model import save_chat_model
from typer.testing import CliRunner

from daop.api import load
from daop.cli.main import app
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.model import build_model
from daop.runtime.reference import reference_experts
from daop.training.parquet import read_trace
from daop.training.trace import ABSENT, DECODE, Trace

PREFILL = 1 - DECODE

PROMPTS = [[40, 41, 42, 43, 44, 45], [50, 51], [60, 61, 62, 63]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def record(model: Path, path: Path, batch: int) -> tuple[Trace, list[list[int]]]:
    answers = []
    with load(model, ecr=0.5, trace=path, trace_token_ids=True) as runtime:
        for start in range(0, len(PROMPTS), batch):
            answers += runtime.generate(PROMPTS[start : start + batch], 7)
    return read_trace(path).grouped(), [answer.token_ids for answer in answers]


def test_every_choice_is_there_whatever_the_batch(model: Path, tmp_path: Path) -> None:
    alone, answers = record(model, tmp_path / "one.parquet", 1)
    together, same = record(model, tmp_path / "three.parquet", 3)
    assert answers == same
    for trace in (alone, together):
        assert not (trace.ids == ABSENT).any()
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
            rows = trace.sequence == number
            fed = [*prompt, *answer[:-1]]  # the last token is never run through the model
            assert trace.token_ids is not None
            assert trace.token_ids[rows].tolist() == fed
            assert trace.position[rows].tolist() == list(range(len(fed)))
            assert trace.phase[rows].tolist() == [PREFILL] * len(prompt) + [DECODE] * (len(answer) - 1)
    assert (np.sort(alone.ids, axis=2) == np.sort(together.ids, axis=2)).all()
    assert alone.weights is not None
    assert together.weights is not None
    assert np.allclose(np.sort(alone.weights, axis=2), np.sort(together.weights, axis=2), atol=1e-2)
    assert (alone.weights > 0).all()


def test_the_choices_are_the_routers(model: Path, tmp_path: Path) -> None:
    trace, _ = record(model, tmp_path / "t.parquet", 3)
    checkpoint = open_checkpoint(model)
    seen: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []

    def note(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append(np.sort(ids.numpy(), axis=1))
        return reference_experts(checkpoint, built.forms)(layer, hidden, ids, weights)

    built = build_model(checkpoint, note)
    with torch.inference_mode():
        built.model(torch.tensor([PROMPTS[0]]))
    rows = (trace.sequence == 0) & (trace.phase == PREFILL)
    assert (np.sort(trace.ids[rows], axis=2) == np.stack(seen, axis=1)).all()


def test_a_row_that_ended_is_not_recorded_while_it_waits(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with load(model, ecr=1.0, trace=path, trace_token_ids=True) as runtime:
        first = runtime.generate([PROMPTS[0]], 6)[0].token_ids
        runtime.model.generation_config.eos_token_id = first[2]
    with load(model, ecr=1.0, trace=path.with_name("u.parquet"), trace_token_ids=True) as runtime:
        runtime.model.generation_config.eos_token_id = first[2]
        answers = runtime.generate(PROMPTS, 12)
    trace = read_trace(path.with_name("u.parquet")).grouped()
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert int((trace.sequence == number).sum()) == len(prompt) + len(answer.token_ids) - 1


def test_a_run_that_breaks_off_leaves_no_finished_trace(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"

    def broken() -> None:
        with load(model, ecr=0.5, trace=path) as runtime:
            runtime.generate([PROMPTS[0]], 5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert not path.exists()
    assert len(read_trace(path)) == len(PROMPTS[0]) + 4  # what was complete still opens
    assert not read_trace(path).complete


def test_command_line(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("hello", "a longer one")))
    path = tmp_path / "t.parquet"
    command = ["trace", "capture", str(model), "--prompts", str(prompts), "-o", str(path), "--batch", "2"]
    result = CliRunner().invoke(app, [*command, "--max-new-tokens", "4"])
    assert result.exit_code == 0, result.output
    trace = read_trace(path)
    assert trace.token_ids is None  # nothing of the text unless asked for
    assert len(np.unique(trace.sequence)) == 2
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "--force" in again.output
    small = CliRunner().invoke(app, [*command, "--force", "--context", "8"])
    assert small.exit_code == 2
    assert "line 1: " in small.output
    assert "--context" in small.output
    assert len(read_trace(path)) == len(trace)
    assert not path.with_name("t.parquet.partial").exists()
