"""A model's folder as daop sees it: for every routed expert, the byte ranges of the files that hold it.

``open_checkpoint`` reads headers and configuration only, and verifies them: every expert of every MoE layer
is there, each of its tensors has the shape that the model wants, a dtype that can be computed with and lies
within its file. After that, ``ranges`` answers without looking at a file. Errors are ``DaopError``.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daop.core import DaopError, Geometry
from daop.runtime import families, names
from daop.runtime.layout import DTYPES, ExpertLayout
from daop.runtime.safetensors_index import TensorIndex, TensorInfo, read_index, read_json
from daop.runtime.skeleton import Skeleton, build_skeleton

Location = tuple[int, int]  # (file, absolute offset)


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
    those that the rest of the model is built from, ``non_expert_bytes`` what they take as stored.
    """

    path: Path
    geometry: Geometry
    layouts: tuple[ExpertLayout, ...]
    fingerprint: str
    non_expert_bytes: int
    index: TensorIndex
    expert_tensors: frozenset[str]
    other_tensors: frozenset[str]
    skeleton: Skeleton
    _places: tuple[tuple[tuple[Location, ...], ...], ...] = field(repr=False)  # [layer][expert][part]

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

    def describe(self, flat: int) -> str:
        """The expert's name for messages: number, layer, module, file."""
        layer, expert = self.geometry.pair(flat)
        file = self.files[self._places[layer][expert][0][0]]
        return f"expert {expert} of {self.skeleton.experts[layer].path} (MoE layer {layer}) in {file}"


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a model: a folder, or the id of a repository on the Hugging Face hub (fetched if it is not there).

    A folder of that name wins over the hub.
    """
    folder = _folder(model)
    config = read_json(folder / "config.json")
    _refuse_quantised(folder / "config.json", config)
    index = read_index(folder)
    skeleton = build_skeleton(folder)
    sources = {name: source for experts in skeleton.experts for name, source in experts.sources.items()}
    found = names.targets(skeleton.model, index.tensors, frozenset(sources))
    layouts, places = [], []
    for experts in skeleton.experts:
        layout, layer_places = _place_layer(experts, index, found)
        layouts.append(layout)
        places.append(layer_places)
    expert_tensors = frozenset(name for name, target in found.items() if target.parameter in sources)
    other_tensors = frozenset(found) - expert_tensors
    fingerprint = _fingerprint(config, index, other_tensors)
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
        non_expert_bytes=sum(index.tensors[name].nbytes for name in other_tensors),
        index=index,
        expert_tensors=expert_tensors,
        other_tensors=other_tensors,
        skeleton=skeleton,
        _places=tuple(places),
    )


def _refuse_quantised(path: Path, config: dict[str, Any]) -> None:
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        quantised = part.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
            raise DaopError(
                f"{path} says that the weights are quantised ({method}); daop reads BF16, F16 and F32: use a "
                "copy of the model in one of these"
            )


def _folder(model: str | Path) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if path.exists():
        raise DaopError(f"{name} is a file: give the folder that holds the model's config.json")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise DaopError(f"{name} is neither a folder nor a hub id (owner/name): check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise DaopError(f"{name} is neither a folder nor a hub id: {error}") from error
    except (OSError, ValueError) as error:  # what huggingface_hub raises when it is offline or refused
        raise DaopError(
            f"there is no folder {name!r}, and the hub did not give a model of that name "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): check the name and the "
            "connection, or download the model and give its folder"
        ) from error


def _place_layer(
    experts: families.Experts, index: TensorIndex, found: dict[str, names.Target]
) -> tuple[ExpertLayout, tuple[tuple[Location, ...], ...]]:
    """The layout of a layer's experts and where each part of each expert lies."""
    # role -> expert -> (tensor, byte offset in it); role -> shape and dtype of one expert's tensor
    where: dict[str, dict[int, tuple[TensorInfo, int]]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, target in found.items():
        source = experts.sources.get(target.parameter)
        if source is None:
            continue
        info = index.tensors[name]
        if target.expert is None:
            wanted = (
                (experts.count * source.rows, *source.shape[1:])
                if source.rows
                else (experts.count, *source.shape)
            )
            role, shape = source.role, source.shape
            step = info.nbytes // experts.count
            spots = {expert: (info, expert * step) for expert in range(experts.count)}
        else:
            role, shape = _piece(source, target)
            wanted = shape
            spots = {target.expert: (info, 0)}
        if info.shape != wanted:
            raise DaopError(
                f"{index.where(name)} has shape {list(info.shape)}, but the model wants {list(wanted)}: "
                "config.json and weights are of different models; fetch the whole folder again"
            )
        if info.dtype not in DTYPES:
            raise DaopError(
                f"{index.where(name)} has dtype {info.dtype}; daop reads experts in {', '.join(DTYPES)}"
            )
        if shapes.setdefault(role, (shape, info.dtype)) != (shape, info.dtype):
            raise DaopError(
                f"{index.where(name)} has dtype {info.dtype}, another expert of the same layer has "
                f"{shapes[role][1]}: all experts of a layer must have the same"
            )
        held = where.setdefault(role, {})
        for expert, spot in spots.items():
            if expert in held:
                raise DaopError(
                    f"tensors {held[expert][0].name!r} and {name!r} both hold the {role} weights of expert "
                    f"{expert} of {experts.path!r}: remove the file that does not belong to the model"
                )
            held[expert] = spot
    _check_coverage(experts, where, index)
    # In the order in which the file has expert 0, so that neighbours there are neighbours in the slot.
    order = sorted(where, key=lambda role: _location(where[role][0]))
    layout = ExpertLayout.pack([(role, *shapes[role]) for role in order])
    places = tuple(tuple(_location(where[role][expert]) for role in order) for expert in range(experts.count))
    return layout, places


def _piece(source: families.PartSource, target: names.Target) -> tuple[str, tuple[int, ...]]:
    """Role and shape of one piece of a fused parameter: gate or up of gate_up, or the whole."""
    if target.pieces == 1:
        return source.role, source.shape
    fused = source.role.removesuffix("_bias")
    if fused != "gate_up" or target.pieces != 2 or source.shape[0] % 2:
        raise DaopError(
            f"{target.parameter!r} is made of {target.pieces} tensors, which daop cannot tell apart"
        )
    role = ("gate", "up")[target.piece] + source.role.removeprefix(fused)
    return role, (source.shape[0] // 2, *source.shape[1:])


def _location(spot: tuple[TensorInfo, int]) -> Location:
    return spot[0].file, spot[0].offset + spot[1]


def _check_coverage(
    experts: families.Experts, where: dict[str, dict[int, tuple[TensorInfo, int]]], index: TensorIndex
) -> None:
    """Every role of the module and every expert, none too many."""
    for source in experts.sources.values():
        split = (source.role.replace("gate_up", "gate"), source.role.replace("gate_up", "up"))
        roles = split if split[0] in where or split[1] in where else (source.role,)
        for role in roles:
            held = where.get(role, {})
            missing = [expert for expert in range(experts.count) if expert not in held]
            if missing:
                raise DaopError(
                    f"{index.folder} lacks the {role} weights of {len(missing)} of {experts.count} experts "
                    f"of {experts.path!r} (expert {missing[0]}, for one): a file of the model is missing "
                    "or of another model; fetch the whole folder again"
                )
            extra = [expert for expert in held if expert >= experts.count]
            if extra:
                raise DaopError(
                    f"{index.where(held[extra[0]][0].name)} is for expert {extra[0]}, but config.json says "
                    f"that there are {experts.count}: fetch the whole folder again"
                )


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
