"""Generation through transformers' ``generate``, with times per token and text as it comes.

daop does not write a sampler: ``model.generate`` runs attention, cache, sampling and stopping. What is
added here is a clock on every token, text without half characters, and the cut at the end token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from daop.core import DaopError

OnText = Callable[[int, str], None]
"""(index of the prompt, new text)"""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt's answer. ``tpot_s`` holds the seconds of every token after the first."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    ttft_s: float
    tpot_s: list[float] = field(default_factory=list)


class _Text:
    """Turns a growing list of tokens into text that never ends in half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # tokens before it are printed and no longer needed as context
        self._printed = 0  # characters of the window that are printed

    def push(self, token: int) -> str:
        self._ids.append(token)
        window = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)
        if window.endswith("�"):
            return ""
        new = window[self._printed :]
        self._printed = len(window)
        if len(self._ids) - self._start > 32:  # keep the window short; its first tokens are context
            keep = len(self._ids) - 8
            self._start = keep
            self._printed = len(self._tokenizer.decode(self._ids[keep:], skip_special_tokens=True))
        return str(new)


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Receives every token that ``generate`` makes: notes the time, hands the text on."""

    def __init__(
        self, rows: int, end_ids: set[int], tokenizer: Any, on_text: Callable[[int, str], None] | None
    ):
        self.times: list[float] = []
        self._started = False
        self._ended = [False] * rows
        self._end_ids = end_ids
        self._texts = [_Text(tokenizer) for _ in range(rows)] if on_text and tokenizer is not None else None
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        if not self._started:  # generate sends the prompt first
            self._started = True
            return
        self.times.append(time.perf_counter())
        if self._texts is None or self._on_text is None:
            return
        for row, token in enumerate(value.reshape(-1).tolist()):
            if not self._ended[row]:
                self._ended[row] = token in self._end_ids
                text = self._texts[row].push(token)
                if text:
                    self._on_text(row, text)

    def end(self) -> None:
        """Nothing to flush."""


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation when its reader has gone away."""

    def __init__(self, asked: Event) -> None:
        self._asked = asked

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full(
            (input_ids.shape[0],), self._asked.is_set(), dtype=torch.bool, device=input_ids.device
        )


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    on_text: OnText | None = None,
    stop: Event | None = None,
    **options: Any,
) -> list[Generation]:
    """Generate for all ``prompts`` (token ids) as one left-padded batch; greedy unless options say else."""
    _check_options(options)
    _check_room(model, prompts, max_new_tokens)
    end_ids = _end_ids(model)
    pad = _pad_id(model, tokenizer, end_ids)
    longest = max(len(ids) for ids in prompts)
    rows = [[pad] * (longest - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    clock = _Clock(len(prompts), end_ids, tokenizer, on_text)
    criteria = StoppingCriteriaList([*options.pop("stopping_criteria", ()), *([_Stop(stop)] if stop else ())])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            stopping_criteria=criteria,
            pad_token_id=pad,
            **{**USUAL, "tokenizer": tokenizer, **options},
        )
    times = [0.0, *(moment - began for moment in clock.times)]
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    answers = []
    for row, ids in enumerate(prompts):
        tokens = _until_end(out[row, longest:].tolist(), end_ids)
        answers.append(
            Generation(
                prompt_ids=list(ids),
                token_ids=tokens,
                text=tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else "",
                ttft_s=times[1] if len(times) > 1 else 0.0,
                tpot_s=gaps[: max(0, len(tokens) - 1)],
            )
        )
    return answers


def stream(run: Callable[[OnText, Event], object]) -> Iterator[str]:
    """Text as it is generated by ``run(on_text, stop)`` in a thread; ends early if the reader does."""
    queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
    stop = Event()

    def work() -> None:
        try:
            run(lambda _, text: queue.put(text), stop)
            queue.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the reader, who raises it
            queue.put(error)

    thread = Thread(target=work, name="daop-generate", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


ONE_EACH = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
"""What there is one answer to each prompt for, with the times of its tokens."""

USUAL = {**ONE_EACH, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""Whatever the model's generation_config.json says."""


def _check_options(options: dict[str, Any]) -> None:
    for name, usual in {**ONE_EACH, "streamer": None}.items():
        if options.get(name, usual) not in (usual, None):
            raise DaopError(
                f"{name}={options[name]!r} does not give one timed answer to each prompt: call "
                "runtime.model.generate, which is transformers' own"
            )


def _check_room(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompts or min(len(ids) for ids in prompts) == 0:
        raise DaopError("a prompt is empty: there is nothing to continue")
    if max_new_tokens < 1:
        raise DaopError(f"--max-new-tokens is {max_new_tokens}; it must be at least 1")
    if min(min(ids) for ids in prompts) < 0:
        raise DaopError("a prompt holds a negative token id")
    vocabulary = model.get_input_embeddings().num_embeddings
    if max(max(ids) for ids in prompts) >= vocabulary:
        raise DaopError(f"a prompt holds a token id beyond the model's vocabulary of {vocabulary}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    need = max(len(ids) for ids in prompts) + max_new_tokens
    if limit and need > limit:
        raise DaopError(
            f"the longest prompt ({need - max_new_tokens} tokens) and --max-new-tokens {max_new_tokens} need "
            f"a context of {need}, but the model's is {limit}: shorten the prompt or generate fewer tokens"
        )


def _end_ids(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    if end is None:
        return set()
    ends = end if isinstance(end, list) else [end]
    if not all(isinstance(one, int) for one in ends):
        raise DaopError(f"eos_token_id is {end!r}, not token ids: mend the model's generation_config.json")
    return set(ends)


def _pad_id(model: Any, tokenizer: Any, end_ids: set[int]) -> int:
    for candidate in (model.generation_config.pad_token_id, getattr(tokenizer, "pad_token_id", None)):
        if candidate is not None and candidate >= 0:
            return int(candidate)
    return min(end_ids, default=0)


def _until_end(tokens: list[int], end_ids: set[int]) -> list[int]:
    """The tokens up to and with the first end token."""
    for index, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: index + 1]
    return tokens
