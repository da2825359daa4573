"""gpt-oss expert fingerprints packed as npz: ``ids u8 [N, L, K]``, ``offsets [S + 1]``, ``pos0 [S]``, maybe
``probs f16 [N, L, K]`` (softmax over the chosen). Only generated tokens were recorded.

The routing was collected by github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting (Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daop.core import DaopError, Geometry
from daop.training.trace import DECODE, Trace

from .base import IMPORTERS, load_npz

EXPERTS = {24: 32, 36: 128}
# gate, up and down projections of 2880 x 2880 at 4.25 bits (MXFP4 and its block scales), biases in bf16
EXPERT_BYTES = 3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2


@IMPORTERS.register("gpt-oss-npz")
def gpt_oss_npz(path: Path) -> Trace:
    """A token trace of gpt-oss-20b (24 layers of 32 experts) or -120b (36 of 128)."""
    arrays = load_npz(path, ("ids", "offsets", "pos0"))
    ids, offsets, pos0 = arrays["ids"], arrays["offsets"].astype(np.int64), arrays["pos0"].astype(np.int64)
    if ids.ndim != 3 or ids.dtype.kind != "u" or ids.shape[1] not in EXPERTS:
        raise DaopError(
            f"{path}: ids are {ids.dtype} {ids.shape}, expected unsigned [tokens, 24 or 36, top-k]"
        )
    whole = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    if not whole or (np.diff(offsets) < 1).any() or pos0.shape != (len(offsets) - 1,):
        raise DaopError(f"{path}: offsets do not cut the {len(ids)} tokens into {len(pos0)} sequences")
    lengths = np.diff(offsets)
    within = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    layers = ids.shape[1]
    geometry = Geometry.uniform(layers, EXPERTS[layers], ids.shape[2], EXPERT_BYTES)
    probs = arrays.get("probs")
    return Trace(
        geometry=geometry,
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=(np.repeat(pos0, lengths) + within).astype(np.int32),
        phase=np.full(len(ids), DECODE, dtype=np.uint8),
        ids=ids.astype(np.uint16),
        weights=None if probs is None else probs.astype(np.float16),
        source={
            "format": "gpt-oss-npz",
            "file": path.name,
            "model": f"gpt-oss-{'20b' if layers == 24 else '120b'}",
        },
    )
