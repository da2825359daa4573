"""Folders that ``daop pack`` wrote: every expert is one aligned range of a file, already laid out as a slot.

    config.json, tokenizer, ...      the model's own; config.json says quant_method "daop-pack"
    model.safetensors                everything but the routed experts, as the source has it
    experts-NNNNN.safetensors        one MoE layer: one tensor of bytes per expert, one after the other
    daop-pack.json                   the manifest: what the bytes are, sizes and checksums; written last
    README.md                        a card for people

Each expert's bytes start at a multiple of 4096 in their file and are a multiple of 4096 long, so that a
direct read goes straight into the slot. The manifest is untrusted input: everything it says is checked
against the model's own modules and the files' headers before it is believed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError
from daop.runtime.codecs.base import TYPES, Codec, Piece
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.codecs.stored import PACKED, StoredFormat, find_format
from daop.runtime.experts import Experts
from daop.runtime.format_names import PAGE
from daop.runtime.layout import ALIGNMENT, DTYPES, ExpertLayout, Part
from daop.runtime.safetensors_index import read_header, read_json

MANIFEST = "daop-pack.json"
UNFINISHED = "daop-pack.unfinished.json"
VERSION = 1
AGAIN = "pack the model again"


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """One MoE layer: its file, how an expert lies, and a CRC-32 of each expert's bytes."""

    path: str
    file: str
    nbytes: int
    layout: ExpertLayout
    checksums: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "path": self.path,
            "file": self.file,
            "bytes": self.nbytes,
            "codec": {"name": layout.codec.name, **layout.codec.settings()},
            "slot": layout.nbytes,
            "parts": [
                {"role": part.role, "shape": part.shape, "dtype": part.dtype, "offset": part.offset}
                for part in layout.parts
            ],
            "crc32": list(self.checksums),
        }


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The manifest. ``settings`` is what was asked for; ``source`` says of which model."""

    settings: dict[str, Any]
    source: dict[str, Any]
    layers: tuple[PackedLayer, ...]
    rest_crc32: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "settings": self.settings,
            "source": self.source,
            "rest_crc32": self.rest_crc32,
            "layers": [layer.as_json() for layer in self.layers],
        }

    @property
    def fingerprint(self) -> str:
        """Of the source; with what was done to its numbers, if anything was."""
        kept = self.settings["dtype"] == "keep"
        return str(self.source["fingerprint"]) + ("" if kept else f"+{format_name(self.settings)}")

    def rest_format(self, folder: Path) -> StoredFormat | None:
        """The format of what is beside the experts: the source's own."""
        return find_format(folder / MANIFEST, {"quantization_config": self.source.get("quantization_config")})


def format_name(settings: dict[str, Any]) -> str:
    """ "keep", "int8-g64" ..."""
    group = settings.get("group")
    return str(settings["dtype"]) + (f"-g{group}" if group else "")


def read_pack(folder: Path) -> Pack | None:
    """The folder's manifest, or None if it is not a packed one; ``DaopError`` if it is unfinished."""
    if (folder / MANIFEST).exists():
        return parse_manifest(folder / MANIFEST)
    if (folder / UNFINISHED).exists():
        raise DaopError(
            f"{folder} is not complete: packing was interrupted; give the same `daop pack` command again, "
            "and it goes on where it stopped"
        )
    return None


def parse_manifest(path: Path) -> Pack:
    """A manifest whose contents have the right types; ``DaopError`` otherwise."""
    raw = read_json(path)
    if raw.get("version") != VERSION:
        raise DaopError(
            f"{path} is of format version {raw.get('version')!r}, this daop reads version {VERSION}: "
            f"{AGAIN}, or install the daop that packed it"
        )
    try:
        settings, source = dict(raw["settings"]), dict(raw["source"])
        return Pack(
            settings={**settings, "dtype": str(settings["dtype"])},
            source={**source, "fingerprint": str(source["fingerprint"])},
            layers=tuple(_layer(entry) for entry in raw["layers"]),
            rest_crc32=int(raw["rest_crc32"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DaopError(f"{path} is damaged ({type(error).__name__}: {error}): {AGAIN}") from error


def _layer(entry: dict[str, Any]) -> PackedLayer:
    codec, slot = _codec(dict(entry["codec"])), int(entry["slot"])
    parts = []
    for said in entry["parts"]:
        shape, dtype = tuple(int(n) for n in said["shape"]), str(said["dtype"])
        nbytes = int(np.prod(shape, dtype=object)) * TYPES[dtype].itemsize
        parts.append(
            Part(role=str(said["role"]), shape=shape, dtype=dtype, offset=int(said["offset"]), nbytes=nbytes)
        )
    file = str(entry["file"])
    if not re.fullmatch(r"[A-Za-z0-9._-]+\.safetensors", file):
        raise ValueError(f"file name {file!r}")
    return PackedLayer(
        path=str(entry["path"]),
        file=file,
        nbytes=int(entry["bytes"]),
        layout=ExpertLayout(parts=tuple(parts), nbytes=slot, stored_bytes=slot, codec=codec),
        checksums=tuple(int(n) for n in entry["crc32"]),
    )


def _codec(said: dict[str, Any]) -> Codec:
    name = said["name"]
    if name in ("int8", "int4"):
        return Integers(int(name[3:]), int(said["group"]))
    return {"plain": PLAIN, "fp8": Fp8(), "mxfp4": Mxfp4()}[name]


def place_layers(
    folder: Path, pack: Pack, experts: Sequence[Experts], first_file: int
) -> tuple[list[ExpertLayout], list[list[tuple[int, int]]], tuple[Path, ...]]:
    """Layouts, and per layer each expert's (file, offset), files counted from ``first_file``; and the files.

    ``DaopError`` if manifest, files and model do not agree in every size.
    """
    if len(pack.layers) != len(experts):
        raise DaopError(
            f"{folder / MANIFEST} has {len(pack.layers)} MoE layers, config.json {len(experts)}: {AGAIN}"
        )
    known: dict[ExpertLayout, ExpertLayout] = {}
    layouts, places, files = [], [], []
    for number, (layer, module) in enumerate(zip(pack.layers, experts, strict=True)):
        path = folder / layer.file
        _check_layout(folder, layer, module)
        if not path.exists() or path.stat().st_size != layer.nbytes:
            raise DaopError(
                f"{path} is missing, or not of the {layer.nbytes} bytes that {MANIFEST} says: fetch it "
                f"again, or {AGAIN}"
            )
        header = read_header(path, first_file + number)
        spots = []
        for expert in range(module.count):
            info = header.get(f"{layer.path}.{expert}")
            if info is None or info.nbytes != layer.layout.nbytes or info.offset % PAGE:
                raise DaopError(f"{path} does not hold expert {expert} as {MANIFEST} says: {AGAIN}")
            spots.append((info.file, info.offset))
        layouts.append(known.setdefault(layer.layout, layer.layout))
        places.append(spots)
        files.append(path)
    return layouts, places, tuple(files)


def _check_layout(folder: Path, layer: PackedLayer, experts: Experts) -> None:
    """The parts are those of the model's experts, and lie side by side within the slot."""
    layout, end = layer.layout, 0
    wanted = expected_parts(experts, layout.codec, {part.role for part in layout.parts})
    good = layer.path == experts.path and len(layer.checksums) == experts.count and not layout.nbytes % PAGE
    for part in sorted(layout.parts, key=lambda part: part.offset):
        piece = wanted.pop(part.role, None)
        good &= piece is not None and part.shape == piece.shape and part.dtype in piece.dtypes
        good &= part.offset >= end and part.offset % ALIGNMENT == 0
        end = part.offset + part.nbytes
    if not good or wanted or end > layout.nbytes:
        raise DaopError(
            f"{folder / MANIFEST} does not describe experts of {experts.path!r} as config.json has them: the "
            f"two are of different models, or the file was changed; {AGAIN}"
        )


def expected_parts(experts: Experts, codec: Codec, roles: set[str]) -> dict[str, Piece]:
    """The parts of one expert in a codec, by role; gate and up fused or apart as in ``roles``."""
    out = {}
    for source in experts.sources.values():
        named, shape = [source.role], source.shape
        if source.role not in roles and "gate_up" in source.role and not source.transposed:
            named = [source.role.replace("gate_up", piece) for piece in ("gate", "up")]
            shape = (shape[0] // 2, *shape[1:])
        for role in named:
            if codec == PLAIN or role.endswith("_bias"):
                out[role] = Piece(shape=shape, dtypes=tuple(DTYPES))
            else:
                rows, columns = reversed(shape) if source.transposed else shape
                pieces = codec.pieces(rows, columns)
                out |= {role + suffix: piece for suffix, piece in pieces.items()}
    return out


def header_of(layer: str, count: int, nbytes: int, metadata: dict[str, str]) -> bytes:
    """The start of an experts file: a safetensors header, padded so that the data begins at a page."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    for expert in range(count):
        span = [expert * nbytes, (expert + 1) * nbytes]
        entries[f"{layer}.{expert}"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": span}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def verify(folder: Path, pack: Pack) -> Iterator[tuple[str, float]]:
    """Read every byte and compare checksums; yields (file, share done). ``DaopError`` at a difference."""
    total = len(pack.layers) + 1
    rest = folder / "model.safetensors"
    if file_checksum(rest) != pack.rest_crc32:
        raise DaopError(f"{rest} is not what was packed: its checksum differs; fetch it again, or {AGAIN}")
    yield rest.name, 1 / total
    for done, layer in enumerate(pack.layers, 2):
        check_file(folder / layer.file, layer)
        yield layer.file, done / total


def check_file(path: Path, layer: PackedLayer) -> None:
    """Read one layer's file and compare each expert's checksum."""
    header = read_header(path, 0)
    buffer = np.empty(layer.layout.nbytes, dtype=np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            for expert, wanted in enumerate(layer.checksums):
                file.seek(header[f"{layer.path}.{expert}"].offset)
                if file.readinto(buffer.data) != len(buffer) or checksum(buffer) != wanted:
                    raise DaopError(changed(expert, layer.path, path))
    except (OSError, KeyError) as error:
        raise DaopError(f"cannot read {path} back: {error}") from error


def changed(expert: int, module: str, path: Path) -> str:
    return (
        f"expert {expert} of {module} in {path} is not what was packed: its checksum differs. The file was "
        f"altered, or the disk is failing; fetch it again, or {AGAIN}"
    )


def checksum(bytes_: NDArray[np.uint8]) -> int:
    return zlib.crc32(bytes_.data)


def file_checksum(path: Path) -> int:
    value = 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 22):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise DaopError(f"cannot read {path}: {error.strerror or error}") from error
    return value


QUANTISATION = {"quant_method": PACKED}
