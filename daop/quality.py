"""What an approximation costs: a candidate run against a reference run, token by token.

Both are fed the same text (teacher forcing), so that a difference is the runs' own and not that of a text
that drifted away. Of every sequence the first tokens are one prefill pass; each later one is a decode step
of its own, with the KV cache before it, since that is where approximate policies act. Only logits of decode
steps are scored.

Figures, each with a 95 % interval from a bootstrap over sequences (tokens of one text are not independent):
    perplexity        exp of the mean negative log likelihood of the text's next token
    mean_kl, p99_kl   KL(reference || candidate) of the next token's distribution, nats a token
    changed_tokens    share of steps whose likeliest token differs
    approximated      share of expert calls that were not the exact ones (early input, replaced, deferred)

    quality = measure(teacher(exact), teacher(other), batches)

A scorer is anything that maps a ``Batch`` to logits, so a packed or quantised model is compared with its
source in the same way. Logits are compared in float64: two exact runs of one checkpoint differ by nothing.

Shape legend: B sequences side by side, S tokens of each, P of them prefill, D = S - P - 1 scored, V words of
the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError
from daop.forward_watch import CACHE_ARGUMENTS

if TYPE_CHECKING:
    from daop.api import Runtime

RESAMPLES = 1000
ROWS = 64  # steps compared at a time: float64 copies of the logits stay small
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of equal length that run side by side; the first ``prompt`` tokens of each are prefill."""

    tokens: tuple[tuple[int, ...], ...]
    prompt: int

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.tokens}
        if len(lengths) != 1 or not 1 <= self.prompt <= min(lengths) - 2:
            raise DaopError(
                "a batch to be scored needs sequences of one length, each at least two tokens longer than "
                f"its prefill; it has lengths {sorted(lengths)} and {self.prompt} tokens of prefill"
            )


@dataclass(frozen=True, kw_only=True)
class Scored:
    """``logits`` float32 [B, D, V]; ``calls`` [B, 2]: approximated and all expert calls of each sequence's
    decode steps (None: every one was exact)."""

    logits: torch.Tensor
    calls: NDArray[np.int64] | None = None


Scorer = Callable[[Batch], Scored]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its 95 % interval; the ends are None where one sequence alone was scored."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The figures of the module's docstring."""

    sequences: int
    tokens: int
    perplexity_reference: Estimate
    perplexity: Estimate
    mean_kl: Estimate
    p99_kl: Estimate
    changed_tokens: Estimate
    approximated: Estimate

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SequenceFigures:
    """What one sequence gave: [D] per step, and its ``calls`` [2]."""

    loss_reference: Floats
    loss: Floats
    kl: Floats
    changed: NDArray[np.bool_]
    calls: NDArray[np.int64]


def measure(reference: Scorer, candidate: Scorer, batches: Iterable[Batch], *, seed: int = 0) -> Quality:
    """Run both over the same batches, one batch at a time, and compare."""
    found: list[SequenceFigures] = []
    for batch in batches:
        found += compare(batch, reference(batch), candidate(batch))
    if not found:
        raise DaopError("there is nothing to score: the text is shorter than one window")
    return summarise(found, seed=seed)


def compare(batch: Batch, reference: Scored, candidate: Scored) -> list[SequenceFigures]:
    """The figures of each sequence of a batch that both have scored."""
    if reference.logits.shape != candidate.logits.shape:
        raise DaopError(
            f"the two runs give logits of shape {tuple(reference.logits.shape)} and "
            f"{tuple(candidate.logits.shape)}: compare models of one vocabulary"
        )
    out = []
    for row, tokens in enumerate(batch.tokens):
        targets = torch.tensor(tokens[batch.prompt + 1 :])
        parts = [
            _steps(
                *(each[at : at + ROWS] for each in (reference.logits[row], candidate.logits[row], targets))
            )
            for at in range(0, len(targets), ROWS)
        ]
        columns = [torch.cat(column).numpy() for column in zip(*parts, strict=True)]
        calls = np.zeros(2, dtype=np.int64) if candidate.calls is None else candidate.calls[row]
        out.append(
            SequenceFigures(
                loss_reference=columns[0], loss=columns[1], kl=columns[2], changed=columns[3], calls=calls
            )
        )
    return out


def _steps(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Losses of both, KL and change of greedy token, [n] each, from logits [n, V]."""
    p = reference.double().log_softmax(dim=-1)
    q = candidate.double().log_softmax(dim=-1)
    if not bool(torch.isfinite(q).all() & torch.isfinite(p).all()):
        raise DaopError("a run gave logits that are not finite: there is nothing to compare")
    at = targets[:, None]
    kl = (p.exp() * (p - q)).sum(dim=-1)
    changed = reference.argmax(dim=-1) != candidate.argmax(dim=-1)
    return [-p.gather(1, at)[:, 0], -q.gather(1, at)[:, 0], kl, changed]


def summarise(found: Sequence[SequenceFigures], *, seed: int = 0) -> Quality:
    """Means over all steps, with intervals from resampled sequences."""
    lengths = np.asarray([len(one.kl) for one in found], dtype=np.float64)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(found), size=(RESAMPLES, len(found))) if len(found) > 1 else None

    def ratio(top: Floats, bottom: Floats) -> Estimate:
        if not bottom.sum():
            return Estimate(
                value=0.0, low=None if picks is None else 0.0, high=None if picks is None else 0.0
            )
        again = None if picks is None else top[picks].sum(axis=1) / np.maximum(bottom[picks].sum(axis=1), 1)
        return _estimate(top.sum() / bottom.sum(), again)

    def mean(column: Callable[[SequenceFigures], Any]) -> Estimate:
        return ratio(np.asarray([np.sum(column(one)) for one in found], dtype=np.float64), lengths)

    steps = [one.kl for one in found]
    slow = None
    if picks is not None:
        slow = np.asarray([np.percentile(np.concatenate([steps[i] for i in pick]), 99) for pick in picks])
    calls = np.asarray([one.calls for one in found], dtype=np.float64)
    return Quality(
        sequences=len(found),
        tokens=int(lengths.sum()),
        perplexity_reference=_exp(mean(lambda one: one.loss_reference)),
        perplexity=_exp(mean(lambda one: one.loss)),
        mean_kl=mean(lambda one: one.kl),
        p99_kl=_estimate(np.percentile(np.concatenate(steps), 99), slow),
        changed_tokens=mean(lambda one: one.changed),
        approximated=ratio(calls[:, 0], calls[:, 1]),
    )


def _estimate(value: Any, again: Floats | None) -> Estimate:
    if again is None:
        return Estimate(value=float(value), low=None, high=None)
    low, high = np.percentile(again, (2.5, 97.5)).tolist()
    return Estimate(value=float(value), low=low, high=high)


def _exp(of: Estimate) -> Estimate:
    low, high = (None if end is None else float(np.exp(end)) for end in (of.low, of.high))
    return Estimate(value=float(np.exp(of.value)), low=low, high=high)


# -- who is scored -------------------------------------------------------------------------------------


def teacher(runtime: Runtime) -> Scorer:
    """Scores a loaded model: prefill, then a decode step for each token of the text."""

    arguments = inspect.signature(runtime.model.forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in arguments), CACHE_ARGUMENTS[-1])

    @torch.inference_mode()
    def score(batch: Batch) -> Scored:
        rows = torch.tensor(batch.tokens, device=runtime.model.device)
        out = runtime.model(rows[:, : batch.prompt], use_cache=True)
        logits = []
        for at in range(batch.prompt, rows.shape[1] - 1):
            cache = {name: next(out[kind] for kind in CACHE_ARGUMENTS if kind in out)}
            out = runtime.model(rows[:, at : at + 1], use_cache=True, **cache)
            logits.append(out.logits[:, -1].float().cpu())
        calls = runtime.approximated()
        runtime.end_sequences(len(rows))
        return Scored(logits=torch.stack(logits, dim=1), calls=calls)

    return score


class Spool:
    """The scores of one run kept on disk, so that only one model is in memory at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Batch, Path] = {}

    def keep(self, batch: Batch, scored: Scored) -> None:
        path = self._folder / f"{len(self._files)}.npy"
        np.save(path, scored.logits.numpy())
        self._files[batch] = path

    def __call__(self, batch: Batch) -> Scored:
        return Scored(logits=torch.from_numpy(np.load(self._files[batch], allow_pickle=False)))


def windows(tokens: Sequence[int], *, length: int, prompt: int, batch: int, limit: int | None) -> list[Batch]:
    """A text cut into windows of ``length`` tokens (a shorter rest is left out), ``batch`` side by side."""
    starts = range(0, len(tokens) - length + 1, length)[:limit]
    rows = [tuple(tokens[at : at + length]) for at in starts]
    return [Batch(tokens=tuple(rows[i : i + batch]), prompt=prompt) for i in range(0, len(rows), batch)]


def answered(runtime: Runtime, prompts: Path, max_new_tokens: int, limit: int | None = None) -> list[Batch]:
    """Each prompt with the answer that the loaded model gives: what is fed to all runs."""
    from daop.prompts import encode, read_prompts

    batches = []
    for prompt in read_prompts(prompts, limit):
        ids = encode(prompt.messages, runtime.tokenizer, prompt.source)
        answer = runtime.generate([ids], max_new_tokens)[0].token_ids
        if len(answer) >= 2:  # one token leaves no decode step to score
            batches.append(Batch(tokens=((*ids, *answer),), prompt=len(ids)))
    if not batches:
        raise DaopError(f"no answer to the prompts of {prompts} is long enough to be scored: use others")
    return batches
