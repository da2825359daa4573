"""What there is of CUDA here, and what is missing: every error says what was found, what is needed, what to
type."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daop.core import DaopError
from daop.machine import version_of

if TYPE_CHECKING:
    from .streams import CupyGpu

CUPY = {13: "cupy-cuda13x", 12: "cupy-cuda12x"}  # by CUDA's major version, as pyproject's extras have them
HOST_INSTEAD = "or run on the CPU with --device host"


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """``torch_cuda``: the CUDA version that torch was built for (None: a build for CPUs). ``torch_problem``
    and ``cupy_problem``: what they said when they were tried ('': they work). ``cupy``: installed
    distributions and their versions. ``driver`` and ``cupy_runtime``: CUDA versions as 1000 * major + 10 *
    minor, 0 if unknown."""

    torch: str
    torch_cuda: str | None
    torch_problem: str = ""
    devices: int = 0
    cupy: dict[str, str] = field(default_factory=dict)
    cupy_problem: str = ""
    driver: int = 0
    cupy_runtime: int = 0


def read_facts() -> CudaFacts:
    """Try torch and CuPy."""
    import torch

    installed = {name: version for name in (*CUPY.values(), "cupy") if (version := version_of(name))}
    problem = ""
    if torch.version.cuda is not None and not torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            problem = " ".join(str(error).split())
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cupy_problem, driver, runtime = _try_cupy() if installed else ("", 0, 0)
    return CudaFacts(
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_problem=problem,
        devices=devices,
        cupy=installed,
        cupy_problem=cupy_problem,
        driver=driver,
        cupy_runtime=runtime,
    )


def _try_cupy() -> tuple[str, int, int]:
    """What CuPy says when it is imported, and the versions of driver and runtime."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        return "", int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        return " ".join(str(error).split())[:300], 0, 0


def find_problem(facts: CudaFacts) -> str:
    """Why ``--device cuda`` cannot be used, with the remedy; '' if it can."""
    if facts.torch_cuda is None:
        return (
            f"torch {facts.torch} is a build for CPUs, and --device cuda needs one for CUDA: install "
            f"it (pip's default build on Linux: pip install --force-reinstall torch), {HOST_INSTEAD}"
        )
    if facts.devices == 0:
        said = facts.torch_problem or "torch sees no device; is CUDA_VISIBLE_DEVICES set to nothing?"
        if "too old" in said or "insufficient" in said:
            return (
                f"the NVIDIA driver is too old for torch {facts.torch} ({said}); it needs one for CUDA "
                f"{facts.torch_cuda}: update the driver, {HOST_INSTEAD}"
            )
        return (
            f"no CUDA device can be used: {said} --device cuda needs an NVIDIA GPU and its driver; in a "
            f"container start it with the GPU (docker run --gpus all), {HOST_INSTEAD}"
        )
    major = int(facts.torch_cuda.split(".")[0])
    extra = f'pip install "daop[cuda{major}]"'
    wanted = CUPY.get(major)
    if wanted is None:
        return (
            f"torch {facts.torch} is built for CUDA {facts.torch_cuda}, for which daop names no CuPy: "
            f"install a torch for CUDA {' or '.join(str(known) for known in sorted(CUPY))}, {HOST_INSTEAD}"
        )
    if not facts.cupy:
        return f"CuPy is missing, which --device cuda needs for its copies: {extra}, {HOST_INSTEAD}"
    if wanted not in facts.cupy and "cupy" not in facts.cupy:
        found = ", ".join(f"{name} {version}" for name, version in facts.cupy.items())
        others = " ".join(facts.cupy)
        return (
            f"{found} is for another CUDA than torch {facts.torch} (CUDA {facts.torch_cuda}): "
            f"pip uninstall {others}; {extra}"
        )
    if facts.cupy_problem:
        return f"CuPy does not work here ({facts.cupy_problem}): {extra}, {HOST_INSTEAD}"
    if facts.driver // 1000 < facts.cupy_runtime // 1000:
        return (
            f"the NVIDIA driver is for CUDA {_version(facts.driver)}, but the installed CuPy needs "
            f"{_version(facts.cupy_runtime)}: update the driver, or install torch and CuPy for CUDA "
            f"{facts.driver // 1000}, {HOST_INSTEAD}"
        )
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def open_gpu(index: int = 0) -> CupyGpu:
    """The GPU, ready for use; raises DaopError if there is something amiss."""
    problem = find_problem(read_facts())
    if problem:
        raise DaopError(problem)
    from .streams import CupyGpu

    try:
        return CupyGpu(index)
    except RuntimeError as error:
        raise DaopError(
            f"GPU {index} cannot be used: {' '.join(str(error).split())}; nvidia-smi shows whether another "
            "process has it to itself (compute mode) or holds its memory"
        ) from error


def describe_memory(free: int, total: int, name: str) -> str:
    """Who says how much may be used, for messages."""
    from daop.units import format_size

    held = total - free
    return (
        f"free of the {format_size(total)} of {name}; {format_size(held)} are in use, nvidia-smi says by whom"
    )
