"""What ``daop compare`` runs: simulations of a trace, or a model, once for each format asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daop import comparison
from daop.cli.compare_show import Pictures
from daop.cli.output import Output, write_whole
from daop.policy_quality import add_quality, measure_policies

if TYPE_CHECKING:
    from daop.formats import InFormat

Sizes = tuple[str | None, float | None, int | None, int]
"""--expert-bytes, --weight-bits, --tokens and --batch."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What both kinds of comparison are told. ``judged``: the model that measures quality for a trace."""

    names: list[str]
    shares: list[float]
    profile: Path | None
    predictor: Path | None
    hardware: str | None
    device: str
    max_new_tokens: int
    prompts: Path | None
    judged: str | None
    pictures: Pictures | None


def measured(
    output: Output, models: Sequence[str], choice: Choice, *, repeats: int, direct_io: bool
) -> dict[str, Any]:
    """Every model on this machine, the second and later ones in the memory that the first one takes."""
    from transformers.utils import logging

    from daop import measured_comparison

    logging.disable_progress_bar()  # every run loads the model
    rows = measured_comparison.measure_formats(
        models,
        choice.prompts,
        choice.shares,
        choice.names,
        repeats=repeats,
        max_new_tokens=choice.max_new_tokens,
        direct_io=direct_io,
        profile=choice.profile,
        predictor=choice.predictor,
        hardware=choice.hardware,
        device=choice.device,
        told=lambda step, _: output.say(step, style="dim"),
        watch=choice.pictures,
    )
    for row in rows:
        if row["differs"]:
            output.say(
                f"{row['policy']} at ECR {row['ecr']:g}: {row['differs']} answers differ from the first "
                "policy's: CPU and GPU round differently, and one token changes those behind it"
            )
    subject = {
        "model": ", ".join(models),
        "prompts": str(choice.prompts),
        "repeats": repeats,
        "device": choice.device,
    }
    return {"rows": rows, "simulated": False, "subject": subject}


def simulated(
    output: Output, trace: Path, choice: Choice, sizes: Sizes, format_: str | None, timeline: Path | None
) -> dict[str, Any]:
    """A recorded trace, as it is or in each format; the timeline is of the first."""
    from daop.formats import formats_of, in_formats

    expert_bytes, weight_bits, tokens, batch = sizes
    formats = None if format_ is None else formats_of(format_)
    if choice.judged is not None:
        from daop.runtime.checkpoint import open_checkpoint

        open_checkpoint(choice.judged)  # what is wrong with it is said before the simulations
    if choice.profile is None and choice.predictor is None:
        output.say("learning a profile from four fifths of the sequences ...", style="dim")
    recorded = comparison.open_traffic(trace, choice.profile, expert_bytes, tokens, choice.predictor)
    settings = comparison.settings(
        choice.hardware or "rtx4090", choice.shares, batch, weight_bits, recorded.traffic.geometry
    )
    for warning in comparison.mismatches(settings, recorded.traffic.geometry):
        output.say(warning, style="yellow")
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, str]] = []
    if formats is None:
        rows = _simulate(output, recorded, settings, choice)
        first = recorded, settings[0]
    else:
        parts = list(in_formats(formats, recorded, settings))
        for part in parts:
            rows += _in_format(output, part, choice)
            costs += [basis.as_dict() for basis in part.bases]
        first = parts[0].recorded, parts[0].settings[0]
    if timeline is not None:
        shown, setting = first
        write_whole(timeline, comparison.timeline(shown.traffic, shown.profile, setting, choice.names[0]))
    machines = {setting.hardware.hardware.name: setting.hardware for setting in settings}
    return {
        "rows": rows,
        "simulated": True,
        "tokens": len(recorded.traffic.ids),
        "hardware": {name: {"about": m.about, "derived": sorted(m.derived)} for name, m in machines.items()},
        "format_costs": costs,
        "learnt_from": recorded.learnt_from,
        "subject": {"trace": str(trace), "tokens": len(recorded.traffic.ids), "batch": batch},
    }


def _in_format(output: Output, part: InFormat, choice: Choice) -> list[dict[str, Any]]:
    rows = _simulate(output, part.recorded, part.settings, choice)
    kinds = {basis.machine: basis.kind for basis in part.bases}
    return [{"format": part.name, "costs": kinds[row["hardware"]], **row} for row in rows]


def _simulate(
    output: Output,
    recorded: comparison.Recorded,
    settings: Sequence[comparison.Setting],
    choice: Choice,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with output.progress() as told:
        for setting in settings:
            rows += comparison.simulate(
                recorded.traffic, recorded.profile, setting, choice.names, told, choice.pictures
            )
    return rows


def judge(output: Output, document: dict[str, Any], choice: Choice, models: Sequence[str] | None) -> None:
    """Measure the quality of what is not exact, where there is a model to measure it with."""
    judged = models[0] if models else choice.judged
    if judged is None or choice.prompts is None or all(row["exact"] for row in document["rows"]):
        return
    found = measure_policies(
        judged,
        choice.prompts,
        choice.shares,
        choice.names,
        max_new_tokens=choice.max_new_tokens,
        options={"profile": choice.profile, "device": choice.device},
        told=lambda step: output.say(step, style="dim"),
    )
    add_quality(document["rows"], found)
