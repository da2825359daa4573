"""What commands write: text and tables for people, one JSON document for programs.

With ``--json -`` the document is all that goes to standard output; everything else goes to standard
error. A JSON file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from daop.core import DaopError


class Output:
    """Where a command writes. ``target``: the value of ``--json``, checked before any work is done."""

    def __init__(self, target: str | None) -> None:
        self._target = target
        self.console = Console(stderr=target == "-", highlight=False, soft_wrap=False)
        if target not in (None, "-"):
            check_output("--json", Path(str(target)), force=True)

    def say(self, text: str = "", style: str | None = None) -> None:
        """A line of prose; nothing in it is read as markup."""
        self.console.print(text, style=style, markup=False)

    def stream(self, text: str) -> None:
        """Text of a model as it comes, as it is: no wrapping, no markup, no control characters."""
        file = self.console.file
        file.write(printable(text))
        file.flush()

    def table(self, table: Table) -> None:
        self.console.print(table)

    def json(self, document: Any) -> None:
        """Write the document where ``--json`` says, if it was given."""
        if self._target is None:
            return
        text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        if self._target == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_whole(Path(self._target), text)

    @contextmanager
    def progress(self) -> Iterator[_Steps]:
        """A bar for a few named steps; where no one watches, a line for each."""
        if not self.console.is_terminal:
            yield _Lines(self)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield _Bar(bar)


class _Steps:
    """Called as ``(what is being done, share done)``."""

    def __call__(self, step: str, share: float) -> None:
        raise NotImplementedError


class _Bar(_Steps):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1.0)

    def __call__(self, step: str, share: float) -> None:
        self._progress.update(self._task, description=step, completed=share)


class _Lines(_Steps):
    def __init__(self, output: Output) -> None:
        self._output = output
        self._last = ""

    def __call__(self, step: str, share: float) -> None:
        if step != self._last:
            self._output.say(f"{step} ...")
            self._last = step


@contextmanager
def mended() -> Iterator[None]:
    """Failures of the machine under a run, said as errors that a person can act on."""
    try:
        yield
    except MemoryError as error:
        raise DaopError(
            "memory ran out: give fewer bytes to experts (--fast-memory), or plan a shorter --context"
        ) from error


def printable(text: str) -> str:
    """A model may write escape sequences; a terminal must not obey them."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)


def check_output(flag: str, path: Path | None, force: bool) -> None:
    """Before any work: a file to be written must be writable, and new unless ``--force`` is given."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise DaopError(f"{flag} {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise DaopError(f"{flag} {path} is a folder: name a file in it")
    if path.exists() and not force:
        raise DaopError(f"{flag} {path} exists: give --force to replace it, or name another file")
    if not os.access(folder, os.W_OK):
        raise DaopError(f"{flag} {path}: {folder} may not be written to; name another file")


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write, which appears under its name when it is complete, or never."""
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                yield file
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise DaopError(f"cannot write {path}: {error.strerror or error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file through a temporary one beside it, so that no one ever sees half of it."""
    with whole_file(path) as file:
        file.write(text)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
