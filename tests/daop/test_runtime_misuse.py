"""What a person does to a runtime that nobody intended: threads, exceptions, closed ones, odd options."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_model import save_chat_model
from transformers import StoppingCriteria

from daop.api import Runtime, load
from daop.core import DaopError
from daop.runtime.policies.base import Policy
from daop.training.parquet import read_trace

PROMPTS = ["hello", "a longer one", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def answer(runtime: Runtime, prompt: str) -> list[int]:
    return runtime.generate([prompt], 8)[0].token_ids


def reading_threads() -> int:
    return sum(thread.name.startswith("daop-") for thread in threading.enumerate())


def test_threads_wait_for_each_other(model: Path) -> None:
    found: dict[str, list[list[int]]] = {prompt: [] for prompt in PROMPTS}
    with load(model, ecr=0.2) as runtime:
        alone = {prompt: answer(runtime, prompt) for prompt in PROMPTS}
        threads = [
            threading.Thread(target=lambda p=prompt: found[p].extend(answer(runtime, p) for _ in range(10)))
            for prompt in PROMPTS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together = list(zip(*(runtime.stream(prompt, 8) for prompt in PROMPTS), strict=False))
        assert together
    assert found == {prompt: [alone[prompt]] * 10 for prompt in PROMPTS}


def test_threads_may_call_the_plain_model(model: Path) -> None:
    ids = torch.tensor([[5, 17, 2, 44, 9, 61, 30]])
    seen: list[torch.Tensor] = []
    with load(model, ecr=0.2) as runtime:
        alone = runtime.model(ids).logits

        def call() -> None:
            for _ in range(20):
                seen.append(runtime.model(ids).logits)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 60
    assert all(torch.equal(alone, logits) for logits in seen)


def test_a_generation_within_one_is_refused(model: Path) -> None:
    with load(model, ecr=0.5) as runtime:

        def ask(*_: object) -> None:
            answer(runtime, "x")

        with pytest.raises(DaopError, match="from within another"):
            runtime.generate(["hello"], 4, on_text=ask)
        assert answer(runtime, "x")


def test_a_sequence_that_broke_off_is_not_joined_with_the_next(model: Path, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with load(model, ecr=0.5, trace=tmp_path / "t.parquet") as runtime:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                runtime.generate(["hello"], 4, on_text=broken)
            with pytest.raises(DaopError, match="vocabulary"):
                runtime.generate([[10**6]], 4)
            answer(runtime, "x")
    assert read_trace(tmp_path / "t.parquet").grouped().sequences.tolist() == [0, 1, 2, 3]


def test_a_closed_runtime_says_so(model: Path) -> None:
    runtime = load(model, ecr=0.5)
    runtime.close()
    runtime.close()
    calls: list[Callable[[], object]] = [
        lambda: answer(runtime, "x"),
        lambda: list(runtime.stream("x", 4)),
        lambda: runtime.model(torch.tensor([[5]])),
        lambda: runtime.__enter__(),
    ]
    for call in calls:
        with pytest.raises(DaopError, match="this runtime is closed"):
            call()
    assert runtime.statistics()["slots"] > 0


@pytest.mark.parametrize("when", ["start", "attach"])
def test_what_cannot_be_loaded_leaves_no_thread_and_no_file(when: str, model: Path, tmp_path: Path) -> None:
    class Broken(Policy):
        def start(self, *_: object) -> Any:
            raise ZeroDivisionError

    before = reading_threads()
    options: dict[str, Any] = {"policy": Broken()} if when == "start" else {"watchers": [object()]}
    with pytest.raises((ZeroDivisionError, AttributeError)):
        load(model, ecr=0.5, trace=tmp_path / "t.parquet", **options)
    assert reading_threads() == before
    assert list(tmp_path.iterdir()) == []


class AtOnce(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool)


def test_options_of_generate(model: Path) -> None:
    with load(model, ecr=0.5, dtype=torch.float32) as runtime:
        whole = runtime.generate(["hello"], 8)[0]
        assert len(runtime.generate(["hello"], 8, stopping_criteria=[AtOnce()])[0].token_ids) == 1
        stopped = runtime.generate(["hello"], 8, stop_strings=[whole.text[1:3]])[0]
        assert len(stopped.token_ids) < len(whole.token_ids)
        refused: list[dict[str, Any]] = [
            {"num_beams": 2},
            {"num_return_sequences": 2},
            {"return_dict_in_generate": True},
        ]
        for options in refused:
            with pytest.raises(DaopError, match=f"{next(iter(options))}=.*runtime.model.generate"):
                runtime.generate(["hello"], 4, **options)
        assert runtime.generate(["hello"], 8, num_beams=1)[0].token_ids == whole.token_ids
        nonsense: list[tuple[Any, str]] = [
            ("hello", "list of prompts"),
            ([[5, -1]], "negative"),
            ([], "empty"),
        ]
        for prompts, words in nonsense:
            with pytest.raises(DaopError, match=words):
                runtime.generate(prompts, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "--threads"),
        ({"seed": 1 << 70}, "--seed"),
        ({"ecr": 2}, "--ecr"),
        ({"dtype": torch.int8}, "--dtype int8"),
    ],
)
def test_numbers_out_of_range_are_named(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DaopError, match=words):
        load(model, **options)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_tokenizer_is_named(model: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DaopError, match=r"the tokenizer in .* cannot be read"):
        load(folder)


def test_what_a_models_generation_config_asks_for(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    asked = {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "stop_strings": ["no such string"]}
    with load(model, ecr=0.5) as runtime:
        usual = answer(runtime, "hello")
    (folder / "generation_config.json").write_text(json.dumps(asked))
    with load(folder, ecr=0.5) as runtime:
        assert answer(runtime, "hello") == usual
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with load(folder, ecr=0.5) as runtime, pytest.raises(DaopError, match="eos_token_id is 'end'"):
        answer(runtime, "hello")
