"""``daop compare``: which placement policy is fastest for this traffic, budget and machine, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from daop.cli import options
from daop.cli.output import Output, check_output, write_whole
from daop.core import DaopError, Geometry
from daop.policy_quality import add_quality, measure_policies, refuse_approximate

if TYPE_CHECKING:
    from daop import comparison
    from daop.runtime.history import History
    from daop.runtime.watching import Watcher

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
    model: Annotated[str | None, Option(help="Measure with this model on this machine.")] = None,
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
    csv_file: Annotated[str | None, Option("--csv", metavar="FILE", help="Write the rows as CSV.")] = None,
    json: options.Json = None,
) -> None:
    """Compare static with dynamic placement: simulated from a trace, or measured with a model."""
    output = Output(json)
    if (trace is None) == (model is None):
        raise DaopError("give either --trace, to simulate, or --model and --prompts, to measure here")
    if quality_model is not None and (trace is None or prompts is None):
        raise DaopError("--quality-model is for --trace, and needs --prompts: what its answers are asked for")
    if format_ is not None and model is not None:
        raise DaopError("--format is simulated: pack the model and measure DIR with --model instead")
    if device != "host" and model is None and quality_model is None:
        raise DaopError("--device is for --model or --quality-model: a simulated machine is --hardware's")
    check_output("--html", html, force)
    check_output("--timeline", timeline, force)
    from daop import comparison
    from daop.report.about import about, command_line
    from daop.report.ranking import LEGEND, QUALITY_LEGEND, as_csv, quality_table, ranking

    pictures = Pictures() if html is not None else None
    usual = POLICIES if model is not None else f"{POLICIES},optimum"
    names = comparison.policies_of(policies or usual, real=model is not None)
    if exact:
        refuse_approximate(names)
    shares = comparison.numbers_of(ecr, "--ecr")
    if model is not None:
        from daop import measured_comparison

        rows = measured_comparison.measure(
            model,
            prompts,
            shares,
            names,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            direct_io=direct_io,
            profile=profile,
            hardware=hardware,
            device=device,
            told=lambda step, _: output.say(step, style="dim"),
            watch=pictures,
        )
        for row in rows:
            if row["differs"]:
                output.say(
                    f"{row['policy']} at ECR {row['ecr']:g}: {row['differs']} answers differ from the first "
                    "policy's: CPU and GPU round differently, and one token changes those behind it"
                )
        subject = {"model": model, "prompts": str(prompts), "repeats": repeats, "device": device}
        document: dict[str, Any] = {"rows": rows, "simulated": False, "subject": subject}
    else:
        settings = comparison.settings(hardware or "rtx4090", shares, batch, weight_bits)
        if profile is None:
            output.say("learning a profile from four fifths of the sequences ...", style="dim")
        traffic = comparison.open_traffic(Path(str(trace)), profile, expert_bytes, tokens)
        for warning in comparison.mismatches(settings, traffic.traffic.geometry):
            output.say(warning, style="yellow")
        document = _in_formats(output, format_, traffic, settings, names, timeline, pictures)
        document["subject"] = {"trace": str(trace), "tokens": len(traffic.traffic.ids), "batch": batch}
    judged = model if model is not None else quality_model
    if judged is not None and prompts is not None and not all(row["exact"] for row in document["rows"]):
        add_quality(
            document["rows"],
            measure_policies(
                judged,
                prompts,
                shares,
                names,
                max_new_tokens=max_new_tokens,
                options={"profile": profile, "device": device},
                told=lambda step: output.say(step, style="dim"),
            ),
        )
    document["about"] = about(command_line(ctx))
    for name in dict.fromkeys(row.get("format") for row in document["rows"]):
        if name is not None:
            output.say(f"experts in format {name}", style="bold")
        for table in ranking([row for row in document["rows"] if row.get("format") == name]):
            output.table(table)
    output.say(LEGEND, style="dim")
    approximate = quality_table(document["rows"])
    if approximate is not None:
        output.table(approximate)
        output.say(QUALITY_LEGEND, style="dim")
    if csv_file is not None:
        write_whole(Path(csv_file), as_csv(document["rows"]))
    if html is not None and pictures is not None:
        from daop.report.compare_page import compare_page

        write_whole(html, compare_page(document, pictures.geometry, pictures.histories))
    output.json(document)


class Pictures:
    """Watches every run for the report."""

    def __init__(self) -> None:
        self.histories: dict[tuple[str, float, str], History] = {}

    def __call__(self, machine: str, share: float, policy: str) -> list[Watcher]:
        from daop.runtime.history import History

        history = self.histories[machine, share, policy] = History()
        return [history]

    @property
    def geometry(self) -> Geometry | None:
        return next((history.geometry for history in self.histories.values()), None)


def _in_formats(
    output: Output,
    format_: str | None,
    recorded: comparison.Recorded,
    settings: list[comparison.Setting],
    names: list[str],
    timeline: Path | None,
    pictures: Pictures | None,
) -> dict[str, Any]:
    """The comparison once for each format, rows that say which; without one, as the trace has it."""
    if format_ is None:
        return _simulated(output, recorded, settings, names, timeline, pictures)
    from daop.formats import formats_of, in_formats

    document: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, traffic, fitting in in_formats(formats_of(format_), recorded, settings):
        found = _simulated(output, traffic, fitting, names, timeline if not rows else None, pictures)
        rows += [{"format": name, **row} for row in found["rows"]]
        document = document or found
    return {**document, "rows": rows}


def _simulated(
    output: Output,
    recorded: comparison.Recorded,
    settings: list[comparison.Setting],
    names: list[str],
    timeline: Path | None,
    pictures: Pictures | None,
) -> dict[str, Any]:
    from daop import comparison

    traffic, profile = recorded.traffic, recorded.profile
    rows: list[dict[str, Any]] = []
    with output.progress() as told:
        for setting in settings:
            rows += comparison.simulate(traffic, profile, setting, names, told, pictures)
    if timeline is not None:
        write_whole(timeline, comparison.timeline(traffic, profile, settings[0], names[0]))
    machines = {setting.hardware.hardware.name: setting.hardware for setting in settings}
    return {
        "rows": rows,
        "simulated": True,
        "tokens": len(traffic.ids),
        "hardware": {name: {"about": m.about, "derived": sorted(m.derived)} for name, m in machines.items()},
        "learnt_from": recorded.learnt_from,
    }
