"""SGLang's expert distribution recorder, mode ``per_token``: a ``.pt`` file of ``{"records": [...],
"last_physical_to_logical_map": [layers, physical experts]}``, one record per forward pass with
``input_ids``, ``positions``, ``extend_seq_lens``, ``forward_mode`` and ``topk_ids_of_layer`` [layers,
tokens, 8], -1 where unused.

Written for python/sglang/srt/eplb/expert_distribution.py of sgl-project/sglang at commit 02295fe. Read with
torch's ``weights_only`` loader, which executes nothing.

The recorder does not name requests. Prefill says how many tokens each had; a decoded token is given to the
sequence whose last position is one less, in order of arrival where several qualify.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, Geometry, Phase
from daop.training.trace import ABSENT, PHASES, Trace

from .base import IMPORTERS, ImportOptions

DECODE_MODE = 2  # ForwardMode.DECODE


@IMPORTERS.register("sglang-recorder")
def sglang_recorder(path: Path, options: ImportOptions) -> Trace:
    """A token trace of an SGLang server in recorder mode per_token (the .pt file of one rank)."""
    records, mapping = _load(path)
    try:
        return _convert(path, records, mapping, options)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DaopError(f"{path}: a record is not as the recorder writes it ({error!r})") from error


def _load(path: Path) -> tuple[list[dict[str, Any]], NDArray[Any]]:
    import torch

    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise DaopError(f"{path} is not a .pt file that loads without executing code: {error}") from error
    if not isinstance(dump, dict) or "records" not in dump:
        kind = "a dump of mode stat" if isinstance(dump, dict) and "logical_count" in dump else "no dump"
        raise DaopError(f"{path} is {kind} of the recorder; record with mode per_token")
    records = [r for r in dump["records"] if len(r.get("input_ids", ()))]
    if not records or "topk_ids_of_layer" not in records[0]:
        raise DaopError(f"{path} holds no routing of single tokens; record with mode per_token")
    return records, np.asarray(dump["last_physical_to_logical_map"])


def _convert(
    path: Path, records: list[dict[str, Any]], mapping: NDArray[Any], options: ImportOptions
) -> Trace:
    raw = np.concatenate([np.asarray(r["topk_ids_of_layer"]) for r in records], axis=1)  # [layers, N, 8]
    routed = np.flatnonzero((raw >= 0).any(axis=(1, 2)))  # layers without experts record nothing
    top_k = int((raw >= 0).any(axis=(0, 1)).sum())
    if not len(routed) or mapping.ndim != 2 or len(mapping) != len(raw):
        raise ValueError(f"{len(routed)} routed layers, a map of shape {mapping.shape}")
    physical = raw[routed, :, :top_k].transpose(1, 0, 2)  # [N, L, K]
    if physical.max() >= mapping.shape[1]:
        raise ValueError(f"expert {physical.max()} of {mapping.shape[1]}")
    logical = mapping[routed[None, :, None], np.maximum(physical, 0)]
    experts = int(mapping[routed].max()) + 1
    sequence, position = _sequences(records)
    decode = [r["forward_mode"] == DECODE_MODE for r in records]
    sizes = [len(r["input_ids"]) for r in records]
    phase = [PHASES.index(Phase.DECODE if d else Phase.PREFILL) for d in decode]
    tokens = np.concatenate([np.asarray(r["input_ids"], dtype=np.int32) for r in records])
    return Trace(
        geometry=Geometry(
            experts=(experts,) * len(routed),
            top_k=top_k,
            expert_bytes=(0,) * len(routed),
            layer_to_model_layer=tuple(int(i) for i in routed),
        ),
        sequence=sequence,
        position=position,
        phase=np.repeat(np.asarray(phase, dtype=np.uint8), sizes),
        ids=np.where(physical < 0, ABSENT, logical).astype(np.uint16),
        forward=np.repeat(np.arange(len(records), dtype=np.int32), sizes),
        token_ids=tokens if options.token_ids else None,
        source={"format": "sglang-recorder", "file": path.name, "sequences": "told apart by position"},
    )


def _sequences(records: list[dict[str, Any]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[N] sequence and [N] position of every token."""
    last: dict[int, int] = {}  # sequence -> its last position, oldest first
    sequence: list[int] = []
    positions: list[int] = []
    count = 0
    for record in records:
        place = [int(p) for p in record["positions"]]
        if record["forward_mode"] == DECODE_MODE:
            lengths = [1] * len(place)
        else:
            lengths = [int(n) for n in record["extend_seq_lens"]]
        if sum(lengths) != len(place):
            raise ValueError(f"{len(place)} positions, but sequences of {lengths} tokens")
        taken: set[int] = set()
        for length in lengths:
            first, place_here = len(positions), place[:length]
            place = place[length:]
            # a chunk of a prompt goes on where the sequence stopped, as a decoded token does
            found = next((s for s, p in last.items() if p == place_here[0] - 1 and s not in taken), None)
            if found is None or place_here[0] == 0:
                found, count = count, count + 1
            taken.add(found)
            last[found] = place_here[-1]
            positions += place_here
            sequence += [found] * (len(positions) - first)
    return np.asarray(sequence, dtype=np.int32), np.asarray(positions, dtype=np.int32)
