"""The front door: ``daop.load`` gives a ``Runtime`` that generates, streams and counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from daop.config import DEFAULT_POLICY, RunConfig
from daop.core import DaopError
from daop.machine import asked_threads, read_cpu
from daop.running import Progress, Runtime
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.costs import Hardware
from daop.runtime.machinery import Wishes, find_device
from daop.runtime.policies.base import Policy, make_policy
from daop.runtime.watching import Watcher
from daop.taught import open_profile

if TYPE_CHECKING:
    from daop.training.recorder import TraceRecorder

__all__ = ["Runtime", "load"]


def load(
    model: str | Path,
    *,
    device: str = "host",
    policy: str | Policy = DEFAULT_POLICY,
    fast_memory: int | str | None = None,
    ecr: float | None = None,
    direct_io: bool = False,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    context: int = 2048,
    batch: int = 1,
    seed: int = 0,
    policy_options: dict[str, Any] | None = None,
    profile: str | Path | None = None,
    predictor: str | Path | None = None,
    trace: str | Path | None = None,
    trace_token_ids: bool = False,
    hardware: str | None = None,
    trace_distances: bool = False,
    watchers: Sequence[Watcher] = (),
    progress: Progress | None = None,
) -> Runtime:
    """Open a model and put its hot set into fast memory.

    ``model``: a Hugging Face directory or hub id of safetensors. ``fast_memory`` (bytes, or "2GiB") or
    ``ecr`` (share of the routed experts) set the hot set's size; with neither it is chosen to fit this
    machine. ``policy``: a name of ``POLICIES``, ``module:Class``, or a policy object; ``profile``: a folder
    with what other traffic taught; ``predictor``: that of a trained predictor, for policies that forecast.
    ``trace``: record the routing into this file, ``trace_token_ids`` with the
    tokens' ids, ``trace_distances`` with how well the next layer's input and routing can be told.
    ``hardware``: what things cost on this machine, a file of ``daop calibrate`` (None: a calibration saved
    before, or a rule of thumb; the device cuda measures when it starts). ``watchers`` are told all that
    happens, for instance a ``runtime.timeline.Timeline``. ``dtype``: that of everything but the routed
    experts, which are computed as stored. ``context`` and ``batch`` are what the KV cache is planned for.
    ``threads`` sets how many compute, for torch as a whole. Raises DaopError with the remedy when something
    does not fit.
    """
    config = RunConfig.from_mapping(
        {
            "model": str(model),
            "device": device,
            "policy": policy if isinstance(policy, str) else type(policy).__name__,
            "policy_options": policy_options or {},
            "fast_memory": fast_memory,
            "ecr": ecr,
            "direct_io": direct_io,
            "dtype": str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
            "threads": threads,
            "context": context,
            "batch": batch,
            "seed": seed,
            "profile": None if profile is None else str(profile),
            "predictor": None if predictor is None else str(predictor),
            "trace": None if trace is None else str(trace),
            "trace_token_ids": trace_token_ids,
            "trace_distances": trace_distances,
            "hardware": hardware,
        }
    )
    made = policy if isinstance(policy, Policy) else None
    return _open(config, made, watchers, progress or (lambda _, __: None))


def _open(config: RunConfig, policy: Policy | None, watchers: Sequence[Watcher], say: Progress) -> Runtime:
    """``policy`` None: the one that ``config`` names."""
    torch.manual_seed(config.seed)
    threads = config.threads
    if threads is None and not asked_threads():  # torch knows nothing of quotas
        threads = min(torch.get_num_threads(), read_cpu().cores)
    if threads is not None:
        torch.set_num_threads(threads)
    say("reading the checkpoint's headers", 0.0)
    checkpoint = open_checkpoint(config.model)
    chosen = policy or _policy(config, checkpoint)
    costs, costs_from = _costs(config, checkpoint)
    wishes = Wishes(
        fast_memory=config.fast_memory,
        ecr=config.ecr,
        context=config.context,
        batch=config.batch,
        dtype=config.dtype,
        direct_io=config.direct_io,
        hardware=costs,
    )
    device = find_device(config.device, checkpoint, wishes)
    if config.trace_distances and not chosen.exact:
        raise DaopError("--distances are those of an exact run: record them with an exact policy")
    recorder = None if config.trace is None else _recorder(config.trace, config, checkpoint)
    say("loading everything but the experts", 0.1)
    try:
        return Runtime(
            checkpoint,
            device,
            chosen,
            policy_name=config.policy,
            dtype=config.dtype,
            costs_from=costs_from,
            recorder=recorder,
            forecasts=recorder if config.trace_distances else None,
            watchers=watchers,
            progress=say,
        )
    except BaseException:
        if recorder is not None:
            recorder.keep_partial()
        raise


def _policy(config: RunConfig, checkpoint: Checkpoint) -> Policy:
    taught = open_profile(config.profile, config.predictor, checkpoint.geometry)
    policy = make_policy(config.policy, taught, config.policy_options)
    if policy.needs_future:
        raise DaopError(
            f"--policy {config.policy} must know the future, which only a simulated run does: daop compare"
        )
    return policy


def _costs(config: RunConfig, checkpoint: Checkpoint) -> tuple[Hardware | None, str]:
    """What things cost and where that is from, so that policies decide by this machine."""
    if config.device != "host":
        if config.hardware is not None:
            raise DaopError("--hardware is for --device host: the device cuda measures itself at every start")
        return None, "measurements at the start"
    from daop.calibration import costs_for

    return costs_for(checkpoint, config.hardware)


def _recorder(path: str, config: RunConfig, checkpoint: Checkpoint) -> TraceRecorder:
    from daop.training.recorder import TraceRecorder

    source = {
        "engine": "daop",
        "model": checkpoint.path.name,
        "model_type": checkpoint.skeleton.model_type,
        "policy": config.policy,
    }
    return TraceRecorder(
        path,
        checkpoint.geometry,
        source=source,
        store_token_ids=config.trace_token_ids,
        store_forecasts=config.trace_distances,
    )
