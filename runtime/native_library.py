"""Finding and building the compiled library (``csrc/``). It is optional, and loads without torch.

Installation builds it where there is a C++ compiler; ``python -m daop.runtime.native`` builds it beside this
file. ``DAOP_NATIVE=0`` leaves it unused.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from daop.core import DaopError

HERE = Path(__file__).resolve().parent
VERSION = 7  # of what crosses between Python and csrc/
SOURCES = ("experts.cpp", "context.cpp", "visits.cpp")


def library_path() -> Path | None:
    """The compiled library, built by the installation or in place; the newest."""
    return max(HERE.glob("_experts*.so"), key=lambda path: path.stat().st_mtime, default=None)


@cache
def short_calls(path: Path) -> ctypes.PyDLL | None:
    """The library for calls of a few microseconds, which keep the interpreter's lock; None if it is of
    another version."""
    try:
        library = ctypes.PyDLL(str(path))
        return library if library.daop_version() == VERSION else None
    except (OSError, AttributeError):
        return None


def compile_command(output: Path, extra: Sequence[str], source: Path | None = None) -> list[str]:
    """How to compile the library, or a ``source`` that includes its parts."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise DaopError("no C++ compiler found: install g++ (or clang), or set CXX to one")
    folder = HERE / "csrc"
    flags = (folder / "flags.txt").read_text().split()
    sources = [source] if source else [folder / name for name in SOURCES]
    return [*compiler.split(), *flags, *extra, f"-I{folder}", *map(str, sources), "-o", str(output)]


def build() -> Path:
    """Compile the library beside this file."""
    output = HERE / "_experts.so"
    part = output.with_suffix(f".{os.getpid()}.part")
    command = compile_command(part, ("-shared", "-fPIC"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DaopError(f"{command[0]} failed to build the native kernels:\n{done.stderr[-2000:]}")
    part.replace(output)
    return output
