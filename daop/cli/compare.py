"""``daop compare``: which placement policy is fastest for this traffic, budget and machine, and why."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from daop.cli.output import Output, write_whole
from daop.core import DaopError

POLICIES = "static,static_frequency,lru,balanced,adaptive,optimum"
CSV = (
    *("policy", "hardware", "ecr", "batch", "tokens_per_second", "hit_rate", "ratio_to_best_static"),
    *("ratio_to_optimum", "ttft_ms"),
)


def compare(
    trace: Annotated[Path | None, typer.Option(help="Simulate this recorded traffic (a daop trace).")] = None,
    hardware: Annotated[
        str, typer.Option(help="Simulated machines: profile names or .toml files, comma-separated.")
    ] = "rtx4090",
    ecr: Annotated[
        str, typer.Option(help="Shares of the experts that fit in fast memory, comma-separated.")
    ] = "0.125,0.25,0.5",
    policies: Annotated[
        str, typer.Option(help="Policies, comma-separated; 'all' for every exact one.")
    ] = POLICIES,
    profile: Annotated[
        Path | None,
        typer.Option(help="A saved profile. Without: most of the trace is learnt from, a fifth scored."),
    ] = None,
    expert_bytes: Annotated[
        str | None, typer.Option(help="Bytes of one expert as stored, e.g. 13.2MB.")
    ] = None,
    weight_bits: Annotated[float, typer.Option(min=1, max=64, help="Bits of one stored weight.")] = 16.0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in flight at once.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Use so many tokens of the trace.")] = None,
    model: Annotated[str | None, typer.Option(help="Measure with this model on this machine.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts for --model, text or JSONL.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="With --model: how often each policy runs.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --model: tokens per prompt.")] = 64,
    direct_io: Annotated[bool, typer.Option(help="With --model: read past the page cache.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="With --trace: the first policy's first passes as a Chrome trace.")
    ] = None,
    csv_file: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
) -> None:
    """Compare static with dynamic placement: simulated from a trace, or measured with a model."""
    output = Output(json)
    if (trace is None) == (model is None):
        raise DaopError("give either --trace, to simulate, or --model and --prompts, to measure here")
    from daop import comparison

    names = comparison.policies_of(policies)
    shares = comparison.numbers_of(ecr, "--ecr")
    if model is not None:
        from daop import measured_comparison

        rows = measured_comparison.measure(
            model, prompts, shares, names, repeats=repeats, max_new_tokens=max_new_tokens,
            direct_io=direct_io, profile=profile, told=lambda step, share: output.say(step, style="dim"),
        )  # fmt: skip
        document: dict[str, Any] = {"rows": rows, "simulated": False}
    else:
        assert trace is not None
        document = _simulated(
            output,
            trace,
            hardware,
            shares,
            names,
            profile,
            expert_bytes,
            weight_bits,
            batch,
            tokens,
            timeline,
        )
    output.table(table_of(document["rows"]))
    if csv_file is not None:
        write_csv(Path(csv_file), document["rows"])
    output.json(document)


def _simulated(
    output: Output,
    trace: Path,
    hardware: str,
    shares: list[float],
    names: list[str],
    profile: Path | None,
    expert_bytes: str | None,
    weight_bits: float,
    batch: int,
    tokens: int | None,
    timeline: Path | None,
) -> dict[str, Any]:
    from daop import comparison
    from daop.hardware import load
    from daop.runtime.profile import Profile
    from daop.training.parquet import read_trace
    from daop.units import parse_size

    machines = [load(name.strip()) for name in hardware.split(",") if name.strip()]
    if not machines:
        raise DaopError("--hardware names no machine")
    recorded = read_trace(trace)
    size = None if expert_bytes is None else parse_size(expert_bytes, "--expert-bytes")
    geometry = comparison.sized(recorded.geometry, size)
    if profile is not None:
        known: Profile | None = Profile.load(profile, geometry)
    elif len(recorded.grouped().sequences) > 1:
        output.say("learning a profile from four fifths of the sequences ...", style="dim")
        known, recorded = comparison.fitted(recorded, geometry)
    else:
        known = None
    scored = recorded.grouped()
    traffic = comparison.traffic_of(scored if tokens is None else scored.take(slice(0, tokens)), geometry)
    rows: list[dict[str, Any]] = []
    with output.progress() as told:
        for machine in machines:
            for share in shares:
                setting = comparison.Setting(
                    hardware=machine, ecr=share, batch=batch, weight_bits=weight_bits
                )
                rows += comparison.simulate(traffic, known, setting, names, told)
    if timeline is not None:
        setting = comparison.Setting(
            hardware=machines[0], ecr=shares[0], batch=batch, weight_bits=weight_bits
        )
        write_whole(timeline, comparison.timeline(traffic, known, setting, names[0]))
    return {
        "rows": rows,
        "simulated": True,
        "tokens": len(traffic.ids),
        "hardware": {m.hardware.name: {"about": m.about, "derived": sorted(m.derived)} for m in machines},
        "learnt_from": str(profile) if profile else "four fifths of the trace's sequences" if known else None,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a person: one line per policy, grouped by machine and budget."""
    from daop.report.tables import moved

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("machine", "ECR", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("tok/s", "x static", "x opt.", "hits", "stall", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.caption = "x static, x opt.: of the best static, of the optimum; stall: ms a token; GB: moved"
    last: tuple[str, float] | None = None
    for row in rows:
        here = (str(row["hardware"]), float(row["ecr"]))
        if last is not None and here != last:
            table.add_section()
        tokens = max(1, int(row["tokens"]))
        table.add_row(
            here[0] if here != last else "",
            f"{here[1]:g}" if here != last else "",
            str(row["policy"]),
            f"{row['tokens_per_second']:.1f}",
            _ratio(row["ratio_to_best_static"]),
            _ratio(row["ratio_to_optimum"]),
            f"{row['hit_rate']:.3f}",
            f"{sum(row['stall_ms'].values()) / tokens:.2f}",
            f"{moved(row) / 1e9:.1f}",
        )
        last = here
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line per row; nested figures get dotted names."""
    import io

    flat = [_flatten(row) for row in rows]
    names = list(dict.fromkeys([*CSV, *(name for row in flat for name in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_whole(path, text.getvalue())


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            out.update(_flatten(value, f"{prefix}{name}."))
        elif not isinstance(value, list):
            out[prefix + name] = value
    return out
