"""Which tensor lies where in a folder of safetensors files, from their headers alone.

Everything here is untrusted input: sizes are bounded before memory is taken for them, offsets are checked
against the shape, against each other and against the file's length, and names from an index must stay
inside the folder. Whatever is wrong raises ``DaopError`` naming the file (and tensor) and the remedy.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header
``{name: {dtype, shape, data_offsets: [begin, end]}}``, then the data without gaps.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daop.core import DaopError

MAX_HEADER = 100_000_000  # the format's own limit
MAX_JSON = 200_000_000  # an index of a million tensors is far below this
ITEMSIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1}
ITEMSIZES |= {
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FETCH = "fetch the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``offset`` is absolute in file number ``file``."""

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorIndex:
    """All tensors of a folder by name, and the files they lie in."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]

    def where(self, name: str) -> str:
        """``tensor NAME in FILE``, for messages."""
        return f"tensor {name!r} in {self.files[self.tensors[name].file]}"


def read_index(folder: Path) -> TensorIndex:
    """Find the folder's safetensors files as transformers would, and read and verify their headers.

    A single ``model.safetensors`` comes first, then what ``model.safetensors.index.json`` names, then,
    without either, a complete set of ``NAME-00001-of-0000N.safetensors``, then every ``*.safetensors``.
    """
    weight_map: dict[str, str] = {}
    if (folder / SINGLE).exists():
        names = [SINGLE]
    elif (folder / INDEX).exists():
        weight_map = read_weight_map(folder / INDEX)
        tensor_of = {file: name for name, file in weight_map.items()}
        names = sorted(tensor_of)
        for name in names:
            if not (folder / name).exists():
                raise DaopError(
                    f"{folder / INDEX} names the file {name} (for tensor {tensor_of[name]!r}, for one), "
                    "which is not in the folder: fetch it, or fetch the whole folder again"
                )
    else:
        names = _shards_without_index(folder)
    files = tuple(folder / name for name in names)
    headers = [read_header(path, number) for number, path in enumerate(files)]
    tensors: dict[str, TensorInfo] = {}
    for path, header in zip(files, headers, strict=True):
        for info in header.values():
            chosen = weight_map.get(info.name)
            if chosen is not None and chosen != path.name:
                continue
            if info.name in tensors:
                other = files[tensors[info.name].file]
                raise DaopError(
                    f"tensor {info.name!r} is in {other} and in {path}, and nothing says which one counts: "
                    "remove the file that does not belong to the model"
                )
            tensors[info.name] = info
    for name, file in weight_map.items():
        if name not in tensors:
            raise DaopError(
                f"{folder / INDEX} says that tensor {name!r} is in {file}, but that file does not hold it: "
                "index and files are of different versions; fetch the whole folder again"
            )
    return TensorIndex(folder=folder, files=files, tensors=tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size, keys given once."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise DaopError(f"{path} is larger than {MAX_JSON} bytes, which no such file is: {FETCH}")
        value = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as error:
        raise DaopError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DaopError(f"{path} is not valid JSON ({error}): {FETCH}") from error
    if not isinstance(value, dict):
        raise DaopError(f"{path} does not hold a JSON object: {FETCH}")
    return value


def read_header(path: Path, number: int) -> dict[str, TensorInfo]:
    """Read and verify one file's header; ``number`` becomes the tensors' ``file``."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(MAX_HEADER, size - 8):
                raise DaopError(f"{path} is not a safetensors file{_guess(start, size)}")
            raw = file.read(length)
    except FileNotFoundError as error:
        raise DaopError(f"{path} is missing: fetch it, or fetch the whole folder again") from error
    except OSError as error:
        raise DaopError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DaopError(
            f"{path} is not a safetensors file: its header is not valid JSON ({error})"
        ) from error
    if not isinstance(header, dict):
        raise DaopError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    infos = {name: _entry(path, number, 8 + length, name, value) for name, value in header.items()}
    _check_cover(path, size, 8 + length, infos)
    return infos


def _entry(path: Path, number: int, base: int, name: str, value: Any) -> TensorInfo:
    """One verified header entry."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        # Bounded, so that a hostile shape cannot make the product below take for ever.
        whole = len(shape) <= 16 and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or not isinstance(dtype, str):
        raise DaopError(f"the header of {path} describes tensor {name!r} wrongly ({value!r:.200}): {FETCH}")
    if dtype not in ITEMSIZES:
        raise DaopError(f"tensor {name!r} in {path} has dtype {dtype!r}, which is not supported")
    if end - begin != math.prod(shape) * ITEMSIZES[dtype]:
        raise DaopError(
            f"tensor {name!r} in {path} has {end - begin} bytes, but shape {list(shape)} in {dtype} needs "
            f"{math.prod(shape) * ITEMSIZES[dtype]}: the file is damaged; {FETCH}"
        )
    return TensorInfo(name, number, dtype, shape, base + begin, end - begin)


def _check_cover(path: Path, size: int, base: int, infos: dict[str, TensorInfo]) -> None:
    """The tensors must fill the file: no overlap, no gap, nothing missing at the end."""
    at = base
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            kind = "overlaps the one before it" if info.offset < at else "leaves a gap before it"
            raise DaopError(f"tensor {info.name!r} in {path} {kind}: the file is damaged; {FETCH}")
        at += info.nbytes
        if at > size:
            raise DaopError(
                f"{path} is truncated: tensor {info.name!r} ends at byte {at}, the file at {size}; {FETCH}"
            )
    if at != size:
        raise DaopError(f"{path} has {size - at} bytes after its last tensor: it is damaged; {FETCH}")


def read_weight_map(path: Path) -> dict[str, str]:
    """File name by tensor, from an index; the files need not be there."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DaopError(f"{path} has no weight_map: {FETCH}")
    for name, file in weight_map.items():
        # A bare file name: nothing that a file from elsewhere says may lead out of the folder.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise DaopError(
                f"{path} says that tensor {name!r} is in {file!r}; only a safetensors file of "
                "the same folder is allowed there"
            )
    return weight_map


def _shards_without_index(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        raise DaopError(
            f"{folder} holds no safetensors files: give a folder with a model's safetensors files"
        )
    series: dict[tuple[str, int], dict[int, str]] = {}
    for name in found:
        match = re.fullmatch(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors", name)
        if match:
            series.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    if not series:
        return found
    if len(series) > 1:
        raise DaopError(
            f"{folder} holds several series of shards ({', '.join(sorted(prefix for prefix, _ in series))}) "
            f"and no {INDEX} that says which ones belong to the model: remove the others or add the index"
        )
    ((prefix, total), shards) = next(iter(series.items()))
    for number in range(1, total + 1):
        if number not in shards:
            raise DaopError(
                f"{folder} has {len(shards)} of the {total} files {prefix}-*-of-{total:05d}.safetensors; "
                f"number {number} is missing: fetch it, or fetch the whole folder again"
            )
    return [shards[number] for number in sorted(shards)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name is given twice")
    return out


def _guess(start: bytes, size: int) -> str:
    """What the file may be instead, and the remedy."""
    if start.startswith(b"version "):
        return ": it is a Git LFS pointer; run `git lfs pull` in the folder"
    if start.startswith((b"PK", b"\x80")):
        return ": it looks like a pickle, which is never loaded; convert the model to safetensors"
    if size < 8:
        return f" ({size} bytes): {FETCH}"
    return f": its header would be longer than the file; {FETCH}"
