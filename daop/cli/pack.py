"""``daop pack``: a model's experts written so that each is one aligned read, in fewer bits if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from daop.cli import options
from daop.cli.inputs import check_file
from daop.cli.output import Output, write_whole
from daop.core import DaopError
from daop.units import format_size

if TYPE_CHECKING:
    from daop.quality import Quality
    from daop.runtime.checkpoint import Checkpoint
    from daop.runtime.packed import Pack

CARD = "README.md"
FIGURES = {
    "perplexity_reference": "perplexity of the source",
    "perplexity": "perplexity",
    "mean_kl": "mean KL divergence, nats a token",
    "p99_kl": "its 99th percentile",
    "changed_tokens": "share of greedy tokens that changed",
}
"""What of ``daop.quality.Quality`` the card says, and in which words."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def pack(
    model: options.Model,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="DIR", help="The folder to write: new, or unfinished.")
    ] = None,
    dtype: Annotated[str, Option(help="keep (as the source has them), int8 or int4.")] = "keep",
    group: Annotated[
        int | None, Option(help="Inputs that share a scale: 32, 64 or 128 (INT8: 64, INT4: 32).")
    ] = None,
    text: Annotated[
        Path | None, Option(metavar="FILE", help="Measure on this text what packing changes, for the card.")
    ] = None,
    verify: Annotated[
        bool, Option("--verify", help="Write nothing: read a packed MODEL and compare every checksum.")
    ] = False,
    json: options.Json = None,
) -> None:
    """Write a model's experts for fast reading, in fewer bits if wanted; `daop run DIR` runs the result."""
    out = Output(json)
    if verify:
        _verify(Path(model), out)
        return
    if output is None:
        raise DaopError("name the folder to write with -o DIR")
    check_file("--text", text)
    from daop.runtime import packing
    from daop.runtime.checkpoint import open_checkpoint
    from daop.runtime.packed import MANIFEST

    checkpoint = open_checkpoint(model)
    if text is not None:
        _check_tokenizer(checkpoint.path)
    there = (output / MANIFEST).exists()
    with out.progress() as told:
        made = packing.pack(checkpoint, output, dtype=dtype, group=group or 0, told=told)
    packed = open_checkpoint(output)
    quality = None if text is None else _quality(model, output, text, out)
    if quality is not None or not (there and (output / CARD).exists()):  # one with figures is kept
        write_whole(output / CARD, card(checkpoint, made, packed, quality))
    before, after = int(checkpoint.geometry.bytes_of.sum()), int(packed.geometry.bytes_of.sum())
    out.say(
        f"{output}: {packed.geometry.total} experts, {format_size(before)} as the source has them, "
        f"{format_size(after)} here; " + ("they were packed already" if there else "read back and compared")
    )
    out.json(
        {
            "folder": str(output),
            "settings": made.settings,
            "source": made.source,
            "expert_bytes_before": before,
            "expert_bytes": after,
            "quality": None if quality is None else quality.as_dict(),
        }
    )


def _check_tokenizer(folder: Path) -> None:
    """Before hours of packing: the text is of no use without one."""
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise DaopError(
            f"--text needs a tokenizer, and {folder} has none: add its tokenizer.json, or leave it"
        )


def _verify(folder: Path, out: Output) -> None:
    from daop.runtime.checkpoint import open_checkpoint
    from daop.runtime.packed import verify

    found = open_checkpoint(folder).pack
    if found is None:
        raise DaopError(f"{folder} is not a folder that `daop pack` wrote: there are no checksums to compare")
    with out.progress() as told:
        for file, share in verify(folder, found):
            told(f"read {file}", share)
    out.say(f"{folder}: every checksum is as it was packed")
    out.json({"folder": str(folder), "layers": len(found.layers), "whole": True})


def _quality(model: str, folder: Path, text: Path, out: Output) -> Quality:
    """The packed model against its source, fed the same text."""
    import dataclasses

    from daop import machine
    from daop.cli import quality
    from daop.config import RunConfig
    from daop.policy_quality import REFERENCE

    exact = RunConfig(model=model, policy=REFERENCE).resolved(machine.read_cpu())
    judged = dataclasses.replace(exact, model=str(folder))
    return quality.judge(out, exact, judged, quality.Material(text=text, limit=16))


def card(source: Checkpoint, made: Pack, packed: Checkpoint, quality: Quality | None) -> str:
    """A model card: format, source, and what packing changed."""
    from daop.runtime.packed import VERSION, format_name

    codec = packed.layouts[0].codec
    before, after = int(source.geometry.bytes_of.sum()), int(packed.geometry.bytes_of.sum())
    kept = made.settings["dtype"] == "keep"
    change = (
        "as they are in the source" if kept else f"in {codec.name.upper()}, groups of {codec.block} inputs"
    )
    if kept:
        judged = "The numbers are the source's own: the model's output is unchanged."
    elif quality is None:
        judged = "Not measured. `daop quality SOURCE --candidate THIS --text FILE` says what changed."
    else:
        found = quality.as_dict()
        judged = "\n".join(
            f"- {words}: {found[name]['value']:.4g}" + _interval(found[name])
            for name, words in FIGURES.items()
        )
    return f"""# {made.source["name"]}, packed by daop

Routed experts {change}; everything else is untouched. Run it with `daop run FOLDER`.

- format: daop-pack version {VERSION}, {format_name(made.settings)}
- experts: {packed.geometry.total} in {packed.geometry.layers} layers, {format_size(after)} \
({format_size(before)} in the source)
- source: {made.source["name"]}, fingerprint `{made.source["fingerprint"]}`
- every expert is one range, aligned to 4096 bytes; `daop pack --verify FOLDER` compares all checksums

## Quality, against the source

{judged}
"""


def _interval(figure: dict[str, Any]) -> str:
    low, high = figure.get("low"), figure.get("high")
    return "" if low is None or high is None else f" (95 % interval {low:.4g} to {high:.4g})"
