"""Made-up routing with structure: a token's kind decides its choices, noisily; kinds follow one another."""

from __future__ import annotations

import numpy as np

from daop.core import FloatArray, Geometry
from daop.predictors.data import Gates, Hidden, Routing


def sample_routing(
    experts: tuple[int, ...] = (8, 8, 8, 8),
    top_k: int = 2,
    lengths: tuple[int, ...] = (40, 30, 50),
    *,
    kinds: int = 6,
    noise: float = 0.1,
    seed: int = 0,
) -> Routing:
    rng = np.random.default_rng(seed)
    layers, n = len(experts), sum(lengths)
    geometry = Geometry(
        experts=experts,
        top_k=top_k,
        expert_bytes=(0,) * layers,
        layer_to_model_layer=tuple(range(layers)),
    )
    taste = [rng.permuted(np.tile(np.arange(e), (kinds, 1)), axis=1)[:, :top_k] for e in experts]
    flat = np.zeros((n, layers, top_k), dtype=np.int32)
    token = np.zeros(n, dtype=np.int32)
    for i in range(n):
        token[i] = (token[i - 1] + 1) % kinds if rng.random() < 0.7 else rng.integers(kinds)
        for layer, count in enumerate(experts):
            chosen = taste[layer][token[i]]
            if rng.random() < noise:
                chosen = rng.permutation(count)[:top_k]
            flat[i, layer] = chosen + geometry.offsets[layer]
    weights = np.sort(rng.random(flat.shape), axis=2)[:, :, ::-1].astype(np.float32)
    width = 6
    values = rng.standard_normal((n, layers, width)).astype(np.float16)
    none: list[FloatArray | None] = [None] * layers
    gates = Gates(
        weights=[rng.standard_normal((e, width)).astype(np.float32) for e in experts],
        biases=none,
        corrections=none,
        norms=[np.ones(width, dtype=np.float32)] * layers,
    )
    return Routing(
        geometry=geometry,
        flat=flat,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        weights=weights,
        token_ids=token,
        hidden=Hidden(rows=np.arange(n), values=values, gates=gates),
    )
