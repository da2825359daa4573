"""Measured comparison of placement policies on this machine, with a real model and real prompts.

Policies take turns in every repeat, so that a machine that slows down or warms up does so for all of
them; each run starts from a fresh hot set and a dropped page cache. All runs must produce the same tokens,
but on a device whose experts are computed on two processors, which round differently: there it is said which
did not. Several models are the same one in several formats, in the same memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from daop.comparison import Watch
from daop.core import DaopError
from daop.formats import share_that_fits
from daop.prompts import encode, read_prompts
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.formats import format_of
from daop.runtime.policies.base import POLICIES, make_policy
from daop.runtime.profile import Profile
from daop.runtime.watching import Watcher
from daop.taught import open_profile

Told = Callable[[str, float], None]


def measure_formats(
    models: Sequence[str],
    prompts: Path | None,
    shares: Sequence[float],
    policies: Sequence[str],
    **options: Any,
) -> list[dict[str, Any]]:
    """``measure`` of one model; of several, each in the memory that a share of the first one's experts takes,
    with rows that say which format."""
    if len(models) == 1:
        return measure(models[0], prompts, shares, policies, **options)
    found = [open_checkpoint(model) for model in models]
    first = found[0].geometry
    for model, checkpoint in zip(models, found, strict=True):
        first.check_same_shape(checkpoint.geometry, models[0], model)
    rows: list[dict[str, Any]] = []
    for model, name, checkpoint in zip(models, _names(found), found, strict=True):
        geometry = checkpoint.geometry
        own = geometry is first  # its shares are what was asked for, not whole experts' worth
        fitting = {share if own else share_that_fits(first, geometry, share): share for share in shares}
        more = {"format": name, "expert_bytes": float(np.mean(geometry.bytes_of))}
        rows += [
            {**more, "memory_ecr": fitting[row["ecr"]], **row}
            for row in measure(model, prompts, list(fitting), policies, **options)
        ]
    return rows


def _names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The models' formats; with their folders' names where formats alone do not tell them apart."""
    formats = [format_of(checkpoint.layouts[0]) for checkpoint in checkpoints]
    if len(set(formats)) == len(formats):
        return formats
    return [f"{name} ({one.path.name})" for name, one in zip(formats, checkpoints, strict=True)]


def measure(
    model: str,
    prompts: Path | None,
    shares: Sequence[float],
    policies: Sequence[str],
    *,
    repeats: int,
    max_new_tokens: int,
    direct_io: bool,
    profile: Path | None,
    predictor: Path | None = None,
    hardware: str | None = None,
    device: str = "host",
    told: Told,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """One row per budget and policy: medians over ``repeats`` runs, and their spread. ``differs``: answers
    that are not those of the first exact run, as rounding may have it.

    What ``watch`` gives watches one further run of each, which is not timed.
    """
    if prompts is None:
        raise DaopError("--model needs --prompts, a file of text or JSONL to generate from")
    asked = read_prompts(prompts)
    unreal = [name for name in policies if POLICIES.get(name).needs_future]
    if unreal:
        raise DaopError(f"--policies {','.join(unreal)} knows the future and can only be simulated (--trace)")
    options = {"direct_io": direct_io, "hardware": hardware, "device": device}
    taught = open_profile(profile, predictor, open_checkpoint(model).geometry)
    rows: list[dict[str, Any]] = []
    for share in shares:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in policies}
        for repeat in range(repeats):
            for name in policies:
                told(f"ECR {share:g}, run {repeat + 1} of {repeats}: {name}", 0.0)
                runs[name].append(_run(model, asked, share, name, max_new_tokens, taught, options))
        if watch is not None:
            for name in policies:
                told(f"ECR {share:g}, a run to be watched, not timed: {name}", 0.0)
                watchers = watch("this machine", share, name)
                _run(model, asked, share, name, max_new_tokens, taught, options, watchers)
        differs = _differences(runs)
        if device == "host" and any(differs.values()):
            names = ", ".join(name for name, count in differs.items() if count)
            raise AssertionError(f"policies gave other tokens than the first: {names}")
        rows += [{**row, "device": device, "differs": differs[row["policy"]]} for row in _rows(share, runs)]
    return rows


def _run(
    model: str,
    asked: Sequence[Any],
    share: float,
    name: str,
    max_new_tokens: int,
    profile: Profile | None,
    options: Mapping[str, Any],
    watchers: Sequence[Watcher] = (),
) -> dict[str, Any]:
    import daop
    from daop.report.figures import run_figures

    policy = make_policy(name, profile)
    with daop.load(model, policy=policy, ecr=share, watchers=watchers, **options) as runtime:
        runtime.drop_cache()
        runtime.reset_statistics()
        batches = [
            runtime.generate(
                [encode(prompt.messages, runtime.tokenizer, prompt.source)], max_new_tokens=max_new_tokens
            )
            for prompt in asked
        ]
        figures: dict[str, Any] = run_figures(runtime.statistics(), batches)
    figures["all_token_ids"] = [answer.token_ids for batch in batches for answer in batch]
    return figures


def _differences(runs: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Policies may change speed, never output: how many answers of each exact one differ from those of the
    first, in its worst run."""
    first: list[list[int]] | None = None
    out = dict.fromkeys(runs, 0)
    for name, results in runs.items():
        if not POLICIES.get(name).exact:
            continue
        for result in results:
            first = result["all_token_ids"] if first is None else first
            pairs = zip(result["all_token_ids"], first, strict=True)
            out[name] = max(out[name], sum(mine != other for mine, other in pairs))
    return out


def _rows(share: float, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, results in runs.items():
        results.sort(key=lambda result: float(result["tokens_per_second"]))
        speeds = [float(result["tokens_per_second"]) for result in results]
        middle = dict(results[(len(results) - 1) // 2])
        tokens = sum(len(ids) for ids in middle.pop("all_token_ids"))
        middle.pop("token_ids", None)
        row = {**middle, "policy": name, "ecr": share, "hardware": "this machine", "simulated": False}
        row["tokens"] = tokens
        row["tokens_per_second"] = statistics.median(speeds)
        row["spread"] = [speeds[0], speeds[-1]]
        row["exact"] = POLICIES.get(name).exact
        rows.append(row)
    best = max((row["tokens_per_second"] for row in rows if row["policy"].startswith("static")), default=None)
    for row in rows:
        row["ratio_to_best_static"] = row["tokens_per_second"] / best if best else None
        row["ratio_to_optimum"] = None  # nobody knows the future of a running model
    return rows
