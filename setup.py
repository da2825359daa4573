"""The one thing that pyproject.toml cannot say: the optional C++ kernels. Everything else is there."""

from pathlib import Path

from setuptools import Extension, setup

FLAGS = Path("runtime/csrc/flags.txt").read_text().split()

setup(
    ext_modules=[
        Extension(
            "daop.runtime._experts",  # a plain shared library, loaded by runtime/native.py
            ["runtime/csrc/experts.cpp", "runtime/csrc/context.cpp", "runtime/csrc/visits.cpp"],
            depends=[str(path) for path in Path("runtime/csrc").iterdir()],
            extra_compile_args=FLAGS,
            optional=True,  # without a compiler daop computes with torch
        )
    ]
)
