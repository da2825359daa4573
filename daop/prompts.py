"""Prompts from the command line and from files, and their way to token ids.

A file is plain text (a prompt a line, blank lines skipped), or, if its name ends in ``.jsonl``, ``.ndjson``
or ``.json``, one JSON object a line. Of its fields the first of these counts:

    messages  a chat: [{"role": "system" | "user" | "assistant", "content": text}, ...], the user's last
    turns     a conversation: the user's messages; each is sent with all that was said before it
    prompt, question, text    the prompt itself

Where the tokenizer has a chat template, every prompt is put through it, a plain one as the user's message.
Where it has none, what was said is joined by line breaks and continued as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daop.core import DaopError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_FIELDS = ("prompt", "question", "text")
ROLES = ("system", "user", "assistant")

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked: messages that are sent at once, then the user's later ``turns``, one after each answer.

    ``source`` is where it came from, for messages to people.
    """

    messages: tuple[Message, ...]
    turns: tuple[str, ...] = ()
    source: str = "--prompt"

    @property
    def title(self) -> str:
        """The last thing the user said, on one line."""
        return " ".join(self.messages[-1]["content"].split())


def from_text(text: str, source: str = "--prompt") -> Prompt:
    """A prompt of one message; raises DaopError if it is blank or not text."""
    return Prompt(messages=({"role": "user", "content": _text(text, source)},), source=source)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, at most ``limit``; raises DaopError with the file and the line."""
    path = Path(path)
    parse = _parse_json if path.suffix.lower() in JSON_SUFFIXES else from_text
    prompts: list[Prompt] = []
    for source, line in _lines(path):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(parse(line, source))
    if not prompts:
        raise DaopError(f"{path} holds no prompt: write one a line, as text, or as JSON in a .jsonl file")
    return prompts


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line for messages, text) of every line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                source = f"{path}, line {number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise DaopError(
                        f"{source} is not UTF-8 text (byte {error.start + 1} of the line): save it as UTF-8"
                    ) from error
                if line.strip():
                    yield source, line
    except OSError as error:
        raise DaopError(f"cannot read the prompts in {path}: {error.strerror or error}") from error


def _parse_json(line: str, source: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; a .jsonl file has one JSON object a line" if line.lstrip()[0] in "[{" else ""
        raise DaopError(f"{source} is not JSON: {error}{hint}") from error
    if not isinstance(row, dict):
        raise DaopError(f'{source} holds a JSON {type(row).__name__}, not an object like {{"prompt": "..."}}')
    if row.get("messages") is not None:
        return Prompt(messages=_messages(row["messages"], source), source=source)
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise DaopError(f'{source}: "turns" must be a list of at least one text')
        first, *later = (_text(turn, f'{source}, "turns"') for turn in turns)
        return Prompt(messages=({"role": "user", "content": first},), turns=tuple(later), source=source)
    for name in TEXT_FIELDS:
        if row.get(name) is not None:
            text = _text(row[name], f'{source}, "{name}"')
            return Prompt(messages=({"role": "user", "content": text},), source=source)
    known = ", ".join(("messages", "turns", *TEXT_FIELDS))
    has = ", ".join(map(str, row)) or "none"
    raise DaopError(f"{source} has none of the fields {known}; it has: {has}")


def _messages(value: Any, source: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DaopError(f'{source}: "messages" must be a list of at least one message')
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DaopError(f'{source}: every message needs a "role" of {", ".join(ROLES)}, and a "content"')
        content = _text(message.get("content"), f'{source}, "content"')
        messages.append({"role": str(message["role"]), "content": content})
    if messages[-1]["role"] != "user":
        raise DaopError(f"{source}: the last message must be the user's, since an answer to it is generated")
    return tuple(messages)


def _text(value: Any, source: str) -> str:
    if not isinstance(value, str) or not value.strip():
        kind = "is empty" if isinstance(value, str) else f"holds {json.dumps(value)[:40]}, which is not text"
        raise DaopError(f"{source} {kind}: write the prompt there, or remove the line")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start + 1
        raise DaopError(f"{source} is not valid Unicode at character {at}: write it as UTF-8") from error
    return value


def encode(messages: Sequence[Message], tokenizer: Any, source: str) -> list[int]:
    """Token ids of everything said so far, ready for an answer."""
    if tokenizer is None:
        raise DaopError("this model has no tokenizer, so it cannot be given text: add its tokenizer.json")
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise DaopError(f"{source}: the model's chat template does not take it: {error}") from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them itself
    else:
        ids = tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
    if not ids:
        raise DaopError(f"{source}: the tokenizer makes no token of it: use another prompt")
    return list(ids)
