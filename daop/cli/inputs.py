"""Files that flags name are looked for before any work, so that a slip costs no waiting."""

from __future__ import annotations

from pathlib import Path

from daop.core import DaopError


def check_file(flag: str, path: str | Path | None) -> None:
    """A file that can be read, if one is named."""
    if path is None:
        return
    file = Path(path)
    if not file.exists():
        raise DaopError(f"{flag} {path}: there is no such file; check the path")
    if file.is_dir():
        raise DaopError(f"{flag} {path} is a folder: name a file in it")


def check_folder(flag: str, path: str | Path | None) -> None:
    """A folder, if one is named."""
    if path is None:
        return
    folder = Path(path)
    if not folder.exists():
        raise DaopError(f"{flag} {path}: there is no such folder; check the path")
    if not folder.is_dir():
        raise DaopError(f"{flag} {path} is a file: name the folder that it is in")


def check_machines(hardware: str | None) -> None:
    """The machines of a comma-separated ``--hardware``, each the name of a profile or a .toml file."""
    from daop.hardware import load

    for name in (hardware or "").split(","):
        if name.strip():
            load(name.strip())
