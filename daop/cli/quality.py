"""``daop quality``: what an approximate policy, or another version of a model, costs in quality."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from daop.cli import options
from daop.cli.inputs import check_file, check_folder
from daop.cli.output import Output, mended
from daop.config import DEFAULT_POLICY, RunConfig, fast_memory_bytes, policy_options
from daop.core import DaopError
from daop.policy_quality import REFERENCE

if TYPE_CHECKING:
    from daop.api import Runtime
    from daop.quality import Batch, Quality, Spool


@dataclass(frozen=True, kw_only=True)
class Material:
    """What is scored: windows of a ``text``, or the exact run's answers to ``prompts``."""

    text: Path | None = None
    prompts: Path | None = None
    window: int = 160
    prefill: int = 32
    max_new_tokens: int = 128
    limit: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if (self.text is None) == (self.prompts is None):
            raise DaopError("give either --text FILE or --prompts FILE: what is to be scored")
        if self.text is not None and self.window < self.prefill + 2:
            raise DaopError(f"--window {self.window} leaves nothing to score after --prefill {self.prefill}")


def quality(
    model: options.Model,
    text: Annotated[
        Path | None, Option(metavar="FILE", help="A text; it is cut into windows that are scored.")
    ] = None,
    prompts: Annotated[
        Path | None, Option(metavar="FILE", help="Prompts; the exact run's own answers are scored.")
    ] = None,
    policy: options.Policy = DEFAULT_POLICY,
    policy_option: options.PolicyOption = None,
    tolerance: options.Tolerance = None,
    candidate: Annotated[
        str | None,
        Option(metavar="MODEL", help="Judge this version of the model instead, a packed one, say."),
    ] = None,
    ecr: options.Ecr = None,
    fast_memory: options.FastMemory = None,
    profile: options.ProfileFolder = None,
    window: Annotated[int, Option(min=3, help="With --text: tokens of a window.")] = 160,
    prefill: Annotated[
        int, Option(min=1, help="With --text: tokens of it that are prefill, not scored.")
    ] = 32,
    max_new_tokens: Annotated[int, Option(min=2, help="With --prompts: tokens of each answer.")] = 128,
    limit: Annotated[int | None, Option(min=1, help="Use so many windows or prompts.")] = None,
    device: options.Device = "host",
    batch: Annotated[int, Option(min=1, help="With --text: windows side by side.")] = 1,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    seed: Annotated[int, Option(min=0, help="Seed of the intervals' resampling.")] = 0,
    json: options.Json = None,
) -> None:
    """Perplexity, KL divergence and changed tokens against the exact run, fed the same text."""
    output = Output(json)
    material = Material(
        text=text,
        prompts=prompts,
        window=window,
        prefill=prefill,
        max_new_tokens=max_new_tokens,
        limit=limit,
        batch=batch,
    )
    check_file("--text", text)
    check_file("--prompts", prompts)
    check_folder("--profile", profile)
    from daop import machine
    from daop.runtime.policies.base import make_policy

    chosen = policy_options(policy_option or [], tolerance)
    exactly = make_policy(policy, options=chosen).exact  # what it refuses is said before a model is loaded
    exact = RunConfig(
        model=model,
        device=device,
        policy=REFERENCE,
        fast_memory=fast_memory_bytes(fast_memory),
        ecr=ecr,
        dtype=dtype,
        threads=threads,
        batch=batch,
        seed=seed,
    ).resolved(machine.read_cpu())
    judged = dataclasses.replace(
        exact,
        model=candidate or model,
        policy=policy,
        policy_options=chosen,
        profile=None if profile is None else str(profile),
    )
    with mended():
        found = judge(output, exact, judged, material)
    output.table(quality_table({policy: found}))
    output.json(
        {
            "model": exact.model,
            "candidate": judged.model,
            "policy": policy,
            "device": device,
            "policy_options": chosen,
            "exact": exactly,
            "ecr": ecr,
            **found.as_dict(),
        }
    )


def judge(output: Output, exact: RunConfig, judged: RunConfig, material: Material) -> Quality:
    """The reference first, its logits on disk; then the judged run."""
    from daop.cli.run import load
    from daop.quality import Spool, measure, teacher

    with tempfile.TemporaryDirectory(prefix="daop-quality-") as folder:
        spool = Spool(Path(folder))
        batches = _refer(output, exact, spool, material)  # its model is gone when it returns
        with load(judged, output) as runtime:
            return measure(spool, teacher(runtime), batches, seed=exact.seed)


def _refer(output: Output, exact: RunConfig, spool: Spool, material: Material) -> list[Batch]:
    """The exact run, its logits kept in ``spool``; what is to be fed to the judged one."""
    from daop.cli.run import load
    from daop.quality import answered, teacher

    with load(exact, output) as runtime:
        if material.text is not None:
            batches = _windows(runtime, material.text, material)
        else:
            assert material.prompts is not None
            batches = answered(runtime, material.prompts, material.max_new_tokens, material.limit)
        score = teacher(runtime)
        with output.progress() as told:
            for number, one in enumerate(batches):
                told("the exact run", number / len(batches))
                spool.keep(one, score(one))
    return batches


def _windows(runtime: Runtime, path: Path, material: Material) -> list[Batch]:
    from daop.quality import windows

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DaopError(f"cannot read the text in {path}: {error}") from error
    if runtime.tokenizer is None:
        raise DaopError("this model has no tokenizer, so it cannot be given text: add its tokenizer.json")
    tokens = runtime.tokenizer(text, verbose=False)["input_ids"]  # longer than any context, but it is cut
    found = windows(
        tokens, length=material.window, prompt=material.prefill, batch=material.batch, limit=material.limit
    )
    if not found:
        raise DaopError(
            f"{path} has {len(tokens)} tokens, fewer than one --window of {material.window}: "
            "give a longer text"
        )
    return found


def quality_table(found: dict[str, Quality]) -> Table:
    """A column for each policy, a line for each figure, with its 95 % interval."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")
    lines: Sequence[tuple[str, str, float]] = (
        ("perplexity, exact run", "perplexity_reference", 1),
        ("perplexity", "perplexity", 1),
        ("KL, mean (nats/token)", "mean_kl", 1),
        ("KL, 99th percentile", "p99_kl", 1),
        ("changed greedy tokens, %", "changed_tokens", 100),
        ("approximated expert calls, %", "approximated", 100),
    )
    for label, name, scale in lines:
        table.add_row(label, *(_interval(getattr(one, name), scale) for one in found.values()))
    counts = next(iter(found.values()))
    table.caption = f"{counts.tokens} decode steps of {counts.sequences} sequences; [95 % interval]"
    return table


def _interval(value: Any, scale: float) -> str:
    ends = [value.value, value.low, value.high]
    shown = ["-" if end is None else f"{end * scale:.4g}" for end in ends]
    return shown[0] if value.low is None else f"{shown[0]} [{shown[1]}, {shown[2]}]"
