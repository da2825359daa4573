"""The registry of importers and what they share.

An importer takes the source's path and returns a ``Trace`` or ``CountsTrace`` that was checked against the
source's own redundancy; it never executes anything the source contains.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, Registry
from daop.training.trace import CountsTrace, Trace


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """``array``: which of several arrays, where a source has them; ``token_ids``: keep what the input
    tokens were."""

    array: str | None = None
    token_ids: bool = False


class Importer(Protocol):
    """A function from a source to a trace; its docstring's first line is what the command line shows."""

    def __call__(self, path: Path, options: ImportOptions) -> Trace | CountsTrace: ...


IMPORTERS: Registry[Importer] = Registry("trace format", "daop.training.importers")


def load_npz(path: Path, required: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file (never pickled objects); all ``required`` are there."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, MemoryError, zipfile.BadZipFile, EOFError) as error:
        # numpy's own words advise to unpickle it: nobody should
        raise DaopError(
            f"{path} is not a readable npz file of plain arrays ({type(error).__name__}): check --format, or "
            "fetch it again"
        ) from error
    missing = [name for name in required if name not in arrays]
    if missing:
        raise DaopError(
            f"{path} holds {', '.join(arrays) or 'nothing'}, but not {', '.join(missing)}; is --format right?"
        )
    return arrays
