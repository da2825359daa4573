"""``daop calibrate``: measure what moving and computing experts costs on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from daop.cli.output import Output, write_whole
from daop.core import DaopError


def calibrate(
    output_file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.toml", help="Write the hardware profile here.")
    ] = Path("machine.toml"),
    folder: Annotated[
        Path | None, typer.Option(help="Measure the disk that holds this folder (default: where -o is).")
    ] = None,
    expert_bytes: Annotated[str, typer.Option(help="Size of an expert to measure with.")] = "8MiB",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.")] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the figures as JSON; - for standard output.")
    ] = None,
) -> None:
    """Measure what moving and computing experts costs here; `daop compare --hardware FILE` uses it."""
    output = Output(json)
    if output_file.suffix != ".toml":
        raise DaopError(f"-o {output_file}: a hardware profile's name ends in .toml")
    if not output_file.absolute().parent.is_dir():
        raise DaopError(
            f"-o {output_file}: there is no folder {output_file.absolute().parent}; make it first"
        )
    from daop.hardware import HardwareProfile, render
    from daop.runtime.calibrate import measure
    from daop.units import parse_size

    size = parse_size(expert_bytes, "--expert-bytes")
    where = folder or output_file.absolute().parent
    with output.progress() as told:
        hardware, sources = measure(where, size, threads=threads, told=told)
    about = f"measured by daop calibrate: {os.cpu_count()} processors, the disk of {where}"
    profile = HardwareProfile(hardware=hardware, about=about, sources=sources, derived={})
    write_whole(output_file, render(profile))
    table = Table("figure", "value", "how")
    for name, how in sources.items():
        table.add_row(name, f"{getattr(hardware, name):.4g}", how)
    output.table(table)
    output.say(f"written to {output_file}")
    output.json({name: getattr(hardware, name) for name in sources})
