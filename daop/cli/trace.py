"""``daop trace``: record, import and inspect routing traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daop.cli import options
from daop.cli.bars import bars
from daop.cli.inputs import check_folder
from daop.cli.output import Output

if TYPE_CHECKING:
    from daop.config import RunConfig
    from daop.prompts import Prompt

trace_app = typer.Typer(
    help="Record, import and inspect routing traces.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@trace_app.command("capture")
def capture(
    model: options.Model,
    prompts: options.PromptFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace file to write.")],
    max_new_tokens: options.MaxNewTokens = 64,
    limit: options.Limit = None,
    batch: options.Batch = 1,
    fast_memory: options.FastMemory = None,
    ecr: options.Ecr = None,
    direct_io: options.DirectIo = False,
    context: options.Context = 2048,
    token_ids: Annotated[
        bool, typer.Option(help="Also keep the tokens' ids. Whoever has them can read the text.")
    ] = False,
    features: Annotated[
        bool, typer.Option("--features", help="Also keep a sample of the routers' inputs beside the trace.")
    ] = False,
    feature_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="At most so much of them; tokens are drawn at random.")
    ] = "256MiB",
    distances: Annotated[
        bool,
        typer.Option(
            "--distances", help="Also keep how well the next layer is foretold: simulating bounded needs it."
        ),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --distances: the profile whose input correction is used."),
    ] = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """Run prompts through a model and record its routing, prefill and decode. No text is stored."""
    from daop import machine
    from daop.config import RunConfig, fast_memory_bytes
    from daop.core import DaopError
    from daop.prompts import read_prompts
    from daop.units import parse_size

    if output.exists() and not force:
        raise DaopError(f"{output} exists; name another -o, or replace it with --force")
    if features and batch > 1:
        raise DaopError("--features needs --batch 1: the rows of several sequences cannot be told apart")
    if profile is not None and not distances:
        raise DaopError("--profile is for --distances: leave it out, or give both")
    check_folder("--profile", profile)
    room = parse_size(feature_bytes, "--feature-bytes")
    asked = read_prompts(prompts, limit)
    config = RunConfig(
        model=model,
        fast_memory=fast_memory_bytes(fast_memory),
        ecr=ecr,
        direct_io=direct_io,
        context=context,
        batch=batch,
        trace=str(output),
        trace_token_ids=token_ids,
        trace_distances=distances,
        profile=None if profile is None else str(profile),
        seed=seed,
    ).resolved(machine.read_cpu())
    _record(config, asked, max_new_tokens, options.sampling(temperature), room if features else None)


def _record(
    config: RunConfig,
    asked: list[Prompt],
    max_new_tokens: int,
    sampling: dict[str, Any],
    feature_bytes: int | None,
) -> None:
    """Generate for all prompts, a batch at a time; ``feature_bytes`` None: keep no router inputs."""
    from daop.cli.output import mended
    from daop.cli.run import check_room, load
    from daop.prompts import encode
    from daop.training.features import FeatureTap, features_path

    out = Output(None)
    tokens = 0
    with mended(), load(config, out) as runtime:
        ids = [encode(prompt.messages, runtime.tokenizer, prompt.source) for prompt in asked]
        for prompt, tokens_of in zip(asked, ids, strict=True):
            check_room(tokens_of, prompt, config, max_new_tokens)
        tap = FeatureTap(runtime.model, max_bytes=feature_bytes) if feature_bytes is not None else None
        with out.progress() as told:
            for start in range(0, len(ids), config.batch):
                told(f"recording prompt {start + 1} of {len(ids)}", start / len(ids))
                batch = ids[start : start + config.batch]
                for answer in runtime.generate(batch, max_new_tokens, **sampling):
                    tokens += len(answer.prompt_ids) + len(answer.token_ids)
    if tap is not None:
        tap.close()
        tap.save(features_path(Path(str(config.trace))))
    out.say(f"{config.trace}: {len(ids)} sequences, {tokens} tokens of prompts and answers")


@trace_app.command("import")
def import_trace(
    source: Annotated[Path, typer.Argument(help="The trace as another engine recorded it.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace file to write.")],
    format: Annotated[str, typer.Option(help="Format of the source; `daop trace formats` lists them.")],
    array: Annotated[
        str | None, typer.Option(help="Which of the source's arrays, where it holds several.")
    ] = None,
    token_ids: Annotated[
        bool, typer.Option(help="Also keep the input tokens' ids, where the source has them.")
    ] = False,
    expert_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of one expert, where the source does not say.")
    ] = None,
    force: options.Force = False,
) -> None:
    """Convert another engine's routing trace."""
    from dataclasses import replace

    from daop.core import DaopError
    from daop.training.importers.base import IMPORTERS, ImportOptions
    from daop.training.writer import write_trace

    importer = IMPORTERS.get(format)
    if output.exists() and not force:
        raise DaopError(f"{output} exists; name another -o, or replace it with --force")
    if not source.exists():
        raise DaopError(f"no trace at {source}; check the path")
    trace = importer(source, ImportOptions(array=array, token_ids=token_ids)).validate(str(source))
    if expert_bytes is not None:
        geometry = replace(trace.geometry, expert_bytes=(expert_bytes,) * trace.geometry.layers)
        trace = replace(trace, geometry=geometry)
    write_trace(trace, output)
    g = trace.geometry
    Output(None).say(
        f"{output}: {len(trace)} rows, {g.layers} layers of {g.experts[0]} experts, top-{g.top_k}"
    )


@trace_app.command("counts")
def counts(
    path: Annotated[Path, typer.Argument(help="A trace of tokens.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace of counts to write.")],
    total: Annotated[bool, typer.Option("--total", help="One row for all sequences together.")] = False,
    force: options.Force = False,
) -> None:
    """Keep only how often each expert was chosen: a trace that can be passed on."""
    from daop.core import DaopError
    from daop.training.parquet import read_trace
    from daop.training.trace import counts_of
    from daop.training.writer import write_trace

    if output.exists() and not force:
        raise DaopError(f"{output} exists; name another -o, or replace it with --force")
    found = counts_of(read_trace(path))
    found = found.summed() if total else found
    write_trace(found.validate(f"{path}, counted"), output)
    Output(None).say(f"{output}: {len(found)} rows of counts; order, positions and phases are not in it")


@trace_app.command("formats")
def formats() -> None:
    """List the formats that can be imported."""
    from daop.training.importers.base import IMPORTERS

    for name, importer in IMPORTERS.items():
        typer.echo(f"{name:18} {(importer.__doc__ or '').strip().splitlines()[0]}")


@trace_app.command("info")
def info(
    path: Annotated[Path, typer.Argument(help="A trace file, or the name of a recording that was cut off.")],
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
) -> None:
    """Say what a trace holds and how its routing behaves."""
    from daop.training.info import describe
    from daop.training.parquet import read_any

    out = Output(json)
    found = describe(read_any(path))
    _print(out, path, found)
    out.json(found)


def _print(out: Output, path: Path, found: dict[str, Any]) -> None:
    g = found["geometry"]
    experts = sorted(set(g["experts"]))
    counts = str(experts[0]) if len(experts) == 1 else f"{experts[0]} to {experts[-1]}"
    out.say(f"{path}: {found['tokens']} tokens in {found['sequences']} sequences")
    out.say(f"geometry         {g['layers']} MoE layers of {counts} experts, top-{g['top_k']}")
    sizes = sorted(set(g["expert_bytes"]))
    out.say(f"bytes an expert  {', '.join(map(str, sizes)) if any(sizes) else 'not known'}")
    out.say(f"model            {g['fingerprint'] or found['source'].get('model', 'not known')}")
    if found["kind"] == "tokens":
        out.say(f"phases           {found['decode_tokens']} decode tokens, the rest prefill")
        out.say(f"not in the file  {', '.join(found['absent_columns']) or 'nothing'}")
        if not found["complete"]:
            out.say("This recording was cut off; its complete row groups were read.", style="yellow")
        if found["recorded_hit_rate"] is not None:
            out.say(f"recorded hits    {found['recorded_hit_rate']:.1%} of the decode lookups")
    skew = found["skew"]
    out.say()
    out.say("per layer, first to last")
    _line(out, "busiest expert", [s["busiest"] for s in skew])
    _line(out, "busiest quarter", [s["busiest_quarter"] for s in skew])
    _line(out, "evenness", [s["evenness"] for s in skew])
    if sum(s["unused"] for s in skew):
        out.say(f"{sum(s['unused'] for s in skew)} of {sum(g['experts'])} experts were never chosen")
    if found["kind"] == "tokens":
        _line(out, "as token before", [x or 0.0 for x in found["adjacent_overlap"]])
        out.say()
        out.say("tokens since the last use of a chosen expert")
        for row in found["reuse_distance"]:
            out.say(f"  {row['tokens']:>9}  {row['share']:6.1%}  {'█' * round(60 * row['share'])}")


def _line(out: Output, name: str, values: list[float]) -> None:
    """A row of small bars from 0 to the largest, with its extremes."""
    out.say(f"  {name:16} {bars(values)}  {min(values):.1%} to {max(values):.1%}")
