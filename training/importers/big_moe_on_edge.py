"""BigMoeOnEdge's route trace (version 1): CSV with one row per token, layer and chosen slot, and the
cache's answer to it. github.com/Helldez/BigMoeOnEdge (Apache-2.0), seen at commit 2d4f2b1.

Header lines give the model and every layer's bytes per expert; ``phase`` is 0 for prefill, 1 for decode;
``residency`` 1 is a hit. Prefill computes the last layer for the last token only: absent elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, Geometry
from daop.training.trace import ABSENT, Trace

from .base import IMPORTERS, ImportOptions

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_MODEL = re.compile(
    r"^# model=(?P<model>\S+) arch=(?P<arch>\S+) n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)"
)
_LAYER = re.compile(r"^# layer=(\d+) expert_bytes=(\d+)")


@IMPORTERS.register("big-moe-on-edge")
def big_moe_on_edge(path: Path, options: ImportOptions) -> Trace:
    """A token trace of one run of a phone's engine, with its recorded cache hits."""
    header, rows = _read(path)
    geometry, model = _geometry(path, header)
    turn, phase, step, layer, slot, expert = (rows[:, i].astype(np.int64) for i in range(6))
    bad = (layer >= geometry.layers) | (slot >= geometry.top_k) | (layer < 0) | (slot < 0) | (phase > 1)
    if bad.any():
        raise DaopError(f"{path}: data row {int(np.argmax(bad)) + 1} lies outside the header's geometry")
    keys, token = np.unique(np.stack([turn, step, phase], axis=1), axis=0, return_inverse=True)
    token = token.ravel()
    if len(np.unique(keys[:, :2], axis=0)) != len(keys):
        raise DaopError(f"{path}: a step is both prefill and decode; the file is damaged")
    shape = (len(keys), geometry.layers, geometry.top_k)
    ids = np.full(shape, ABSENT, dtype=np.uint16)
    weights, hits = np.zeros(shape, dtype=np.float16), np.zeros(shape, dtype=np.bool_)
    ids[token, layer, slot] = expert
    weights[token, layer, slot] = rows[:, 6]
    hits[token, layer, slot] = rows[:, 7] == 1
    # a prompt is one forward pass, each decoded token one of its own
    starts = np.r_[True, (keys[1:, 2] == 1) | (np.diff(keys[:, 0]) != 0) | (np.diff(keys[:, 2]) != 0)]
    return Trace(
        geometry=geometry,
        sequence=keys[:, 0].astype(np.int32),
        position=keys[:, 1].astype(np.int32),
        phase=keys[:, 2].astype(np.uint8),
        ids=ids,
        weights=weights,
        hits=hits,
        forward=(np.cumsum(starts) - 1).astype(np.int32),
        source={"format": "big-moe-on-edge", "file": path.name, "model": model},
    )


def _read(path: Path) -> tuple[list[str], NDArray[Any]]:
    try:
        lines = path.read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        if not lines[0].startswith("# route_trace v1") or lines[start].strip() != COLUMNS:
            raise ValueError(f"it does not start with '# route_trace v1' and the columns {COLUMNS}")
        rows = np.loadtxt(lines[start + 1 :], delimiter=",", dtype=np.float64, ndmin=2)
        if rows.size == 0 or rows.shape[1] != 9:
            raise ValueError("it has no rows")
    except (OSError, ValueError, StopIteration, IndexError) as error:
        raise DaopError(f"{path} is not a whole BigMoeOnEdge route trace: {error}") from error
    return lines[:start], rows


def _geometry(path: Path, header: list[str]) -> tuple[Geometry, str]:
    model = next((m for m in map(_MODEL.match, header) if m), None)
    sizes = {int(m[1]): int(m[2]) for m in map(_LAYER.match, header) if m}
    if model is None:
        raise DaopError(f"{path}: no '# model=' line; the header is damaged")
    layers, experts, used = (int(model[i]) for i in (3, 4, 5))
    if not 0 < layers <= 4096 or sorted(sizes) != list(range(layers)):
        raise DaopError(f"{path}: the header names {len(sizes)} layers' expert bytes, but {layers} layers")
    geometry = Geometry(
        experts=(experts,) * layers,
        top_k=used,
        expert_bytes=tuple(sizes[i] for i in range(layers)),
        layer_to_model_layer=tuple(range(layers)),
    )
    return geometry, Path(model["model"]).stem
