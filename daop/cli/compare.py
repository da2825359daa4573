"""``daop compare``: which placement policy is fastest for this traffic, budget and machine, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Context, Option

from daop.cli import options
from daop.cli.inputs import check_file, check_folder, check_machines
from daop.cli.output import Output, check_output
from daop.core import DaopError
from daop.policy_quality import refuse_approximate

POLICIES = "static,static_frequency,lru,balanced,adaptive"


def compare(
    ctx: Context,
    trace: Annotated[Path | None, Option(help="Simulate this recorded traffic (a daop trace).")] = None,
    hardware: Annotated[
        str | None,
        Option(
            help="Simulated machines: profile names or .toml files, comma-separated [rtx4090]. "
            "With --model: the .toml of this one."
        ),
    ] = None,
    ecr: Annotated[
        str, Option(help="Shares of the experts that fit in fast memory, comma-separated.")
    ] = "0.125,0.25,0.5",
    policies: Annotated[
        str | None, Option(help=f"Policies, comma-separated; 'all' for every exact one. [{POLICIES}]")
    ] = None,
    profile: Annotated[
        Path | None,
        Option(help="A saved profile. Without: most of the trace is learnt from, a fifth scored."),
    ] = None,
    predictor: options.PredictorFolder = None,
    expert_bytes: Annotated[str | None, Option(help="Bytes of one expert as stored, e.g. 13.2MB.")] = None,
    weight_bits: Annotated[
        float | None, Option(min=1, max=64, help="Bits of one stored weight. [the profile's, else 16]")
    ] = None,
    format_: Annotated[
        str | None,
        Option(
            "--format",
            help="With --trace: experts in these formats side by side, in the same memory: keep,int8,int4.",
        ),
    ] = None,
    batch: Annotated[int, Option(min=1, help="Sequences in flight at once.")] = 1,
    tokens: Annotated[int | None, Option(min=1, help="Use so many tokens of the trace.")] = None,
    model: Annotated[
        list[str] | None,
        Option(
            help="Measure with this model on this machine; several, of other formats: in the same memory."
        ),
    ] = None,
    prompts: Annotated[Path | None, Option(help="Prompts for --model, text or JSONL.")] = None,
    repeats: Annotated[int, Option(min=1, help="With --model: how often each policy runs.")] = 3,
    max_new_tokens: Annotated[int, Option(min=1, help="With --model: tokens per prompt.")] = 64,
    device: Annotated[
        str, Option(help="With --model or --quality-model: where experts are computed, host or cuda.")
    ] = "host",
    direct_io: Annotated[bool, Option(help="With --model: read past the page cache.")] = False,
    timeline: Annotated[
        Path | None, Option(help="With --trace: the first policy's first passes as a Chrome trace.")
    ] = None,
    quality_model: Annotated[
        str | None,
        Option(metavar="MODEL", help="With --trace: measure quality with it, on the answers to --prompts."),
    ] = None,
    exact: options.Exact = False,
    html: options.Html = None,
    force: options.Force = False,
    csv_file: Annotated[Path | None, Option("--csv", metavar="FILE", help="Write the rows as CSV.")] = None,
    json: options.Json = None,
) -> None:
    """Compare static with dynamic placement: simulated from a trace, or measured with a model."""
    output = Output(json)
    if (trace is None) == (not model):
        raise DaopError("give either --trace, to simulate, or --model and --prompts, to measure here")
    if quality_model is not None and (trace is None or prompts is None):
        raise DaopError("--quality-model is for --trace, and needs --prompts: what its answers are asked for")
    if format_ is not None and model:
        raise DaopError("--format is simulated: pack the model, and give --model once for each folder")
    if device != "host" and not model and quality_model is None:
        raise DaopError("--device is for --model or --quality-model: a simulated machine is --hardware's")
    check_file("--trace", trace)
    check_file("--prompts", prompts)
    check_folder("--profile", profile)
    check_folder("--predictor", predictor)
    check_machines(hardware)
    check_output("--html", html, force)
    check_output("--timeline", timeline, force)
    check_output("--csv", csv_file, force=True)
    from daop import comparison
    from daop.cli.compare_runs import Choice, judge, measured, simulated
    from daop.cli.compare_show import Pictures, show, write

    usual = POLICIES if model else f"{POLICIES},optimum"
    choice = Choice(
        names=comparison.policies_of(policies or usual, real=bool(model)),
        shares=comparison.numbers_of(ecr, "--ecr"),
        profile=profile,
        predictor=predictor,
        hardware=hardware,
        device=device,
        max_new_tokens=max_new_tokens,
        prompts=prompts,
        judged=quality_model,
        pictures=Pictures() if html is not None else None,
    )
    if exact:
        refuse_approximate(choice.names)
    if model:
        document = measured(output, model, choice, repeats=repeats, direct_io=direct_io)
    else:
        sizes = (expert_bytes, weight_bits, tokens, batch)
        document = simulated(output, Path(str(trace)), choice, sizes, format_, timeline)
    judge(output, document, choice, model)
    show(output, document)
    write(ctx, document, choice.pictures, csv_file, html)
    output.json(document)
