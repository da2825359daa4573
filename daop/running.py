"""A loaded model: what ``daop.load`` gives. Generates, streams and counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError
from daop.forward_watch import ForwardWatch
from daop.generation import Generation, OnText, generate, stream
from daop.runtime.around import around
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.experts import ExpertsFn
from daop.runtime.machinery import Device, Machinery, Setup
from daop.runtime.model import build_model
from daop.runtime.policies.base import Policy
from daop.runtime.recording import ForecastRecorder, Recorder
from daop.runtime.statistics import Statistics
from daop.runtime.watching import Watcher
from daop.turns import Turns

Progress = Callable[[str, float], None]
"""(what is being done, share done in 0..1)"""


class Runtime:
    """A model whose routed experts daop runs. ``model`` is a plain transformers model.

    Threads may share a runtime: generations, and layers of ``model`` called by itself, wait for each other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        policy: Policy,
        *,
        policy_name: str,
        dtype: str | None,
        recorder: Recorder | None,
        forecasts: ForecastRecorder | None = None,
        watchers: Sequence[Watcher],
        progress: Progress,
        costs_from: str = "",
    ) -> None:
        self.policy_name = policy_name
        self.costs_from = costs_from
        self.checkpoint = checkpoint
        self.geometry = checkpoint.geometry
        self._run: ExpertsFn | None = None
        self._closed = False
        self._generations, self._layer = Turns(), Lock()
        kind: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        built = build_model(checkpoint, self._experts, dtype=kind, device=device.torch_device)
        self.model = built.model
        self.tokenizer = _tokenizer(checkpoint.path)
        progress("filling the hot set", 0.6)
        self._machinery: Machinery = device.set_up(
            Setup(
                built=built,
                policy=policy,
                use=self._use,
                told=progress,
                recorder=recorder,
                watchers=watchers,
            )
        )
        self.plan = self._machinery.plan
        self._executor = self._machinery.executor
        try:
            self._around = around(self._executor, policy, built, forecasts)
            self._run = self._around.run
            self._watch = ForwardWatch(self.model, self._executor, self._around)
            self._executor.start()
        except BaseException:
            self.close(complete=False)
            raise
        self._bytes_at_reset = self._machinery.bytes_read
        progress("ready", 1.0)

    # -- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int = 64,
        *,
        on_text: OnText | None = None,
        stop: Event | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate for all prompts as one batch; ``options`` go to transformers' ``generate``."""
        self._check_open()
        if isinstance(prompts, (str, bytes)):
            raise DaopError("generate takes a list of prompts: put the one into brackets")
        with self._generations:
            return self._generate(prompts, max_new_tokens, on_text, stop, options)

    def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int,
        on_text: OnText | None,
        stop: Event | None,
        options: dict[str, Any],
    ) -> list[Generation]:
        ids = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        said: list[bool] = []

        def tell(row: int, text: str) -> None:
            said.append(True)
            if on_text is not None:
                on_text(row, text)

        while True:
            try:
                return generate(
                    self.model,
                    self.tokenizer,
                    ids,
                    max_new_tokens=max_new_tokens,
                    on_text=None if on_text is None else tell,
                    stop=stop,
                    **options,
                )
            except torch.OutOfMemoryError as error:  # of attention or the KV cache: experts see to theirs
                trouble = error
            finally:  # what follows is no part of a sequence that broke off
                self._watch.next_sequences(len(ids))
            self._make_room(trouble, again=not said and self._executor.recorder is None)

    def _make_room(self, trouble: BaseException, *, again: bool) -> None:
        """The device's memory was used up outside the experts: give up a part of the hot set. Raises
        DaopError if there is none, or if the answer cannot begin ``again``."""
        made = self._machinery.make_room()
        if made and again:
            return
        what = "a part of the hot set was given up for it, so try again" if made else "no expert is resident"
        raise DaopError(
            f"the device's memory is used up ({' '.join(str(trouble).split())[:200]}); {what}, or lower "
            "--context, --batch or --fast-memory"
        ) from trouble

    def stream(self, prompt: str | Sequence[int], max_new_tokens: int = 64, **options: Any) -> Iterator[str]:
        """Text of one answer as it is generated. Use the iterator to its end, or close it."""
        if self.tokenizer is None:
            raise DaopError(f"{self.checkpoint.path} has no tokenizer, so there is no text to stream")
        return stream(
            lambda on_text, stop: self.generate(
                [prompt],
                max_new_tokens,
                on_text=on_text,
                stop=stop,
                **options,
            )
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as the tokenizer makes them."""
        if self.tokenizer is None:
            raise DaopError(f"{self.checkpoint.path} has no tokenizer: give the prompt as token ids")
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    # -- figures ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Counters since the last reset: hits, bytes and stalls by cause, memory, policy cost."""
        self._executor.settle()
        conductor = self._executor.conductor
        figures = conductor.statistics.as_dict()
        figures["bytes"]["pending"] = conductor.pending_bytes
        figures["bytes"]["read"] = self._machinery.bytes_read - self._bytes_at_reset
        figures["policy"] = self.policy_name
        figures["forecast"] = conductor.policy.forecast
        figures["ecr"] = self._machinery.residency.capacity / self.geometry.total
        figures["slots"] = self._machinery.residency.capacity
        figures["memory_bytes"] = self._memory_bytes()
        return figures

    def _memory_bytes(self) -> dict[str, int]:
        return {
            **self._machinery.memory_bytes(),
            "non_experts": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "kv_cache": self.plan.kv_cache,
            "workspace": self.plan.workspace,
        }

    def reset_statistics(self) -> None:
        """Counters start again; the hot set stays as it is."""
        self._executor.settle()
        self._executor.conductor.statistics = Statistics(self.geometry)
        for watcher in self._executor.conductor.watchers:
            watcher.reset()
        self._bytes_at_reset = self._machinery.bytes_read

    def hot_set(self) -> list[list[int]]:
        """For every MoE layer, the experts resident now."""
        resident = self._machinery.residency.resident
        offsets = self.geometry.offsets
        return [
            np.flatnonzero(resident[offsets[layer] : offsets[layer + 1]]).tolist()
            for layer in range(self.geometry.layers)
        ]

    def end_sequences(self, count: int) -> None:
        """The ``count`` sequences that ``model`` was called with are over; ``generate`` says so by itself."""
        self._watch.next_sequences(count)

    def approximated(self) -> NDArray[np.int64] | None:
        """[B, 2] approximated and all expert calls in decode of each running sequence; None: all exact."""
        return None if self._around.early is None else self._around.early.calls.copy()

    def drop_cache(self) -> None:
        """Ask the kernel to forget what it cached of the checkpoint's files."""
        self._machinery.drop_cache()

    def close(self, *, complete: bool = True) -> None:
        """End the reading threads, close the files, finish the trace. Safe to call twice.

        ``complete`` False: the run broke off, so a trace stays marked as unfinished.
        """
        self._closed = True
        self._machinery.close()
        recorder, self._executor.recorder = self._executor.recorder, None
        if recorder is not None:
            recorder.close() if complete else recorder.keep_partial()

    def _check_open(self) -> None:
        if self._closed:
            raise DaopError("this runtime is closed: load the model again")

    def __enter__(self) -> Runtime:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=error is None)

    def _experts(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """What transformers' experts modules call."""
        if self._run is None:
            raise AssertionError("the model is called before its device is set up")
        self._check_open()
        with self._layer:
            return self._run(layer, hidden, ids, weights)

    def _use(self, run: ExpertsFn) -> None:
        self._run = run


def _tokenizer(path: Path) -> Any:
    """The checkpoint's tokenizer, or None if it ships none."""
    if not any(
        os.path.exists(path / name) for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files make it raise nearly anything
        raise DaopError(
            f"the tokenizer in {path} cannot be read ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}): fetch its files again"
        ) from error
