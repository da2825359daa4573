"""``daop calibrate``: measure what moving and computing experts costs on this machine."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from daop.cli import options
from daop.cli.inputs import check_folder
from daop.cli.output import Output, mended, write_whole
from daop.core import DaopError

if TYPE_CHECKING:
    from daop.runtime.calibrate import Calibration


def calibrate(
    model: Annotated[
        str | None,
        Argument(help="Measure with this model's experts and layers. Without: with random ones."),
    ] = None,
    output_file: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE.toml", help="Write the hardware profile here."),
    ] = None,
    folder: Annotated[
        Path | None, Option(help="Without a model: measure the disk that holds this folder.")
    ] = None,
    expert_bytes: Annotated[str, Option(help="Without a model: size of an expert.")] = "8MiB",
    format_: Annotated[
        str | None,
        Option(
            "--format", help="Also compute such experts in these formats, for compare --format: int8,int4,..."
        ),
    ] = None,
    seconds: Annotated[float, Option(min=0.1, max=90, help="Time to measure for.")] = 20.0,
    direct_io: Annotated[bool, Option(help="Read past the page cache, as run --direct-io does.")] = True,
    threads: options.Threads = None,
    json: options.Json = None,
) -> None:
    """Measure this machine. `daop run` finds what was measured with its model; `--hardware FILE` names it."""
    output = Output(json)
    _check(model, output_file)
    check_folder("--folder", folder)
    from daop import calibration, machine
    from daop.formats import formats_of
    from daop.hardware import render
    from daop.runtime.calibrate import calibrate_host
    from daop.runtime.checkpoint import open_checkpoint
    from daop.units import format_size, parse_size

    _set_threads(threads, machine.read_cpu().cores)
    size = parse_size(expert_bytes, "--expert-bytes")
    formats = [] if format_ is None else formats_of(format_, keep=False)
    where = folder or (output_file.absolute().parent if output_file else Path.cwd())
    with mended(), _measured_model(model, where, size, output) as path:
        from transformers.utils import logging

        logging.disable_progress_bar()  # ours says more
        checkpoint = open_checkpoint(path)
        with output.progress() as told:
            found = calibrate_host(
                checkpoint, direct_io=direct_io, seconds=seconds, formats=formats, told=told
            )
        cpu, disk = machine.read_cpu(), machine.read_disk(checkpoint.path)
        about = (
            f"daop calibrate: {cpu.name}, {cpu.threads} threads; {disk.filesystem} on {disk.device}; "
            f"{checkpoint.skeleton.model_type}, experts of {format_size(found.expert_bytes)}"
        )
        profile = calibration.as_profile(found, about)
        kept = calibration.save(profile, checkpoint) if model is not None and direct_io else None
    if output_file is not None:
        write_whole(output_file, render(profile))
    output.table(_figures(found))
    output.table(_formats(found))
    for written in (output_file, kept):
        if written is not None:
            output.say(f"written to {written}")
    output.json(_document(found))


def _figures(found: Calibration) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("how")
    for name, how in found.sources.items():
        table.add_row(name, f"{getattr(found.hardware, name):.4g}", how)
    return table


def _formats(found: Calibration) -> Table:
    """Milliseconds of one expert by format and tokens."""
    curves = found.hardware.curves
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title="ms to compute an expert")
    table.title_justify = "left"
    table.add_column("tokens", no_wrap=True)
    for n in curves[0].tokens:
        table.add_column(str(n), justify="right", no_wrap=True)
    for curve in curves:
        name = curve.format + (" (the model's)" if curve is curves[0] else "")
        table.add_row(name, *(f"{us / 1e3:.3g}" for us in curve.microseconds))
    return table


def _document(found: Calibration) -> dict[str, Any]:
    hardware = found.hardware
    figures = {name: getattr(hardware, name) for name in found.sources}
    formats = {curve.format: dataclasses.asdict(curve) for curve in hardware.curves}
    return {**figures, "sources": found.sources, "formats": formats}


def _check(model: str | None, output_file: Path | None) -> None:
    if output_file is None:
        if model is None:
            raise DaopError("give a model, or -o FILE.toml for the profile that is measured without one")
        return
    if output_file.suffix != ".toml":
        raise DaopError(f"-o {output_file}: a hardware profile's name ends in .toml")
    if not output_file.absolute().parent.is_dir():
        raise DaopError(
            f"-o {output_file}: there is no folder {output_file.absolute().parent}; make it first"
        )


def _set_threads(asked: int | None, cores: int) -> None:
    """As many as a run would compute with."""
    import torch

    from daop import machine

    torch.set_num_threads(asked or machine.asked_threads() or cores)


@contextmanager
def _measured_model(model: str | None, where: Path, size: int, output: Output) -> Iterator[str | Path]:
    """The model, or one of random numbers that is removed afterwards."""
    if model is not None:
        yield model
        return
    from daop.synthetic_model import synthetic

    try:
        with tempfile.TemporaryDirectory(prefix=".daop-calibrate-", dir=where) as folder:
            output.say("writing a model of random numbers ...", style="dim")
            synthetic(Path(folder), size)
            yield folder
    except OSError as error:
        raise DaopError(f"cannot measure the disk in {where}: {error}; name another with --folder") from error
