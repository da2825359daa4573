"""What a trace looks like: how skewed each layer is, how soon experts come back, how alike neighbours are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from daop.core import Geometry
from daop.predictors.history import NEVER, walk

from .dataset import to_routing
from .trace import DECODE, OPTIONAL, CountsTrace, Trace, counts_of

# Upper ends of the reuse-distance classes, in tokens; beyond the last, or never before in the sequence.
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)


def describe(trace: Trace | CountsTrace) -> dict[str, Any]:
    """Everything ``daop trace info`` shows, as JSON."""
    geometry = trace.geometry
    out: dict[str, Any] = {
        "kind": "counts" if isinstance(trace, CountsTrace) else "tokens",
        "geometry": {
            "layers": geometry.layers,
            "experts": list(geometry.experts),
            "top_k": geometry.top_k,
            "expert_bytes": list(geometry.expert_bytes),
            "layer_to_model_layer": list(geometry.layer_to_model_layer),
            "fingerprint": geometry.fingerprint,
        },
        "source": trace.source,
    }
    if isinstance(trace, CountsTrace):
        return out | {
            "sequences": len(trace),
            "tokens": int(trace.tokens.sum()),
            "skew": skew(geometry, trace.counts.sum(axis=0, dtype=np.int64)),
        }
    trace = trace.grouped()
    absent = {c for c in OPTIONAL if getattr(trace, c) is None}
    distance, overlap = _neighbours(trace)
    decode = trace.phase == DECODE
    return out | {
        "complete": trace.complete,
        "sequences": len(trace.sequences),
        "tokens": len(trace),
        "decode_tokens": int(decode.sum()),
        "absent_columns": sorted(absent),
        "absent_choices": int((trace.flat < 0).sum()),
        "skew": skew(geometry, counts_of(trace).counts.sum(axis=0, dtype=np.int64)),
        "reuse_distance": distance,
        "adjacent_overlap": overlap,
        "recorded_hit_rate": _hit_rate(trace, decode),
    }


def _hit_rate(trace: Trace, rows: Any) -> float | None:
    """Share of the decode lookups that the recording engine had in its cache."""
    if trace.hits is None or not rows.any():
        return None
    return float(trace.hits[rows][trace.flat[rows] >= 0].mean())


def skew(geometry: Geometry, counts: Any) -> list[dict[str, Any]]:
    """Per layer, of all choices: the busiest expert's share, the busiest quarter's, evenness, unused
    experts."""
    out = []
    for a, b in zip(geometry.offsets[:-1], geometry.offsets[1:], strict=True):
        share = np.sort(counts[a:b])[::-1] / max(1, counts[a:b].sum())
        used = share[share > 0]
        entropy = float(-(used * np.log(used)).sum())
        out.append(
            {
                "busiest": float(share[0]),
                "busiest_quarter": float(share[: max(1, (b - a) // 4)].sum()),
                # entropy over that of an even use; 1: no skew at all
                "evenness": entropy / float(np.log(b - a)) if b - a > 1 else 1.0,
                "unused": int((share == 0).sum()),
            }
        )
    return out


def _neighbours(trace: Trace) -> tuple[list[dict[str, Any]], list[float | None]]:
    """Reuse distances in tokens, and per layer the share of choices that the token before made too."""
    data = to_routing(trace)
    edges = np.asarray(DISTANCES)
    classes = np.zeros(len(DISTANCES) + 2, dtype=np.int64)
    same, pairs = np.zeros(data.geometry.layers), np.zeros(data.geometry.layers)
    for rows, before, _ in walk(data):
        flat = data.flat[rows]
        n, _, k = flat.shape
        known = flat >= 0
        since = np.take_along_axis(before.since, np.maximum(flat, 0).reshape(n, -1), 1).reshape(flat.shape)
        place = np.searchsorted(edges, since[known] + 1)
        place[since[known] >= NEVER] = len(DISTANCES) + 1
        classes += np.bincount(place, minlength=len(classes))
        later = (before.length > 0)[:, None] & known.all(axis=2)
        same += ((since == 0) & known).sum(axis=2)[later.any(axis=1)].sum(axis=0)
        pairs += later.sum(axis=0) * k
    labels = ["1", "2"] + [f"{a + 1}-{b}" for a, b in pairwise(DISTANCES[1:])]
    labels += [f"over {DISTANCES[-1]}", "first use"]
    shares = classes / max(1, classes.sum())
    profile = [{"tokens": label, "share": float(s)} for label, s in zip(labels, shares, strict=True)]
    return profile, [float(a / b) if b else None for a, b in zip(same, pairs, strict=True)]
