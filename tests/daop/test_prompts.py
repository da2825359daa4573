from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daop.core import DaopError
from daop.prompts import encode, from_text, read_prompts

# Lines in the shape of GSM8K (MIT), HumanEval (MIT), MT-Bench (Apache-2.0) and of chat logs; texts are ours.
ROWS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"question": "How many?", "answer": "#### 18"}, ["How many?"], []),
    ({"task_id": "HumanEval/0", "prompt": "def f():\n    pass"}, ["def f():\n    pass"], []),
    ({"question_id": 81, "turns": ["Write a post.", "Now shorter."]}, ["Write a post."], ["Now shorter."]),
    (
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        ["Be brief.", "Hi"],
        [],
    ),
    ({"text": "Once upon a time"}, ["Once upon a time"], []),
    ({"prompt": None, "text": "a null field is no field"}, ["a null field is no field"], []),
]


@pytest.mark.parametrize(("row", "messages", "turns"), ROWS)
def test_json_lines(tmp_path: Path, row: dict[str, Any], messages: list[str], turns: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n" + json.dumps(row) + "\n\n")
    (prompt,) = read_prompts(file)
    assert [message["content"] for message in prompt.messages] == messages
    assert list(prompt.turns) == turns
    assert prompt.source == f"{file}, line 2"


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes('\ufeffErste Frage\r\n\r\n  {"prompt": 1}  \n最後'.encode())
    assert [prompt.title for prompt in read_prompts(file)] == ["Erste Frage", '{"prompt": 1}', "最後"]
    assert len(read_prompts(file, limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "holds no prompt"),
        ("a.txt", b" \n\n\t\n", "holds no prompt"),
        ("a.txt", b"fine\nbad \xff byte\n", "line 2 is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2 is not JSON"),
        ("a.jsonl", b"[\n", "line 1 is not JSON.*one JSON object a line"),
        ("a.jsonl", b'["x"]\n', "line 1 holds a JSON list"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'\n{"answer": "x"}\n', "line 2 has none of the fields.*it has: answer"),
        ("a.jsonl", b"{}", "it has: none"),
        ("a.jsonl", b'{"prompt": "  "}', 'line 1, "prompt" is empty'),
        ("a.jsonl", b'{"prompt": 7}', "not text"),
        ("a.jsonl", b'{"turns": []}', '"turns" must be a list'),
        ("a.jsonl", b'{"turns": ["a", ""]}', "is empty"),
        ("a.jsonl", b'{"messages": "hi"}', '"messages" must be a list'),
        ("a.jsonl", b'{"messages": [{"content": "hi"}]}', '"role"'),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "not text"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', "must be the user's"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "not valid Unicode at character 1"),
    ],
)
def test_nonsense_is_named_with_file_and_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DaopError, match=words) as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_no_such_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DaopError, match="No such file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(DaopError, match="directory"):
        read_prompts(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_prompts_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for name in ("any.txt", "any.jsonl"):
        file = tmp_path_factory.getbasetemp() / name
        file.write_bytes(content)
        try:
            titles = [prompt.title for prompt in read_prompts(file)]
        except DaopError as error:
            titles = [str(error)]
        assert all(titles)


class Words:
    """A tokenizer that numbers words, with or without a chat template."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        self.seen.append((text, add_special_tokens))
        return {"input_ids": list(range(len(text.split())))}

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("no system role")
        assert add_generation_prompt
        assert not tokenize
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages) + " <assistant>"


def test_chat_template_is_applied_where_there_is_one() -> None:
    plain, chat = Words(None), Words("{{ messages }}")
    prompt = from_text("Hello there")
    assert encode(prompt.messages, plain, "x") == [0, 1]
    assert encode(prompt.messages, chat, "x") == [0, 1, 2, 3]
    assert plain.seen == [("Hello there", True)]
    assert chat.seen == [("<user> Hello there <assistant>", False)], "the template writes them"
    with pytest.raises(DaopError, match=r"x: the model's chat template does not take it: no system role"):
        encode([{"role": "system", "content": "a"}], chat, "x")
    with pytest.raises(DaopError, match="no tokenizer"):
        encode(prompt.messages, None, "x")
