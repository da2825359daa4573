"""Where every expert of a layer lies in the files, and whether all are there as the model wants them."""

from __future__ import annotations

from daop.core import DaopError
from daop.runtime.codecs.base import Codec
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.experts import Experts, PartSource
from daop.runtime.layout import DTYPES, ExpertLayout
from daop.runtime.names import Target
from daop.runtime.safetensors_index import TensorIndex, TensorInfo

Location = tuple[int, int]  # (file, absolute offset)
Shape = tuple[int, ...]
FETCH = "fetch the whole folder again"


class LayerPlaces:
    """Collects one layer's expert tensors, then says how they lie in a slot and where in the files.

    ``codec`` is that of the checkpoint's quantised weights, if it has any; a layer may still be plain.
    """

    def __init__(self, experts: Experts, index: TensorIndex, codec: Codec = PLAIN) -> None:
        self._experts = experts
        self._index = index
        self._format = codec
        self._codec: Codec = PLAIN  # of this layer
        # By role, by expert: the tensor and how many bytes into it; by role: shape and dtype for one expert.
        self._found: dict[str, dict[int, tuple[TensorInfo, int]]] = {}
        self._kinds: dict[str, tuple[Shape, str]] = {}

    def add(self, name: str, target: Target) -> None:
        """Note that tensor ``name`` is ``target``; ``DaopError`` if shape or dtype cannot be."""
        experts, info = self._experts, self._index.tensors[name]
        source = experts.sources[target.parameter]
        role, shape, rows = source.role, source.shape, source.rows
        if target.expert is not None:
            role, shape = _piece(source, target)
        dtypes = tuple(DTYPES)
        if target.coded is not None:
            self._codec = self._format
            pieces = self._codec.pieces(*(reversed(shape) if source.transposed else shape))
            shape, dtypes = pieces[target.coded].shape, pieces[target.coded].dtypes
            role, rows = role + target.coded, 0
        if target.expert is None:
            stored = (experts.count * rows, *shape[1:]) if rows else (experts.count, *shape)
            step = info.nbytes // experts.count
            spots = {expert: (info, expert * step) for expert in range(experts.count)}
        else:
            stored, spots = shape, {target.expert: (info, 0)}
        self._check(name, stored, dtypes)
        if self._kinds.setdefault(role, (shape, info.dtype)) != (shape, info.dtype):
            raise DaopError(
                f"{self._index.where(name)} has dtype {info.dtype}, another expert of the same layer has "
                f"{self._kinds[role][1]}: all experts of a layer must have the same"
            )
        held = self._found.setdefault(role, {})
        for expert, spot in spots.items():
            if expert in held:
                raise DaopError(
                    f"tensors {held[expert][0].name!r} and {name!r} both hold the {role} weights of expert "
                    f"{expert} of {experts.path!r}: remove the file that does not belong to the model"
                )
            held[expert] = spot

    def finish(
        self, known: dict[frozenset[tuple[str, Shape, str]], ExpertLayout]
    ) -> tuple[ExpertLayout, tuple[tuple[Location, ...], ...]]:
        """The layout and, per expert, the location of each of its parts; ``DaopError`` if one is missing.

        ``known`` holds the layouts of earlier layers: one with the same parts is used again, so that a slot
        serves both.
        """
        self._check_coverage()
        parts = [(role, *kind) for role, kind in self._kinds.items()]
        # In the order in which the file has expert 0, so that neighbours there are neighbours in the slot.
        parts.sort(key=lambda part: self._locate(part[0], 0))
        layout = known.setdefault(frozenset(parts), ExpertLayout.pack(parts, self._codec))
        places = tuple(
            tuple(self._locate(part.role, expert) for part in layout.parts)
            for expert in range(self._experts.count)
        )
        return layout, places

    def _locate(self, role: str, expert: int) -> Location:
        info, offset = self._found[role][expert]
        return info.file, info.offset + offset

    def _check(self, name: str, stored: Shape, dtypes: tuple[str, ...]) -> None:
        info = self._index.tensors[name]
        if info.shape != stored:
            raise DaopError(
                f"{self._index.where(name)} has shape {list(info.shape)}, but the model wants "
                f"{list(stored)}: config.json and weights are of different models; {FETCH}"
            )
        if info.dtype not in dtypes:
            raise DaopError(
                f"{self._index.where(name)} has dtype {info.dtype}; daop reads such a tensor in "
                f"{', '.join(dtypes)}"
            )

    def _check_coverage(self) -> None:
        """Every role and every expert, none too many."""
        wanted: list[str] = []
        for source in self._experts.sources.values():
            split = [source.role.replace("gate_up", piece) for piece in ("gate", "up")]
            found = split if any(role in self._found for role in split) else [source.role]
            wanted += found
            if not source.role.endswith("_bias"):
                wanted += [role + suffix for role in found for suffix in self._codec.suffixes]
        for role in self._found:
            if role not in wanted:
                raise DaopError(
                    f"{self._index.folder} holds the experts of {self._experts.path!r} twice, fused and each "
                    "on its own: remove the files that do not belong to the model"
                )
        count = self._experts.count
        for role in wanted:
            held = self._found.get(role, {})
            missing = [expert for expert in range(count) if expert not in held]
            if missing:
                raise DaopError(
                    f"{self._index.folder} lacks the {role} weights of {len(missing)} of {count} experts of "
                    f"{self._experts.path!r} (expert {missing[0]}, for one): a file of the model is missing "
                    f"or of another model; {FETCH}"
                )
            extra = [expert for expert in held if expert >= count]
            if extra:
                raise DaopError(
                    f"{self._index.where(held[extra[0]][0].name)} is for expert {extra[0]}, but config.json "
                    f"says that there are {count}: {FETCH}"
                )


def _piece(source: PartSource, target: Target) -> tuple[str, Shape]:
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
