"""A model's folder as daop sees it: for every routed expert, the byte ranges of the files that hold it.

``open_checkpoint`` reads headers and configuration only, and verifies them: every expert of every MoE layer
is there, each of its tensors has the shape that the model wants, a dtype that can be computed with and lies
within its file. After that, ``ranges`` answers without looking at a file. Errors are ``DaopError``.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daop.core import DaopError, Geometry
from daop.runtime import families, names
from daop.runtime.codecs.base import Codec
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.codecs.stored import find_format
from daop.runtime.hub import model_folder
from daop.runtime.layout import ExpertLayout
from daop.runtime.packed import Pack, place_layers, read_pack
from daop.runtime.placing import LayerPlaces, Location
from daop.runtime.safetensors_index import TensorIndex, read_index, read_json
from daop.runtime.skeleton import Skeleton, build_skeleton


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``nbytes`` at ``offset`` of ``files[file]`` belong at ``slot_offset`` of the slot."""

    file: int
    offset: int
    nbytes: int
    slot_offset: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A verified model folder.

    ``layouts[l]`` is how an expert of MoE layer ``l`` lies in a slot; ``geometry.expert_bytes`` are bytes as
    stored. ``fingerprint`` depends on configuration, tensor names, shapes, dtypes and the first bytes of
    every tensor outside the experts, not on how the tensors are spread over files. ``other_tensors`` are
    those that the rest of the model is built from, ``non_expert_bytes`` what they take as stored; of those
    that are quantised (in ``codec``), ``coded`` names all pieces: weights' name -> {suffix: name}.
    """

    path: Path
    geometry: Geometry
    layouts: tuple[ExpertLayout, ...]
    fingerprint: str
    non_expert_bytes: int
    index: TensorIndex
    expert_tensors: frozenset[str]
    other_tensors: frozenset[str]
    coded: dict[str, dict[str, str]]
    codec: Codec
    skeleton: Skeleton
    pack: Pack | None = None  # the manifest, if ``daop pack`` wrote the folder
    _places: tuple[tuple[tuple[Location, ...], ...], ...] = field(
        repr=False, default=()
    )  # [layer][expert][part]
    _ranges: dict[int, tuple[ByteRange, ...]] = field(repr=False, default_factory=dict)  # asked before

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that ``ByteRange.file`` counts."""
        return self.index.files

    @property
    def tested(self) -> bool:
        """Whether this family's logits are compared with transformers' own in the tests."""
        return self.skeleton.model_type in families.TESTED

    def ranges(self, flat: int) -> tuple[ByteRange, ...]:
        """Where the expert with this flat id lies; neighbours in both file and slot are one range."""
        if flat not in self._ranges:
            self._ranges[flat] = self._find_ranges(flat)
        return self._ranges[flat]

    def _find_ranges(self, flat: int) -> tuple[ByteRange, ...]:
        layer, expert = self.geometry.pair(flat)
        out: list[ByteRange] = []
        for part, (file, offset) in zip(self.layouts[layer].parts, self._places[layer][expert], strict=True):
            last = out[-1] if out else None
            if (
                last is not None
                and last.file == file
                and last.offset + last.nbytes == offset
                and last.slot_offset + last.nbytes == part.offset
            ):
                out[-1] = ByteRange(file, last.offset, last.nbytes + part.nbytes, last.slot_offset)
            else:
                out.append(ByteRange(file, offset, part.nbytes, part.offset))
        return tuple(out)

    def checksum(self, flat: int) -> int | None:
        """CRC-32 of the expert's bytes as read; None where the files give none."""
        if self.pack is None:
            return None
        layer, expert = self.geometry.pair(flat)
        return self.pack.layers[layer].checksums[expert]

    def describe(self, flat: int) -> str:
        """The expert's name for messages: number, layer, module, file."""
        layer, expert = self.geometry.pair(flat)
        file = self.files[self._places[layer][expert][0][0]]
        return f"expert {expert} of {self.skeleton.experts[layer].path} (MoE layer {layer}) in {file}"


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a model: a folder, or the id of a repository on the Hugging Face hub (fetched if it is not there).

    A folder of that name wins over the hub.
    """
    folder = model_folder(model)
    pack = read_pack(folder)  # first, since a packed folder that is unfinished has no config.json yet
    if not (folder / "config.json").exists():
        raise DaopError(
            f"{folder} holds no config.json: give a model's folder, or fetch the model again if it is one"
        )
    config = read_json(folder / "config.json")
    stored = find_format(folder / "config.json", config) if pack is None else pack.rest_format(folder)
    index = read_index(folder)
    skeleton = build_skeleton(folder, len(index.tensors))
    sources = {name: source for experts in skeleton.experts for name, source in experts.sources.items()}
    found = names.targets(skeleton.model, index.tensors, frozenset(sources), stored)
    whole: dict[int, tuple[ByteRange, ...]] = {}
    if pack is None:
        layouts, places = _place(skeleton, index, found, stored.codec if stored else PLAIN)
    else:
        layouts, spots, files = place_layers(folder, pack, skeleton.experts, len(index.files))
        index = replace(index, files=(*index.files, *files))
        places = [tuple((spot,) for spot in layer) for layer in spots]
        sizes = [layout.nbytes for layout, layer in zip(layouts, spots, strict=True) for _ in layer]
        flat = [spot for layer in spots for spot in layer]
        whole = {
            n: (ByteRange(*spot, size, 0),) for n, (spot, size) in enumerate(zip(flat, sizes, strict=True))
        }
    expert_tensors = frozenset(name for name, target in found.items() if target.parameter in sources)
    rest = {name: target for name, target in found.items() if name not in expert_tensors}
    other_tensors = frozenset(name for name, target in rest.items() if not target.coded)
    fingerprint = _fingerprint(config, index, other_tensors) if pack is None else pack.fingerprint
    return Checkpoint(
        path=folder,
        geometry=Geometry(
            experts=tuple(experts.count for experts in skeleton.experts),
            top_k=max(experts.top_k for experts in skeleton.experts),
            expert_bytes=tuple(layout.stored_bytes for layout in layouts),
            layer_to_model_layer=tuple(experts.model_layer for experts in skeleton.experts),
            fingerprint=fingerprint,
        ),
        layouts=tuple(layouts),
        fingerprint=fingerprint,
        non_expert_bytes=sum(index.tensors[name].nbytes for name in rest),
        index=index,
        expert_tensors=expert_tensors,
        other_tensors=other_tensors,
        coded=_pieces_of(rest),
        codec=stored.codec if stored else PLAIN,
        skeleton=skeleton,
        pack=pack,
        _places=tuple(places),
        _ranges=whole,
    )


def _place(
    skeleton: Skeleton, index: TensorIndex, found: dict[str, names.Target], codec: Codec
) -> tuple[list[ExpertLayout], list[tuple[tuple[Location, ...], ...]]]:
    """Per MoE layer, how its experts lie in a slot and where each part of each expert is in the files."""
    by_parameter: dict[str, list[str]] = {}
    for name, target in found.items():
        by_parameter.setdefault(target.parameter, []).append(name)
    layouts, places = [], []
    known: dict[frozenset[tuple[str, tuple[int, ...], str]], ExpertLayout] = {}
    for experts in skeleton.experts:
        collected = LayerPlaces(experts, index, codec)
        for parameter in experts.sources:
            for name in by_parameter.get(parameter, ()):
                collected.add(name, found[name])
        layout, layer_places = collected.finish(known)
        layouts.append(layout)
        places.append(layer_places)
    return layouts, places


def _pieces_of(rest: dict[str, names.Target]) -> dict[str, dict[str, str]]:
    """By name of a quantised weight outside the experts: its pieces' names by suffix."""
    by_parameter: dict[str, dict[str, str]] = {}
    for name, target in rest.items():
        if target.coded is not None:
            by_parameter.setdefault(target.parameter, {})[target.coded] = name
    return {pieces[""]: pieces for pieces in by_parameter.values()}


def _fingerprint(config: dict[str, Any], index: TensorIndex, others: frozenset[str]) -> str:
    """sha256 of what makes two models different, cheap to read; see ``Checkpoint``."""
    stable = {
        key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")
    }
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True).encode())
    handles = [os.open(path, os.O_RDONLY) for path in index.files]
    try:
        for name, info in sorted(index.tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            if name in others:
                digest.update(os.pread(handles[info.file], min(64, info.nbytes), info.offset))
    finally:
        for handle in handles:
            os.close(handle)
    return digest.hexdigest()
