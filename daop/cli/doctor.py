"""``daop doctor``: what this machine is, and what daop would choose on it, and why."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import daop
from daop import machine
from daop.cli.output import Output
from daop.core import DaopError
from daop.runtime.numa import huge_pages, placement
from daop.units import format_size

if TYPE_CHECKING:
    from daop.runtime.checkpoint import Checkpoint

LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "scikit-learn"),
    *("lightgbm", "pyarrow", "typer", "rich"),
)
PAGES = {
    True: "huge pages",
    False: "small pages, which are slower to read: /sys/kernel/mm/transparent_hugepage/enabled says never",
    None: "pages as the system has them",
}
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model's folder or hub id: say what would be chosen for it.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer to plan for.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Prompts side by side to plan for.")] = 1,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
) -> None:
    """Say what this machine is, and what daop would choose on it."""
    output = Output(json)
    found = examine(model)
    try:
        found["choice"] = choose(found, model, context, batch)
    finally:  # what does not fit is said after what is there
        for title, rows in describe(found):
            output.table(_grid(title, rows))
    output.json(found)


def examine(model: str | None) -> dict[str, Any]:
    """Facts about the machine, as JSON."""
    here = Path(model) if model and Path(model).expanduser().exists() else Path.cwd()
    return {
        "daop": daop.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": dataclasses.asdict(machine.read_cpu()),
        "memory": dataclasses.asdict(machine.read_memory()),
        "memory_nodes": dataclasses.asdict(placement()),
        "huge_pages": huge_pages(),
        "disk": dataclasses.asdict(machine.read_disk(here)),
        "gpus": [dataclasses.asdict(gpu) for gpu in machine.read_gpus()],
        "native_kernels": native_kernels(),
        "versions": {name: machine.version_of(name) for name in LIBRARIES},
        "cupy": machine.version_of(*CUPY),
        "cuda_problem": cuda_problem(),
    }


def cuda_problem() -> str:
    """Why ``--device cuda`` cannot be used here; '' if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install daop"
    from daop.runtime.cuda.device import find_problem, read_facts

    return find_problem(read_facts())


def native_kernels() -> str:
    """State of the compiled kernels, in words."""
    from daop.runtime.native import native_status

    used, variant, fault = native_status()
    if used:
        return f"{variant}, in use"
    return (
        f"not in use: {fault}. Experts on the host run on torch: slower in BF16, many times in INT8 and INT4"
    )


def choose(found: dict[str, Any], model: str | None, context: int, batch: int) -> dict[str, Any]:
    """What a run without options would use here, each with its reason."""
    cpu = found["cpu"]
    quota = f", a quota of {cpu['quota']:g}" if cpu["quota"] else ""
    asked = machine.asked_threads()
    sleepy = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    idle = "OMP_WAIT_POLICY=passive lets them sleep between products: slower without other work here"
    waiting = f"; {idle}" if sleepy else ""
    there = f"{cpu['threads']} processors may be used{quota}, on {cpu['cores']} cores"
    choice: dict[str, Any] = {
        "device": "host",
        "device_reason": _device_reason(found),
        "cuda": found["cuda_problem"] or "can be used",
        "threads": asked or cpu["cores"],
        "threads_reason": ("OMP_NUM_THREADS says so" if asked else f"one a core: {there}") + waiting,
    }
    if model is not None:
        from daop.runtime.checkpoint import open_checkpoint
        from daop.runtime.memory import plan_memory

        checkpoint = open_checkpoint(model)
        geometry = checkpoint.geometry
        plan = plan_memory(checkpoint, context=context, batch=batch)
        choice["model"] = {
            "family": checkpoint.skeleton.model_type,
            "tested": checkpoint.tested,
            "moe_layers": geometry.layers,
            "experts": geometry.total,
            "top_k": geometry.top_k,
            "expert_bytes": max(geometry.expert_bytes),
            "all_experts_bytes": int(geometry.bytes_of.sum()),
            "non_expert_bytes": plan.non_experts,
        }
        choice["memory"] = plan.as_dict()
        choice["ecr"] = plan.ecr
        choice["memory_reason"] = plan.reason
        if not found["cuda_problem"]:
            choice["cuda"] = _on_cuda(checkpoint, context, batch)
    return choice


def _on_cuda(checkpoint: Checkpoint, context: int, batch: int) -> str:
    """How much of the model the GPU would hold, in words."""
    from daop.runtime.cuda.machinery import CudaDevice
    from daop.runtime.machinery import Wishes

    try:
        device = CudaDevice(checkpoint, Wishes(context=context, batch=batch))
    except DaopError as error:
        return str(error)
    return f"can be used: --ecr {device.estimate.ecr:.3g}: {device.estimate.reason}"


def _device_reason(found: dict[str, Any]) -> str:
    if found["cuda_problem"]:
        return "the only one that can be used here"
    return "unless you ask for cuda, of which no figure has been measured yet"


def describe(found: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables for people: (title, rows of name and value)."""
    cpu, memory, disk = found["cpu"], found["memory"], found["disk"]
    versions = found["versions"]
    spins = {None: "kind not known", True: "says it spins", False: "solid state"}[disk["rotational"]]
    kind = "in memory: reads measure RAM, not a disk" if disk["in_memory"] else spins
    gpus = [
        (f"GPU {number}", f"{gpu['name']}, {format_size(gpu['free'])} of {format_size(gpu['total'])} free")
        for number, gpu in enumerate(found["gpus"])
    ]
    tables = [
        (
            "This machine",
            [
                ("CPU", f"{cpu['name']}: {cpu['threads']} processors to use, {cpu['cores']} cores"),
                ("instructions", " ".join(cpu["flags"]) or "none of those that speed up matrix products"),
                (
                    "memory",
                    f"{format_size(memory['total'])}, {format_size(memory['available'])} available; "
                    f"{format_size(memory['usable'])} may be used ({memory['source']})",
                ),
                ("experts in it", f"{found['memory_nodes']['said']}; {PAGES[found['huge_pages']]}"),
                ("disk", f"{disk['path']}: {disk['filesystem']} on {disk['device']}, {kind}"),
                ("", f"{format_size(disk['free'])} of {format_size(disk['total'])} free"),
                *(gpus or [("GPU", "none")]),
            ],
        ),
        (
            "Software",
            [
                ("daop", f"{found['daop']}, Python {found['python']}, {found['system']}"),
                ("native kernels", found["native_kernels"]),
                (
                    "libraries",
                    ", ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items()),
                ),
                ("CuPy", found["cupy"] or "not installed (only the device cuda needs it)"),
            ],
        ),
    ]
    if "choice" in found:
        tables.append(("daop would choose", _choice_rows(found["choice"])))
    return tables


def _choice_rows(choice: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("--device", f"{choice['device']}: {choice['device_reason']}"),
        ("--device cuda", choice["cuda"]),
        ("--threads", f"{choice['threads']}: {choice['threads_reason']}"),
    ]
    if "model" in choice:
        model = choice["model"]
        tested = "tested against transformers" if model["tested"] else "NOT among the tested families"
        rows += [
            (
                "model",
                f"{model['family']} ({tested}): {model['experts']} experts in {model['moe_layers']} layers, "
                f"top-{model['top_k']}, {format_size(model['expert_bytes'])} each, "
                f"{format_size(model['all_experts_bytes'])} in all",
            ),
            ("--ecr", f"{choice['ecr']:.3g}: {choice['memory_reason']}"),
        ]
    else:
        rows.append(("--ecr", "daop doctor MODEL says how many of its experts would be resident"))
    return rows


def _grid(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
