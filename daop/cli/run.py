"""``daop run``: generate text with a model whose experts may not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from daop import machine
from daop.cli import options
from daop.cli.inputs import check_folder, check_machines
from daop.cli.output import Output, check_output, mended
from daop.cli.pictures import RunPictures
from daop.config import DEFAULT_POLICY, RunConfig, fast_memory_bytes, policy_options
from daop.core import DaopError
from daop.policy_quality import refuse_approximate
from daop.prompts import Message, Prompt, encode, from_text, read_prompts
from daop.runtime.policies.base import POLICIES, make_policy

if TYPE_CHECKING:
    from daop.api import Runtime
    from daop.cli.live import LiveView
    from daop.generation import Generation
    from daop.runtime.watching import Watcher


def run(
    ctx: Context,
    model: options.Model,
    prompt: Annotated[list[str] | None, Option(help="A prompt; may be given several times.")] = None,
    prompts: options.Prompts = None,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 64,
    policy: options.Policy = DEFAULT_POLICY,
    policy_option: options.PolicyOption = None,
    tolerance: options.Tolerance = None,
    exact: options.Exact = False,
    fast_memory: options.FastMemory = None,
    ecr: options.Ecr = None,
    device: options.Device = "host",
    direct_io: options.DirectIo = False,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    context: options.Context = 2048,
    batch: options.Batch = 1,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    profile: options.ProfileFolder = None,
    predictor: options.PredictorFolder = None,
    hardware: options.Hardware = None,
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Record the routing (no text, no token ids) into a trace.")
    ] = None,
    live: Annotated[bool, Option("--live", help="Show what placement does while text streams.")] = False,
    html: options.Html = None,
    timeline: options.Timeline = None,
    force: options.Force = False,
    json: options.Json = None,
) -> None:
    """Generate text with a model of yours."""
    output = Output(json)
    check_folder("--profile", profile)
    check_folder("--predictor", predictor)
    check_machines(hardware)
    check_output("--html", html, force)
    check_output("--timeline", timeline, force)
    check_output("--trace", trace, force)
    asked = gather(prompt or [], prompts, limit)
    if exact:
        refuse_approximate([policy])
    chosen = policy_options(policy_option or [], tolerance)
    if chosen:
        make_policy(policy, options=chosen)  # what it refuses is said before a model is loaded
    if not POLICIES.get(policy).exact:  # a misspelt name is said here too, before a model is loaded
        output.say(f"--policy {policy}: the output is approximate; `daop quality` measures by how much")
    config = RunConfig(
        model=model,
        device=device,
        policy=policy,
        policy_options=chosen,
        fast_memory=fast_memory_bytes(fast_memory),
        ecr=ecr,
        direct_io=direct_io,
        dtype=dtype,
        threads=threads,
        context=context,
        batch=min(batch, len(asked)),
        seed=seed,
        profile=None if profile is None else str(profile),
        predictor=None if predictor is None else str(predictor),
        hardware=hardware,
        trace=None if trace is None else str(trace),
    ).resolved(machine.read_cpu())
    pictures = RunPictures(html, timeline)
    view = live_view(output) if live else None
    watchers = pictures.watchers if view is None else [*pictures.watchers, view]
    with mended(), load(config, output, watchers) as runtime:
        output.say(runtime.plan.reason, style="dim")
        output.say(f"costs by {runtime.costs_from}", style="dim")
        sampling = options.sampling(temperature)
        batches = converse(runtime, config, asked, max_new_tokens, output, sampling, view)
        pictures.write(ctx, model, report(runtime, batches, output))


def gather(texts: Sequence[str], file: Path | None, limit: int | None) -> list[Prompt]:
    """The prompts of the command line."""
    if bool(texts) == (file is not None):
        raise DaopError("give either --prompt TEXT (once or more) or --prompts FILE")
    if limit is not None and file is None:
        raise DaopError("--limit is for the prompts of a file: leave it out, or give --prompts FILE")
    return read_prompts(file, limit) if file is not None else [from_text(text) for text in texts]


def live_view(output: Output) -> LiveView | None:
    """The view, if there is a terminal to draw on."""
    if not output.console.is_terminal:
        output.say("--live needs a terminal: the figures come at the end", style="dim")
        return None
    from daop.cli.live import LiveView

    return LiveView(output)


def load(config: RunConfig, output: Output, watchers: Sequence[Watcher] = ()) -> Runtime:
    """The model, with progress shown while it is loaded."""
    with output.progress() as progress:
        progress("importing torch and transformers", 0.0)
        from transformers.utils import logging

        import daop

        logging.disable_progress_bar()  # ours says more
        return daop.load(config.model, **config.load_options(), watchers=watchers, progress=progress)


def converse(
    runtime: Runtime,
    config: RunConfig,
    asked: Sequence[Prompt],
    max_new_tokens: int,
    output: Output,
    sampling: dict[str, Any],
    live: LiveView | None = None,
) -> list[list[Generation]]:
    """Run every prompt, ``config.batch`` at a time, and the later turns of conversations after them.

    All prompts are turned into tokens and measured against ``--context`` before the first one runs.
    """
    for prompt in asked:
        check_room(encode(prompt.messages, runtime.tokenizer, prompt.source), prompt, config, max_new_tokens)
    batches: list[list[Generation]] = []
    for start in range(0, len(asked), config.batch):
        group = asked[start : start + config.batch]
        said: list[list[Message]] = [list(prompt.messages) for prompt in group]
        for turn in range(1 + max(len(prompt.turns) for prompt in group)):
            rows = [row for row, prompt in enumerate(group) if turn <= len(prompt.turns)]
            if turn:
                for row in rows:
                    said[row].append({"role": "user", "content": group[row].turns[turn - 1]})
            ids = []
            for row in rows:
                ids.append(encode(said[row], runtime.tokenizer, group[row].source))
                check_room(ids[-1], group[row], config, max_new_tokens)
            titles = [
                f"[{start + row + 1}/{len(asked)}] {' '.join(said[row][-1]['content'].split())}"
                for row in rows
            ]
            answers = _answer(runtime, ids, titles, max_new_tokens, output, sampling, live)
            for row, answer in zip(rows, answers, strict=True):
                said[row].append({"role": "assistant", "content": answer.text})
            batches.append(answers)
    return batches


def _answer(
    runtime: Runtime,
    ids: list[list[int]],
    titles: list[str],
    max_new_tokens: int,
    output: Output,
    sampling: dict[str, Any],
    live: LiveView | None,
) -> list[Generation]:
    """One call of generate: a single answer is shown as it comes, several after they are complete."""
    if live is not None:
        with live.show([shorten(title) for title in titles]) as on_text:
            answers = runtime.generate(ids, max_new_tokens, on_text=on_text, **sampling)
    elif len(ids) == 1:
        output.say(shorten(titles[0]), style="bold cyan")
        answers = runtime.generate(
            ids, max_new_tokens, on_text=lambda _, text: output.stream(text), **sampling
        )
        output.say("\n")
        return answers
    else:
        answers = runtime.generate(ids, max_new_tokens, **sampling)
    for title, answer in zip(titles, answers, strict=True):
        output.say(shorten(title), style="bold cyan")
        output.stream(answer.text)
        output.say("\n")
    return answers


def check_room(ids: Sequence[int], prompt: Prompt, config: RunConfig, max_new_tokens: int) -> None:
    """Raise DaopError if prompt and answer are more than memory is planned for."""
    need = len(ids) + max_new_tokens
    if need > config.context:
        raise DaopError(
            f"{prompt.source}: {len(ids)} tokens of prompt and --max-new-tokens {max_new_tokens} exceed the "
            f"--context {config.context} that memory is planned for: give --context {need}, or fewer tokens"
        )


def report(runtime: Runtime, batches: list[list[Generation]], output: Output) -> dict[str, Any]:
    """The closing table, and the same figures as JSON."""
    from daop.report.figures import run_figures
    from daop.report.tables import run_table

    figures = run_figures(runtime.statistics(), batches)
    output.table(run_table([figures]))
    output.json(figures)
    return figures


def shorten(text: str, width: int = 100) -> str:
    """At most ``width`` characters, without any that would move a terminal's cursor."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return clean if len(clean) <= width else clean[: width - 1] + "…"
