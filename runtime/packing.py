"""Writes packed folders (``packed.py`` says what they are): layer by layer, resumable, never more than an
expert in memory.

Each layer's file is written under another name, flushed to the disk, read back and compared, and only then
gets its name and an entry in the unfinished manifest; the manifest proper comes last. So an interruption, or
a full disk, loses one layer at most, and nothing half-written is ever taken for a model. The source is only
read.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError
from daop.runtime.codecs.base import Codec
from daop.runtime.codecs.integers import Integers
from daop.runtime.experts import Experts, PartSource
from daop.runtime.format_names import GROUPS, PAGE
from daop.runtime.layout import ExpertLayout
from daop.runtime.packed import (
    MANIFEST,
    QUANTISATION,
    UNFINISHED,
    Pack,
    PackedLayer,
    check_file,
    checksum,
    file_checksum,
    format_name,
    header_of,
    parse_manifest,
)
from daop.runtime.reference import read_expert
from daop.runtime.safetensors_index import INDEX, read_json
from daop.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daop.runtime.checkpoint import Checkpoint

DTYPES = ("keep", "int8", "int4")
ROWS = 1 << 22  # weights that are converted at a time
REST = "model.safetensors"
SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
Told = Callable[[str, float], None]


def pack(checkpoint: Checkpoint, folder: Path, *, dtype: str = "keep", group: int = 0, told: Told) -> Pack:
    """Write ``checkpoint`` to ``folder``, or go on with what an earlier call left there.

    ``dtype``: "keep", "int8" or "int4"; ``group``: inputs per scale (0: 64 for INT8, 32 for INT4).
    """
    settings = _settings(checkpoint, dtype, group)
    plan = _Plan(checkpoint, settings)
    layers = _start(folder, plan)
    _check_space(folder, plan, layers)
    with _disk(folder):
        for number in range(len(layers), len(plan.layouts)):
            layers.append(_write_layer(folder, plan, number, told))
            _save(folder / UNFINISHED, Pack(settings=settings, source=plan.source, layers=tuple(layers)))
        told("everything but the experts", 1.0)
        _write_rest(folder, checkpoint)
        whole = Pack(
            settings=settings,
            source=plan.source,
            layers=tuple(layers),
            rest_crc32=file_checksum(folder / REST),
        )
        _save(folder / MANIFEST, whole)
        (folder / UNFINISHED).unlink(missing_ok=True)
    return whole


def _settings(checkpoint: Checkpoint, dtype: str, group: int) -> dict[str, Any]:
    if dtype not in DTYPES:
        raise DaopError(f"--dtype {dtype} is not known; known: {', '.join(DTYPES)}")
    if dtype == "keep":
        return {"dtype": dtype}
    if any(isinstance(layout.codec, Integers) for layout in checkpoint.layouts):
        raise DaopError(
            f"{checkpoint.path} is packed in integers already: to change them would lose twice; pack the "
            "model that it was made from"
        )
    chosen = Integers(int(dtype[3:]), group or GROUPS[dtype])  # refuses what is no group
    return {"dtype": dtype, "group": chosen.group}


@dataclass
class _Plan:
    """What every layer becomes."""

    checkpoint: Checkpoint
    settings: dict[str, Any]
    layouts: list[ExpertLayout] = field(init=False)
    source: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        source = self.checkpoint
        self.layouts = [
            packed_layout(layout, experts, self.codec)
            for layout, experts in zip(source.layouts, source.skeleton.experts, strict=True)
        ]
        config = read_json(source.path / "config.json")
        said = source.pack.source if source.pack is not None else config
        self.source = {
            "name": source.path.resolve().name,
            "fingerprint": source.fingerprint,
            "expert_bytes": int(source.geometry.bytes_of.sum()),
            "quantization_config": said.get("quantization_config"),
        }

    @property
    def codec(self) -> Codec | None:
        """That of the result; None: the source's own."""
        if self.settings["dtype"] == "keep":
            return None
        return Integers(int(self.settings["dtype"][3:]), self.settings["group"])

    def file_name(self, number: int) -> str:
        return f"experts-{number:05d}.safetensors"

    def header(self, number: int) -> bytes:
        experts, layout = self.checkpoint.skeleton.experts[number], self.layouts[number]
        about = {"format": "daop-pack", "experts": format_name(self.settings), "manifest": MANIFEST}
        return header_of(experts.path, experts.count, layout.nbytes, about)

    def file_bytes(self, number: int) -> int:
        count = self.checkpoint.skeleton.experts[number].count
        return len(self.header(number)) + count * self.layouts[number].nbytes


def packed_layout(layout: ExpertLayout, experts: Experts, codec: Codec | None) -> ExpertLayout:
    """Parts in the source's order, each weight in ``codec`` (None: as it is); whole pages."""
    if codec is None:
        parts, kept = [(part.role, part.shape, part.dtype) for part in layout.parts], layout.codec
    else:
        parts, kept = [], codec
        for part in layout.parts:
            if part.role.endswith("_bias"):
                parts.append((part.role, part.shape, part.dtype))
            elif not part.role.endswith(layout.codec.suffixes or ("\0",)):
                rows, columns = weight_shape(experts, part.role)
                for suffix, piece in codec.pieces(rows, columns).items():
                    parts.append((part.role + suffix, piece.shape, piece.dtypes[0]))
    made = ExpertLayout.pack(parts, kept)
    nbytes = -(-made.nbytes // PAGE) * PAGE
    return ExpertLayout(parts=made.parts, nbytes=nbytes, stored_bytes=nbytes, codec=kept)


def weight_shape(experts: Experts, role: str) -> tuple[int, int]:
    """(outputs, inputs) of a role's weight."""
    source = _source_of(experts, role)
    rows, columns = reversed(source.shape) if source.transposed else source.shape
    return (rows // 2 if source.role != role else rows), columns


def _source_of(experts: Experts, role: str) -> PartSource:
    by_role = {source.role: source for source in experts.sources.values()}
    return by_role.get(role) or by_role["gate_up"]


def convert(
    source: ExpertLayout,
    target: ExpertLayout,
    experts: Experts,
    slot: torch.Tensor,
    out: torch.Tensor,
    name: str,
) -> None:
    """An expert's bytes in one layout, to its bytes in another; ``name`` for messages."""
    out.zero_()
    parts, made = source.views(slot), target.views(out)
    if source.codec == target.codec:
        for role, part in parts.items():
            made[role].copy_(part)
        return
    codec = target.codec
    assert isinstance(codec, Integers)
    for role, part in parts.items():
        if role.endswith("_bias"):
            made[role].copy_(part)
        elif role in made and not role.endswith(source.codec.suffixes or ("\0",)):
            rows, columns = weight_shape(experts, role)
            flip = not source.codec.by_rows and _source_of(experts, role).transposed
            step = max(1, ROWS // columns)
            for first in range(0, rows, step):
                last = min(first + step, rows)
                if flip:
                    weight = part[:, first:last].float().T
                else:
                    weight = source.codec.decode(parts, role, columns, first, last)
                if not bool(weight.isfinite().all()):
                    raise DaopError(f"the {role} weights of {name} are not all finite: the source is damaged")
                for suffix, piece in codec.encode(weight).items():
                    made[role + suffix][first:last].copy_(piece)


def _start(folder: Path, plan: _Plan) -> list[PackedLayer]:
    """Make the folder; the layers that it has already. ``DaopError`` if it is of something else."""
    if (folder / MANIFEST).exists():
        raise DaopError(f"{folder} is packed already: name another folder, or remove it first")
    if not (folder / UNFINISHED).exists():
        if folder.exists() and any(folder.iterdir()):
            raise DaopError(f"{folder} is not empty, and not an unfinished packing: name another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DaopError(f"cannot make {folder}: {error.strerror or error}") from error
        with _disk(folder):
            _save(folder / UNFINISHED, Pack(settings=plan.settings, source=plan.source, layers=()))
        return []
    begun = parse_manifest(folder / UNFINISHED)
    if begun.settings != plan.settings or begun.source["fingerprint"] != plan.source["fingerprint"]:
        raise DaopError(
            f"{folder} holds an unfinished packing of {begun.source.get('name')!r} in "
            f"{format_name(begun.settings)}, which is not what is asked for now: name another folder, or "
            "remove it"
        )
    done = []
    for number, layer in enumerate(begun.layers):
        path = folder / layer.file
        if not path.exists() or path.stat().st_size != plan.file_bytes(number):
            break
        done.append(layer)
    return done


def _check_space(folder: Path, plan: _Plan, done: list[PackedLayer]) -> None:
    needed = sum(plan.file_bytes(number) for number in range(len(done), len(plan.layouts)))
    needed += plan.checkpoint.non_expert_bytes + (8 << 20)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DaopError(
            f"packing needs {format_size(needed)} more in {folder}, where {format_size(free)} are free: free "
            "some, or name a folder on another disk with -o"
        )


def _write_layer(folder: Path, plan: _Plan, number: int, told: Told) -> PackedLayer:
    checkpoint, layout = plan.checkpoint, plan.layouts[number]
    experts, total = checkpoint.skeleton.experts[number], checkpoint.geometry.total
    path = folder / plan.file_name(number)
    part = path.with_suffix(".part")
    out = torch.zeros(layout.nbytes, dtype=torch.uint8)
    bytes_: NDArray[np.uint8] = out.numpy()
    checksums = []
    with part.open("wb", buffering=0) as file:
        _write(file.fileno(), plan.header(number))
        for expert in range(experts.count):
            flat = checkpoint.geometry.flat(number, expert)
            told(f"layer {number + 1} of {len(plan.layouts)}", flat / total)
            slot = read_expert(checkpoint, flat)
            name = checkpoint.describe(flat)
            checkpoint.layouts[number].check_finite(slot, name)
            convert(checkpoint.layouts[number], layout, experts, slot, out, name)
            checksums.append(checksum(bytes_))
            _write(file.fileno(), bytes_.data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk
    layer = PackedLayer(
        path=experts.path,
        file=path.name,
        nbytes=plan.file_bytes(number),
        layout=layout,
        checksums=tuple(checksums),
    )
    check_file(part, layer)
    part.replace(path)
    return layer


def _write(descriptor: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_rest(folder: Path, checkpoint: Checkpoint) -> None:
    """Everything but the experts: tensors as they are, tokenizer and configuration."""
    index = checkpoint.index
    names = set(checkpoint.other_tensors)
    for pieces in checkpoint.coded.values():
        names |= set(pieces.values())
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(names):
        info = index.tensors[name]
        span = [at, at + info.nbytes]
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": span}
        at += info.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    part = (folder / REST).with_suffix(".part")
    with part.open("wb", buffering=0) as file:
        _write(file.fileno(), len(text).to_bytes(8, "little") + text)
        for name in sorted(names):
            info = index.tensors[name]
            with index.files[info.file].open("rb", buffering=0) as source:
                source.seek(info.offset)
                left = info.nbytes
                while left:
                    block = source.read(min(left, 1 << 22))
                    if not block:
                        raise DaopError(f"{index.files[info.file]} ended early: fetch it again")
                    _write(file.fileno(), block)
                    left -= len(block)
        os.fsync(file.fileno())
    part.replace(folder / REST)
    for pattern in SMALL:
        for path in sorted(checkpoint.path.glob(pattern)):
            if path.name not in ("config.json", INDEX, MANIFEST):
                shutil.copyfile(path, folder / path.name)
    config = read_json(checkpoint.path / "config.json")
    _write_text(folder / "config.json", {**config, "quantization_config": QUANTISATION})


def _save(path: Path, manifest: Pack) -> None:
    _write_text(path, manifest.as_json())


def _write_text(path: Path, document: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    with part.open("w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
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
