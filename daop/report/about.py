"""What was run, on what, with which versions, and how to run it again: the head of every report."""

from __future__ import annotations

import platform
import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import daop
from daop import machine
from daop.units import format_size

if TYPE_CHECKING:
    from typer import Context

LIBRARIES = ("torch", "transformers", "numpy", "lightgbm", "pyarrow")
PRIVATE = ("prompt",)
"""Parameters whose values are a person's own text: a report says that they were given, not what they were."""


def about(command: str) -> dict[str, Any]:
    """JSON about the machine, the versions and the command."""
    cpu, memory = machine.read_cpu(), machine.read_memory()
    return {
        "command": command,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "daop": daop.__version__,
        "python": platform.python_version(),
        "versions": {name: machine.version_of(name) for name in LIBRARIES},
        "system": platform.system() + " " + platform.machine(),
        "cpu": f"{cpu.name}, {cpu.threads} processors on {cpu.cores} cores",
        "memory_bytes": memory.total,
        "gpus": [gpu.name for gpu in machine.read_gpus()],
    }


def command_line(context: Context) -> str:
    """The command under way, as one would type it again; private values are left out."""
    words = ["daop", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif getattr(parameter, "is_flag", False):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], "..." if name in PRIVATE else str(one)]
    return shlex.join(words)


def facts(about: dict[str, Any], more: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Lines for a person, ``more`` of what the command itself knows after the command."""
    libraries = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    return [
        ("command", about["command"]),
        *more,
        ("run on", f"{about['cpu']}; {format_size(about['memory_bytes'])} of memory; {about['system']}"),
        ("GPU", ", ".join(about["gpus"]) or "none"),
        ("versions", f"daop {about['daop']}, Python {about['python']}, {libraries}"),
        ("written", about["written"]),
    ]
