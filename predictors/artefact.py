"""Fitted predictors on disk: JSON, safetensors and LightGBM's text format; nothing is ever unpickled.

``DIR/predictor.json`` names the class, its parameters and geometry, and the SHA-256 of every other file; it
is sealed by a SHA-256 of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from daop.core import DaopError, Geometry

from .base import PREDICTORS, Predictor, State

FORMAT = "daop-predictor"
VERSION = 1
ARRAYS = "state.safetensors"
_MAX_FILE = 4 << 30


def name_of(predictor: Predictor) -> str:
    """The name ``PREDICTORS.get`` finds this predictor's class by."""
    for name, cls in PREDICTORS.items():
        if cls is type(predictor):
            return name
    return f"{type(predictor).__module__}:{type(predictor).__qualname__}"


def save(predictor: Predictor, folder: str | Path) -> None:
    """Write a fitted predictor; ``folder`` appears whole or not at all, and replaces an older one."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    hidden = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    state = predictor.state()
    files: list[str] = []
    if state.arrays:
        save_file({k: _contiguous(v) for k, v in state.arrays.items()}, hidden / ARRAYS)
        files.append(ARRAYS)
    for name, text in state.texts.items():
        (hidden / f"{name}.lightgbm.txt").write_text(text)
        files.append(f"{name}.lightgbm.txt")
    document = {
        "format": FORMAT,
        "version": VERSION,
        "predictor": name_of(predictor),
        "kind": predictor.kind,
        "parameters": predictor.parameters(),
        "geometry": asdict(predictor.geometry_),
        "values": state.values,
        "files": {name: _digest(hidden / name) for name in files},
    }
    (hidden / "predictor.json").write_text(json.dumps(seal(document), indent=1))
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(hidden, folder)
    shutil.rmtree(old, ignore_errors=True)


def seal(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the SHA-256 of the rest of it under ``seal``: damage and careless edits are
    noticed."""
    rest = {k: v for k, v in document.items() if k != "seal"}
    return {**rest, "seal": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def load(folder: str | Path, *, allow: str | None = None) -> Predictor:
    """The predictor saved in ``folder``; DaopError if it is missing, damaged, or was changed.

    A class outside daop is imported only if ``allow`` names it: loading a file must not choose what code
    runs.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(folder)
    document = _read_document(folder)
    maker = document["predictor"]
    if ":" in str(maker) and maker != allow:
        raise DaopError(
            f"{folder} was made by {maker!r}, code outside daop; allow it with --predictor {maker}"
        )
    texts: dict[str, str] = {}
    arrays: dict[str, Any] = {}
    for name, digest in document["files"].items():
        path = folder / name
        if Path(name).name != name or not path.is_file() or path.stat().st_size > _MAX_FILE:
            raise DaopError(
                f"{folder}: its file {name!r} is missing or not allowed; train the predictor again"
            )
        if _digest(path) != digest:
            raise DaopError(
                f"{path} was changed after it was saved (SHA-256 differs); train the predictor again"
            )
        if name.endswith(".lightgbm.txt"):
            texts[name.removesuffix(".lightgbm.txt")] = path.read_text()
    try:
        if ARRAYS in document["files"]:
            arrays = load_file(folder / ARRAYS)
        g = document["geometry"]
        geometry = Geometry(
            experts=tuple(g["experts"]),
            top_k=g["top_k"],
            expert_bytes=tuple(g["expert_bytes"]),
            layer_to_model_layer=tuple(g["layer_to_model_layer"]),
            fingerprint=g["fingerprint"],
        )
        predictor = PREDICTORS.get(maker)(**document["parameters"])
        state = State(arrays=arrays, values=document["values"], texts=texts)
        return predictor.restore(state, geometry)
    except (KeyError, TypeError, ValueError, IndexError, SafetensorError) as error:
        raise DaopError(f"{folder}: the saved predictor is damaged ({error!r}); train it again") from error


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / "predictor.json"
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise DaopError(
                f"{path}: {document['format']} version {document['version']}, this daop reads {FORMAT} "
                f"{VERSION}; train the predictor again"
            )
        if seal(document) != document:
            raise DaopError(f"{path} was changed after it was saved (its seal differs); train it again")
        files, values = document["files"], document["values"]
        if not isinstance(files, dict) or not isinstance(values, dict):
            raise TypeError("files and values must be objects")
    except OSError as error:
        raise DaopError(
            f"no predictor in {folder}: {error.strerror}: {path}; train one with `daop train`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DaopError(f"{path} is damaged ({error!r}); train the predictor again") from error
    return dict(document)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _contiguous(array: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(array)
