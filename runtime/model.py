"""transformers' own model around daop's experts.

``build_model`` loads everything but the routed experts, whose weights are never read and never allocated,
and sends the calls of the experts modules to an ``ExpertsFn``. The result is a plain transformers model:
``generate``, the KV cache and attention are transformers'.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.codecs.base import TYPES
from daop.runtime.experts import Experts, ExpertsFn, Route
from daop.runtime.families import IMPLEMENTATION, find_experts, run_route
from daop.runtime.layout import DTYPES, ExpertForm
from daop.runtime.routers import LastInput, Router
from daop.runtime.safetensors_index import TensorInfo

NUMBERS: dict[str, torch.dtype] = {
    **TYPES,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "BOOL": torch.bool,
}


@dataclass(eq=False)
class BuiltModel:
    """A model that runs, and what an executor needs to know of it; one entry per MoE layer.

    ``routers[l]`` is None where the family's router was not found; then there is no gate look-ahead into
    that layer.
    """

    model: Any  # transformers' PreTrainedModel
    checkpoint: Checkpoint
    forms: tuple[ExpertForm, ...]
    routers: tuple[Router | None, ...]
    last_input: LastInput

    def router_logits(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        """[T, H] -> float32 [T, E]: scores whose top-k are the experts that the layer's router chooses for
        x, with everything that the family adds (correction bias, groups); None if the router is not known.

        x must be what a router sees, which in some families is not what the experts see: see
        ``router_input``.
        """
        router = self.routers[layer]
        return None if router is None else router.scores(x)

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """[T, H] -> what that layer's own router answers: ids [T, K], weights [T, K], and the softmax of its
        logits [T, E]; None if the router is not known or does not tell."""
        router = self.routers[layer]
        return None if router is None else router.route(x)

    def router_input(self, layer: int) -> torch.Tensor | None:
        """What the layer's router saw, [T, H], while the layer runs; None after another router ran."""
        return self.last_input.hidden if self.last_input.layer == layer else None


def build_model(
    checkpoint: Checkpoint,
    experts: ExpertsFn,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> BuiltModel:
    """Load the checkpoint's model with its routed experts replaced by ``experts``.

    ``dtype`` is that of the model outside its experts; by default what config.json says, else the experts'
    own. Several models may live side by side.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_route)
    skeleton = checkpoint.skeleton
    dtype = dtype or skeleton.config.dtype or DTYPES.get(checkpoint.layouts[0].parts[0].dtype, torch.bfloat16)
    found: list[Experts] = []
    model_class = _without_experts(skeleton.model_class, experts, found)
    with _Reader(checkpoint) as tensors:
        try:
            model, report = model_class.from_pretrained(
                None,
                config=copy.deepcopy(skeleton.config),
                state_dict=tensors,
                dtype=dtype,
                experts_implementation=IMPLEMENTATION,
                ignore_mismatched_sizes=True,  # reported below, in our own words
                output_loading_info=True,
            )
        except RuntimeError as error:
            raise DaopError(f"transformers cannot load {checkpoint.path}: {error}") from error
    _check_complete(checkpoint, model, report)
    model.config.name_or_path = str(checkpoint.path)
    _load_generation_config(checkpoint, model)
    model.to(device)
    last = LastInput()
    return BuiltModel(
        model=model,
        checkpoint=checkpoint,
        forms=tuple(
            entry.form().as_stored(layout) for entry, layout in zip(found, checkpoint.layouts, strict=True)
        ),
        routers=tuple(Router.watch(layer, entry, last) for layer, entry in enumerate(found)),
        last_input=last,
    )


def _without_experts(model_class: Any, experts: ExpertsFn, found: list[Experts]) -> Any:
    """A subclass of a transformers model that gives up its routed experts as soon as it is built, while
    every parameter is still on the meta device. Name and module stay, since transformers looks things up
    by them."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        found.extend(find_experts(self))
        for layer, entry in enumerate(found):
            entry.install(self, Route(layer, experts))

    names = {
        "__init__": __init__,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
    }
    return type(model_class.__name__, (model_class,), names)


class _Tensor:
    """A tensor of a file, read when indexed: what transformers' loader wants of a lazy tensor."""

    def __init__(self, reader: _Reader, info: TensorInfo) -> None:
        self._reader, self._info = reader, info

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._reader.read(self._info)[index]


class _Reader(Mapping[str, _Tensor]):
    """The checkpoint's tensors outside the experts, lazily. Each is checked for NaN as it is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._handles: list[int] = []

    def __enter__(self) -> _Reader:
        self._handles = [os.open(path, os.O_RDONLY) for path in self._checkpoint.files]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []

    def __getitem__(self, name: str) -> _Tensor:
        if name not in self._checkpoint.other_tensors:
            raise KeyError(name)
        return _Tensor(self, self._checkpoint.index.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._checkpoint.other_tensors))

    def __len__(self) -> int:
        return len(self._checkpoint.other_tensors)

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A tensor's values; of a quantised weight, what its bytes mean, in float32."""
        pieces = self._checkpoint.coded.get(info.name)
        if pieces is None:
            tensor = self._read(info)
        else:
            tensors = self._checkpoint.index.tensors
            parts = {suffix: self._read(tensors[name]) for suffix, name in pieces.items()}
            self._check_pieces(info, parts)
            tensor = self._checkpoint.codec.decode(parts, "", info.shape[1], 0, info.shape[0])
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise DaopError(
                f"{self._checkpoint.index.where(info.name)} holds NaN: the checkpoint is damaged or was "
                "saved before its weights were filled in; fetch it again"
            )
        return tensor

    def _check_pieces(self, info: TensorInfo, parts: dict[str, torch.Tensor]) -> None:
        """What a quantised weight is made of has the shapes and dtypes that its format asks for."""
        wanted = self._checkpoint.codec.pieces(*info.shape) if len(info.shape) == 2 else {}
        for suffix, piece in wanted.items():
            got = parts.get(suffix)
            if (
                got is None
                or tuple(got.shape) != piece.shape
                or got.dtype not in map(TYPES.get, piece.dtypes)
            ):
                wanted = {}
                break
        if not wanted:
            raise DaopError(
                f"{self._checkpoint.index.where(info.name)} is not a weight in "
                f"{self._checkpoint.codec.name} with scales as its configuration says: fetch the whole "
                "folder again"
            )

    def _read(self, info: TensorInfo) -> torch.Tensor:
        where = self._checkpoint.index.where(info.name)
        if info.dtype not in NUMBERS:
            raise DaopError(f"{where} has dtype {info.dtype}, which daop cannot read")
        flat = torch.empty(info.nbytes, dtype=torch.uint8)
        buffer, done = flat.numpy().data, 0
        while done < info.nbytes:  # one call reads at most 2 GiB
            got = os.preadv(self._handles[info.file], [buffer[done:]], info.offset + done)
            if got == 0:
                raise DaopError(f"{where} ends early: the file shrank since it was opened; fetch it again")
            done += got
        return flat.view(NUMBERS[info.dtype]).view(info.shape)


def _check_complete(checkpoint: Checkpoint, model: Any, report: dict[str, Any]) -> None:
    """Raise unless every parameter outside the experts came from the files."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise DaopError(
            f"{checkpoint.path} lacks {len(missing)} tensors of the model ({missing[0]!r}, for one): a file "
            "is missing or of another model; fetch the whole folder again"
        )
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise DaopError(
            f"tensor {name!r} of {checkpoint.path} has shape {list(stored)}, but the model wants "
            f"{list(wanted)}: config.json and weights are of different models; fetch the whole folder again"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise DaopError(
                f"{name!r} of {checkpoint.path} was left without a value: fetch the whole folder again"
            )


def _load_generation_config(checkpoint: Checkpoint, model: Any) -> None:
    from transformers import GenerationConfig

    path = checkpoint.path / "generation_config.json"
    if path.exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise DaopError(f"{path} is not a generation configuration: {error}") from error
