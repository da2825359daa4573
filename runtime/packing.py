"""Writes packed folders (``packed.py`` says what they are): layer by layer, resumable, never more than an
expert in memory.

Each layer's file is written under another name, flushed to the disk, read back and compared, and only then
gets its name and an entry in the unfinished manifest; the manifest proper comes last. So an interruption, or
a full disk, loses one layer at most, and nothing half-written is ever taken for a model. The source is only
read. What is gone on with must be of the same source: its configuration and tensors are compared, and of
every layer that is there already two experts are made again and must come out the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.codecs.integers import Integers
from daop.runtime.layout import ExpertLayout
from daop.runtime.pack_convert import codec_of_settings, convert, packed_layout, settings_of
from daop.runtime.pack_files import REST, locked, on_disk, write, write_json, write_rest
from daop.runtime.packed import (
    MANIFEST,
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
from daop.runtime.safetensors_index import read_json
from daop.units import format_size

SLACK = 8 << 20  # bytes of manifest, tokenizer and the like
Told = Callable[[str, float], None]


def pack(checkpoint: Checkpoint, folder: Path, *, dtype: str = "keep", group: int = 0, told: Told) -> Pack:
    """Write ``checkpoint`` to ``folder``, or go on with what an earlier call left there; a folder that is
    complete, and what is asked for, is left as it is.

    ``dtype``: "keep", "int8" or "int4"; ``group``: inputs per scale (0: 64 for INT8, 32 for INT4).
    """
    plan = _plan(checkpoint, settings_of(dtype, group))
    found = find_complete(folder, plan)
    if found is not None:
        return found
    _make_folder(folder, plan)
    with on_disk(folder), locked(folder):
        layers = _begun(folder, plan)
        _check_space(folder, plan, layers)
        for number in range(len(layers), len(plan.layouts)):
            layers.append(_write_layer(folder, plan, number, told))
            write_json(folder / UNFINISHED, plan.manifest(layers).as_json())
        told("everything but the experts", 1.0)
        rest = write_rest(folder, checkpoint)
        if file_checksum(folder / REST) != rest:
            raise DaopError(f"{folder / REST} reads back otherwise than it was written: the disk is failing")
        whole = plan.manifest(layers, rest_crc32=rest)
        write_json(folder / MANIFEST, whole.as_json())
        (folder / UNFINISHED).unlink(missing_ok=True)
    return whole


@dataclass
class Plan:
    """What every layer becomes."""

    checkpoint: Checkpoint
    settings: dict[str, Any]
    layouts: list[ExpertLayout] = field(init=False)
    source: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        source, codec = self.checkpoint, codec_of_settings(self.settings)
        self.layouts = [
            packed_layout(layout, experts, codec)
            for layout, experts in zip(source.layouts, source.skeleton.experts, strict=True)
        ]
        config = read_json(source.path / "config.json")
        said = source.pack.source if source.pack is not None else config
        self.source = {
            "name": source.path.resolve().name,
            "fingerprint": source.fingerprint,
            "expert_bytes": int(source.geometry.bytes_of.sum()),
            "quantization_config": quantisation_of(said),
        }

    def file_name(self, number: int) -> str:
        return f"experts-{number:05d}.safetensors"

    def header(self, number: int) -> bytes:
        experts, layout = self.checkpoint.skeleton.experts[number], self.layouts[number]
        about = {"format": "daop-pack", "experts": format_name(self.settings), "manifest": MANIFEST}
        return header_of(experts.path, experts.count, layout.nbytes, about)

    def file_bytes(self, number: int) -> int:
        count = self.checkpoint.skeleton.experts[number].count
        return len(self.header(number)) + count * self.layouts[number].nbytes

    def manifest(self, layers: list[PackedLayer], rest_crc32: int = 0) -> Pack:
        return Pack(settings=self.settings, source=self.source, layers=tuple(layers), rest_crc32=rest_crc32)

    def expert(self, number: int, expert: int, out: torch.Tensor) -> None:
        """An expert of a layer, as it is to be written."""
        checkpoint = self.checkpoint
        flat = checkpoint.geometry.flat(number, expert)
        slot, name = read_expert(checkpoint, flat), checkpoint.describe(flat)
        source = checkpoint.layouts[number]
        source.check_finite(slot, name)
        convert(source, self.layouts[number], checkpoint.skeleton.experts[number], slot, out, name)


def quantisation_of(config: dict[str, Any]) -> Any:
    """``quantization_config``, wherever a configuration has it."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    return config.get("quantization_config") or inner


def _plan(checkpoint: Checkpoint, settings: dict[str, Any]) -> Plan:
    packed = any(isinstance(layout.codec, Integers) for layout in checkpoint.layouts)
    if packed and settings["dtype"] != "keep":
        raise DaopError(
            f"{checkpoint.path} is packed in integers already: to change them would lose twice; pack the "
            "model that it was made from"
        )
    return Plan(checkpoint, settings)


def find_complete(folder: Path, plan: Plan) -> Pack | None:
    """The manifest of a folder that is what is asked for; ``DaopError`` if it is something else, packed."""
    if not (folder / MANIFEST).exists():
        return None
    found = parse_manifest(folder / MANIFEST)
    same = found.settings == plan.settings and found.source["fingerprint"] == plan.source["fingerprint"]
    if same and all(_is_same(plan, number, layer) for number, layer in enumerate(found.layers)):
        return found
    raise DaopError(
        f"{folder} is packed already, from {found.source.get('name')!r} in {format_name(found.settings)}: "
        "name another folder, or remove it first"
    )


def _make_folder(folder: Path, plan: Plan) -> None:
    """Make the folder and begin, or see that it was begun. ``DaopError`` if it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise DaopError(f"-o {folder} is a file: name a new folder")
    if (folder / UNFINISHED).exists():
        return
    if folder.exists() and any(folder.iterdir()):
        raise DaopError(f"{folder} is not empty, and not an unfinished packing: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DaopError(f"cannot make {folder}: {error.strerror or error}") from error
    with on_disk(folder):
        write_json(folder / UNFINISHED, plan.manifest([]).as_json())


def _begun(folder: Path, plan: Plan) -> list[PackedLayer]:
    """The layers that are there already. ``DaopError`` if they are of another source or format."""
    begun = parse_manifest(folder / UNFINISHED)
    if not begun.layers:  # nothing is lost if something else is asked for now
        write_json(folder / UNFINISHED, plan.manifest([]).as_json())
        return []
    if begun.settings != plan.settings:
        raise DaopError(
            f"{folder} holds an unfinished packing in {format_name(begun.settings)}, but "
            f"{format_name(plan.settings)} is asked for now: name another folder, or remove it"
        )
    if begun.source["fingerprint"] != plan.source["fingerprint"]:
        raise DaopError(_changed(folder, plan, begun))
    done = []
    for number, layer in enumerate(begun.layers):
        path = folder / layer.file
        if not path.exists() or path.stat().st_size != plan.file_bytes(number):
            break
        if not _is_same(plan, number, layer):
            raise DaopError(_changed(folder, plan, begun))
        done.append(layer)
    return done


def _is_same(plan: Plan, number: int, layer: PackedLayer) -> bool:
    """Whether a layer that was written is what the source makes now, by its first and last expert."""
    layout = plan.layouts[number]
    if layer.layout != layout or len(layer.checksums) != plan.checkpoint.geometry.experts[number]:
        return False
    out = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for expert in {0, len(layer.checksums) - 1}:
        plan.expert(number, expert, out)
        if checksum(out.numpy()) != layer.checksums[expert]:
            return False
    return True


def _changed(folder: Path, plan: Plan, begun: Pack) -> str:
    return (
        f"{folder} holds an unfinished packing of {begun.source.get('name')!r}, which is not what "
        f"{plan.checkpoint.path} holds now: it is another model, or was changed since; remove {folder}, or "
        "name another folder"
    )


def _check_space(folder: Path, plan: Plan, done: list[PackedLayer]) -> None:
    needed = sum(plan.file_bytes(number) for number in range(len(done), len(plan.layouts)))
    needed += plan.checkpoint.non_expert_bytes + SLACK
    for part in folder.glob("*.part"):
        needed -= part.stat().st_size  # of the layer that was being written; it is written anew
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DaopError(
            f"packing needs {format_size(needed)} more in {folder}, where {format_size(free)} are free: free "
            "some, or name a folder on another disk with -o"
        )


def _write_layer(folder: Path, plan: Plan, number: int, told: Told) -> PackedLayer:
    """Write, flush, read back, compare, and only then give the file its name."""
    path = folder / plan.file_name(number)
    part = path.with_suffix(".part")
    with part.open("wb", buffering=0) as file:
        write(file.fileno(), plan.header(number))
        checksums = list(_write_experts(file.fileno(), plan, number, told))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk
    layer = PackedLayer(
        path=plan.checkpoint.skeleton.experts[number].path,
        file=path.name,
        nbytes=plan.file_bytes(number),
        layout=plan.layouts[number],
        checksums=tuple(checksums),
    )
    check_file(part, layer)
    part.replace(path)
    return layer


def _write_experts(descriptor: int, plan: Plan, number: int, told: Told) -> Iterator[int]:
    """One after the other; yields their checksums."""
    geometry = plan.checkpoint.geometry
    out = torch.zeros(plan.layouts[number].nbytes, dtype=torch.uint8)
    bytes_: NDArray[np.uint8] = out.numpy()
    for expert in range(geometry.experts[number]):
        told(f"layer {number + 1} of {geometry.layers}", geometry.flat(number, expert) / geometry.total)
        plan.expert(number, expert, out)
        write(descriptor, bytes_.data)
        yield checksum(bytes_)
