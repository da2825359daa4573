"""gpt-oss expert fingerprints packed as npz: ``ids u8 [N, L, K]``, ``offsets [S + 1]``, ``pos0 [S]``, maybe
``probs f16 [N, L, K]`` (softmax over the chosen). Only generated tokens were recorded.

The routing was collected by github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting (Apache-2.0). The
tokens' strings may lie beside it in ``NAME.samples.jsonl``; a CRC of the string then serves as token id.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, Geometry, IntArray
from daop.training.trace import DECODE, Trace

from .base import IMPORTERS, ImportOptions, load_npz

EXPERTS = {24: 32, 36: 128}
MODELS = {24: "gpt-oss-20b", 36: "gpt-oss-120b"}
# gate, up and down projections of 2880 x 2880 at 4.25 bits (MXFP4 and its block scales), biases in bf16
EXPERT_BYTES = 3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2


@IMPORTERS.register("gpt-oss-npz")
def gpt_oss_npz(path: Path, options: ImportOptions) -> Trace:
    """A token trace of gpt-oss-20b (24 layers of 32 experts) or -120b (36 of 128)."""
    arrays = load_npz(path, ("ids", "offsets", "pos0"))
    ids, offsets, pos0 = arrays["ids"], arrays["offsets"].astype(np.int64), arrays["pos0"].astype(np.int64)
    if ids.ndim != 3 or ids.dtype.kind != "u" or ids.shape[1] not in EXPERTS:
        raise DaopError(f"{path}: ids are {ids.dtype} {ids.shape}, not unsigned [tokens, 24 or 36, top-k]")
    whole = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    if not whole or (np.diff(offsets) < 1).any() or pos0.shape != (len(offsets) - 1,):
        raise DaopError(f"{path}: offsets do not cut the {len(ids)} tokens into {len(pos0)} sequences")
    lengths = np.diff(offsets)
    within = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    layers = ids.shape[1]
    probs = arrays.get("probs")
    return Trace(
        geometry=Geometry.uniform(layers, EXPERTS[layers], ids.shape[2], EXPERT_BYTES),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=(np.repeat(pos0, lengths) + within).astype(np.int32),
        phase=np.full(len(ids), DECODE, dtype=np.uint8),
        ids=ids.astype(np.uint16),
        weights=None if probs is None else probs.astype(np.float16),
        token_ids=_token_ids(path, lengths) if options.token_ids else None,
        source={"format": "gpt-oss-npz", "file": path.name, "model": MODELS[layers]},
    )


def _token_ids(path: Path, lengths: NDArray[Any]) -> IntArray:
    samples = path.with_name(path.stem + ".samples.jsonl")
    try:
        tokens = [list(json.loads(line)["tokens"]) for line in samples.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DaopError(f"{samples} is needed for --token-ids, but: {error}") from error
    if [len(t) for t in tokens] != lengths.tolist():
        raise DaopError(f"{samples} belongs to another trace: its sequences have other lengths than {path}")
    known = {t: zlib.crc32(str(t).encode()) & 0x7FFFFFFF for t in {t for row in tokens for t in row}}
    return np.asarray([known[t] for row in tokens for t in row], dtype=np.int32)
