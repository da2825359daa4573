"""Files of a packed folder, each of which appears under its name when it is whole, or never.

Whatever a disk may refuse is said so that a person can act on it (``on_disk``).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.packed import MANIFEST, QUANTISATION
from daop.runtime.safetensors_index import TensorIndex, read_json

REST = "model.safetensors"
BLOCK = 1 << 22  # bytes that are copied at a time
SMALL = (
    *("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "LICENSE*", "NOTICE*"),
    "additional_chat_templates/*.jinja",
)
"""What a tokenizer, its chat templates and a licence are called; nothing else of the source is copied."""


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Failures of the disk, said so that a person can act on them."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DaopError(
                f"the disk of {folder} is full: free some space and give the same command again; it goes on "
                "with the layer that was being written. The source was only read"
            ) from error
        raise DaopError(f"cannot write to {folder}: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else packs into the folder meanwhile. The lock goes with the process, whatever ends it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DaopError(f"another daop pack is writing to {folder}: wait for it, or end it") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[FileIO]:
    """To write, flush to the disk, and give its name when nothing went wrong."""
    part = path.with_suffix(".part")
    with part.open("wb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())
    part.replace(path)


def write(descriptor: int, data: Any) -> None:
    """All of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_json(path: Path, document: dict[str, Any]) -> None:
    with whole_file(path) as file:
        write(file.fileno(), (json.dumps(document, indent=1) + "\n").encode())


def write_rest(folder: Path, checkpoint: Checkpoint) -> int:
    """Everything but the experts: tensors as they are, tokenizer and configuration. CRC-32 of the tensors'
    file as it was written."""
    names = set(checkpoint.other_tensors)
    for pieces in checkpoint.coded.values():
        names |= set(pieces.values())
    written = _write_tensors(folder / REST, checkpoint, sorted(names))
    for pattern in SMALL:
        for path in sorted(checkpoint.path.glob(pattern)):
            if path.name in ("config.json", MANIFEST) or path.name.endswith(".index.json"):
                continue
            target = folder / path.relative_to(checkpoint.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    config = read_json(checkpoint.path / "config.json")
    write_json(folder / "config.json", {**config, "quantization_config": QUANTISATION})
    return written


def _write_tensors(path: Path, checkpoint: Checkpoint, names: list[str]) -> int:
    """One safetensors file of these tensors of the source, their bytes as they are."""
    index = checkpoint.index
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        info = index.tensors[name]
        span = [at, at + info.nbytes]
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": span}
        at += info.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    value = 0
    with whole_file(path) as file:
        for block in chain([len(text).to_bytes(8, "little") + text], _blocks(index, names)):
            write(file.fileno(), block)
            value = zlib.crc32(block, value)
    return value


def _blocks(index: TensorIndex, names: list[str]) -> Iterator[bytes]:
    """The tensors' bytes, one after the other."""
    for name in names:
        info = index.tensors[name]
        with index.files[info.file].open("rb", buffering=0) as file:
            file.seek(info.offset)
            left = info.nbytes
            while left:
                block = file.read(min(left, BLOCK))
                if not block:
                    raise DaopError(f"{index.files[info.file]} ended early: fetch it again")
                yield block
                left -= len(block)
