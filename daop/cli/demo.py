"""``daop demo``: a model whose experts do not fit, with a hot set that changes, beside a static placement."""

from __future__ import annotations

import contextlib
import gc
import importlib.resources
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer import Option

from daop import machine
from daop.cli import options
from daop.cli.output import Output, mended
from daop.cli.run import load, shorten
from daop.config import DEFAULT_POLICY, RunConfig
from daop.core import DaopError
from daop.prompts import Prompt, encode, read_prompts
from daop.units import format_size, parse_size

if TYPE_CHECKING:
    from daop.generation import Generation

BASELINE = "static"

HotSet = Sequence[Sequence[int]]
"""For every MoE layer, the experts resident."""


def demo(
    policy: Annotated[str, Option(help="The dynamic policy that static is compared with.")] = DEFAULT_POLICY,
    ecr: Annotated[float, Option(help="Share of the experts that fast memory holds.")] = 0.25,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to generate for each prompt.")] = 32,
    expert_bytes: Annotated[
        str, Option(metavar="SIZE", help="Size to which all experts together are widened; 0: as shipped.")
    ] = "384MiB",
    prompts: Annotated[Path | None, Option(metavar="FILE", help="Prompts of your own.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Use only so many of the prompts.")] = 8,
    json: options.Json = None,
) -> None:
    """Watch a model whose experts do not fit in memory generate text."""
    from daop.report.tables import moved, run_table

    output = Output(json)
    size = parse_size(expert_bytes, "--expert-bytes")
    with importlib.resources.as_file(importlib.resources.files("daop.assets")) as assets:
        asked = read_prompts(prompts or assets / "demo" / "prompts.jsonl", limit)
        with mended(), widened(assets / "demo", size, output) as model:
            direct = not machine.read_disk(model).in_memory
            runs = []
            for name in (policy, BASELINE):
                config = RunConfig(model=str(model), policy=name, ecr=ecr, direct_io=direct)
                config = config.resolved(machine.read_cpu())
                reset_peak()
                runs.append(_run(config, asked, max_new_tokens, output, show=name == policy))
    same = runs[0]["token_ids"] == runs[1]["token_ids"]
    output.table(run_table(runs, title=f"{len(asked)} prompts, {max_new_tokens} tokens each, ECR {ecr:g}"))
    output.json({"same_tokens": same, "runs": runs})
    if not same:
        output.say("The placements gave DIFFERENT tokens, which must never be: report it.", "bold red")
        raise typer.Exit(1)
    count = sum(len(ids) for ids in runs[0]["token_ids"])
    faster = runs[0]["tokens_per_second"] / (runs[1]["tokens_per_second"] or 1)
    less = moved(runs[0]) / max(1, moved(runs[1]))
    output.say(f"{policy} decodes {faster:.2f} times as fast as {BASELINE}, reading {less:.0%} of its bytes.")
    output.say(f"Both placements gave the same {count} tokens: placement changes speed, never the output.")


def _run(
    config: RunConfig, asked: Sequence[Prompt], max_new_tokens: int, output: Output, *, show: bool
) -> dict[str, Any]:
    """All prompts under one policy: with text and hot set as they come, or, once known, without."""
    from daop.report.figures import run_figures

    batches: list[list[Generation]] = []
    changes: list[int] = []
    with load(config, output) as runtime:
        fit, total = sum(runtime.plan.slots), runtime.geometry.total
        output.say(f"Policy {config.policy}: {fit} of {total} experts fit into fast memory", style="bold")
        before = runtime.hot_set()
        for number, prompt in enumerate(asked, start=1):
            title = shorten(f"[{number}/{len(asked)}] {prompt.title}")
            ids = encode(prompt.messages, runtime.tokenizer, prompt.source)
            output.say(title, style="bold cyan")
            on_text = (lambda _, text: output.stream(text)) if show else None
            batches.append(runtime.generate([ids], max_new_tokens, on_text=on_text))
            after = runtime.hot_set()
            changes.append(changed(before, after))
            if show:
                output.say()
                output.console.print(hot_set_map(before, after, runtime.geometry.experts))
            before = after
        figures = run_figures(runtime.statistics(), batches)
    return figures | {"hot_set_changes": changes}


def reset_peak() -> None:
    """Let the process's peak memory start again, without the run before, where the kernel lets us."""
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def changed(before: HotSet, after: HotSet) -> int:
    """How many experts are resident now and were not before."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def hot_set_map(before: HotSet, after: HotSet, experts: Sequence[int]) -> Text:
    """A line a layer, a mark an expert: resident since before, newly resident, given up."""
    text = Text("hot set   ")
    text.append("■", "green").append(" came  ")
    text.append("■", "blue").append(" stayed  ")
    text.append("□", "dim").append(" left\n")
    for layer, count in enumerate(experts):
        old, new = set(before[layer]), set(after[layer])
        text.append(f"layer {layer:3} ")
        for expert in range(count):
            if expert in new:
                text.append("■", "blue" if expert in old else "green")
            else:
                text.append("□" if expert in old else "·", "dim")
        text.append(f"  {len(new - old)} came, {len(old - new)} left\n")
    return text


@contextmanager
def widened(model: Path, total_bytes: int, output: Output) -> Iterator[Path]:
    """The model with experts of a realistic size, in a folder that is removed afterwards.

    The shipped experts are small. Zeros appended to their inner size change the bytes to move, and
    neither an output nor the routing.
    """
    if not (model / "config.json").is_file():
        raise DaopError(f"the demo's model is not in {model}: install daop again, with its data files")
    if not total_bytes:
        yield model
        return
    with scratch_folder(total_bytes) as folder:
        with output.progress() as progress:
            progress("importing torch", 0.0)
            from daop.widen import widen

            done = widen(model, folder / "model", target_bytes=total_bytes, progress=progress)
        output.say(f"The shipped model, its experts widened with zeros to {format_size(done.expert_bytes)}.")
        yield done.folder


@contextmanager
def scratch_folder(nbytes: int) -> Iterator[Path]:
    """A new folder on a disk with room for ``nbytes``, removed afterwards even if interrupted."""
    tried = []
    for parent in (Path(tempfile.gettempdir()), Path.home() / ".cache", Path.cwd()):
        disk = machine.read_disk(parent)
        tried.append(f"{parent} ({format_size(disk.free)} free{', in memory' if disk.in_memory else ''})")
        if disk.in_memory or disk.free < nbytes * 1.1 + (256 << 20):
            continue
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="daop-demo-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    raise DaopError(
        f"the demo needs a disk with {format_size(nbytes)} to spare; looked at {', '.join(tried)}: set "
        "TMPDIR to a folder on one, or give --expert-bytes 0"
    )
