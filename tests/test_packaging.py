"""The four folders install as one import package, with or without the links between them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import daop

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("predictors", "runtime", "training")


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _sources() -> Iterator[Path]:
    """Every Python file of the package, in its real folder."""
    for top in ("daop", *ROOMS):
        for folder, names, files in os.walk(ROOT / top):  # does not follow the links
            names[:] = [name for name in names if name != "__pycache__"]
            yield from (Path(folder) / file for file in files if file.endswith(".py"))


def _package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "daop" else ("daop", *parts))


def test_every_code_folder_is_declared() -> None:
    declared = set(_project()["tool"]["setuptools"]["packages"])
    assert declared == {_package_of(file.parent) for file in _sources()}


def test_every_package_is_mapped_to_its_folder() -> None:
    setuptools = _project()["tool"]["setuptools"]
    for package in setuptools["packages"]:
        parent, folder = package, setuptools["package-dir"].get(package)
        while folder is None:
            parent = parent.rpartition(".")[0]
            folder = setuptools["package-dir"].get(parent)
        folder += package[len(parent) :].replace(".", "/")
        assert (ROOT / folder / "__init__.py").is_file(), f"{package} is mapped to {folder}"
        assert not (ROOT / folder.split("/")[0]).is_symlink()
        assert not folder.startswith(tuple(f"daop/{room}" for room in ROOMS)), "mapped through a link"


@pytest.mark.parametrize("room", ROOMS)
def test_link_for_checkers(room: str) -> None:
    """A link where the file system has them; where they are lost, a text file with its target."""
    link = ROOT / "daop" / room
    target = os.readlink(link) if link.is_symlink() else link.read_text().strip()
    assert target == f"../{room}"


def test_rooms_are_never_imported_as_top_level_packages() -> None:
    """``import runtime`` would work in a checkout and break in a user's project."""
    for file in [*_sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & set(ROOMS), f"{file}:{node}"


def test_version_is_written_once_and_agreed() -> None:
    assert _project()["project"]["version"] == daop.__version__


@pytest.mark.slow
def test_wheel_from_a_checkout_without_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.so")
    shutil.copytree(ROOT, source, ignore=hidden, symlinks=True)
    for room in ROOMS:
        (source / "daop" / room).unlink()
    flags = source / "runtime" / "csrc" / "flags.txt"
    flags.write_text(flags.read_text().replace("-O3", "-O0"))  # nothing is computed with it: built sooner
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True, timeout=240)
    (wheel,) = tmp_path.glob("daop-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for file in _sources():
        folder = installed.joinpath(*_package_of(file.parent).split("."))
        assert (folder / file.name).is_file(), f"{file} is missing from the wheel"
    for file in (ROOT / "daop" / "assets").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert (installed / file.relative_to(ROOT)).is_file(), f"{file} is missing from the wheel"
    if any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        assert list(installed.glob("daop/runtime/_experts*.so")), "the kernels are missing from the wheel"
    imports = ", ".join(f"daop.{room}" for room in ROOMS)
    code = f"import daop.cli, {imports}; print(daop.runtime.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(ran.stdout.strip()).is_relative_to(installed)
