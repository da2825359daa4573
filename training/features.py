"""Hidden states for predictors that need them: the inputs of a model's routers, sampled within a bound.

While a trace is recorded, ``FeatureTap`` hooks the routers of a transformers model (daop's or a plain one)
and keeps the router inputs of a uniform random sample of the generated tokens (reservoir sampling, so every
such token has the same chance however long the run), float16. ``T.features.safetensors`` beside the trace
holds them with the routers' weights and the norms before them; a recording that is killed keeps its
routing, not its features.

Shapes: n sampled tokens, L MoE layers, H hidden size, E experts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError
from daop.predictors.data import Gates, Hidden, Routing

from .trace import Trace

# What the norm before a MoE block is called, by family.
NORMS = ("post_attention_layernorm", "pre_ff_layernorm", "pre_feedforward_layernorm", "ffn_norm", "norm")
DEFAULT_BYTES = 256 << 20


def features_path(trace: Path) -> Path:
    """Where the features of a trace lie."""
    return trace.with_name(trace.name.removesuffix(".parquet") + ".features.safetensors")


def find_routers(model: Any) -> list[tuple[Any, Any]]:
    """(router, norm before its block or None) of every MoE layer of a transformers model, in order."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        router = next((getattr(module, n) for n in ("gate", "router") if hasattr(module, n)), None)
        if router is None or not hasattr(module, "experts") or getattr(router, "weight", None) is None:
            continue
        layer = modules[name.rpartition(".")[0]]
        norm = next((getattr(layer, n) for n in NORMS if hasattr(layer, n)), None)
        found.append((router, norm))
    return found


class FeatureTap:
    """Keeps router inputs of a sample of the tokens that a transformers model generates, one sequence at a
    time.

    It hooks the model's forward and its routers; sequences count from 0 as they come, so that they have the
    numbers of a trace that is recorded beside it.
    """

    def __init__(self, model: Any, *, max_bytes: int = DEFAULT_BYTES, seed: int = 0) -> None:
        self._routers = find_routers(model)
        if not self._routers:
            raise DaopError("no routers were found in this model, so --features has nothing to record")
        width = int(self._routers[0][0].weight.shape[-1])
        self.capacity = max(1, max_bytes // (len(self._routers) * width * 2))
        self.seen = 0
        self._rng = np.random.default_rng(seed)
        self._kept: list[tuple[int, int, NDArray[np.float16]]] = []  # sequence, position, [L, H]
        self._now: dict[int, Any] = {}
        self._sequence = -1
        self._position = 0
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
            *(r.register_forward_pre_hook(self._hook(layer)) for layer, (r, _) in enumerate(self._routers)),
        ]

    def _hook(self, layer: int) -> Any:
        def keep(module: Any, inputs: tuple[Any, ...]) -> None:
            if inputs:
                # look-ahead policies ask routers too; the first call of a forward is the model's own
                self._now.setdefault(layer, inputs[0].detach().reshape(-1, inputs[0].shape[-1]))

        return keep

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._now.clear()
        cache = next((kwargs[n] for n in ("past_key_values", "cache") if kwargs.get(n) is not None), None)
        self._position = int(cache.get_seq_length()) if cache is not None else 0
        self._sequence += self._position == 0

    def _after(self, *_: Any) -> None:
        rows = {len(x) for x in self._now.values()}
        if self._position == 0 or rows != {1} or len(self._now) != len(self._routers):
            return  # a prompt, or several sequences side by side
        self.seen += 1
        slot = len(self._kept)
        if slot >= self.capacity:
            slot = int(self._rng.integers(self.seen))
            if slot >= self.capacity:
                return
        states = np.stack([self._now[layer][0].float().cpu().numpy() for layer in range(len(self._routers))])
        entry = (self._sequence, self._position, states.astype(np.float16))
        self._kept[slot : slot + 1] = [entry]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def save(self, path: Path) -> None:
        """Write the sample with routers and norms; nothing if no generated token was seen."""
        from safetensors.numpy import save_file

        if not self._kept:
            return
        order = sorted(range(len(self._kept)), key=lambda i: self._kept[i][:2])
        arrays: dict[str, NDArray[Any]] = {
            "sequence": np.asarray([self._kept[i][0] for i in order], dtype=np.int32),
            "position": np.asarray([self._kept[i][1] for i in order], dtype=np.int32),
            "hidden": np.stack([self._kept[i][2] for i in order]),
        }
        for layer, (router, norm) in enumerate(self._routers):
            arrays[f"router.{layer}.weight"] = _numpy(router.weight)
            for name, attribute in (("bias", "bias"), ("correction", "e_score_correction_bias")):
                value = getattr(router, attribute, None)
                if value is not None and hasattr(value, "detach"):
                    arrays[f"router.{layer}.{name}"] = _numpy(value)
            if norm is not None and getattr(norm, "weight", None) is not None:
                arrays[f"norm.{layer}"] = _numpy(norm.weight)
        said = {
            "sampling": "uniform random sample of the generated tokens (reservoir)",
            "generated_tokens": self.seen,
            "kept": len(order),
        }
        hidden = path.with_name(path.name + ".tmp")
        save_file(arrays, hidden, metadata={"daop_features": json.dumps(said)})
        os.replace(hidden, path)


def _numpy(tensor: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def read_features(trace_path: Path, trace: Trace) -> Hidden | None:
    """The features beside a trace, for the tokens of ``trace`` (grouped); None if there are none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = features_path(trace_path)
    if not path.is_file():
        return None
    try:
        arrays = load_file(path)
        sequence, position, values = (arrays[n] for n in ("sequence", "position", "hidden"))
        layers, width = values.shape[1:]
        weights = [arrays[f"router.{layer}.weight"] for layer in range(layers)]
        biases = [arrays.get(f"router.{layer}.bias") for layer in range(layers)]
        corrections = [arrays.get(f"router.{layer}.correction") for layer in range(layers)]
        norms = [arrays.get(f"norm.{layer}") for layer in range(layers)]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DaopError(f"{path} is damaged ({error!r}); record the trace again with --features") from error
    expected = [(e, width) for e in trace.geometry.experts]
    if [w.shape for w in weights] != expected or len(sequence) != len(values):
        raise DaopError(
            f"{path}: its {layers} routers of shape {weights[0].shape} do not fit the trace's "
            f"{trace.geometry.layers} layers of {trace.geometry.experts[0]} experts; it is of another trace"
        )
    if not np.isfinite(values).all():
        raise DaopError(f"{path} holds NaN or infinity; record the trace again with --features")
    gates = Gates(weights=weights, biases=biases, corrections=corrections, norms=norms)
    place = {
        key: i for i, key in enumerate(zip(trace.sequence.tolist(), trace.position.tolist(), strict=True))
    }
    rows = np.asarray([place.get(k, -1) for k in zip(sequence.tolist(), position.tolist(), strict=True)])
    order = np.flatnonzero(rows >= 0)
    order = order[np.argsort(rows[order], kind="stable")]
    return Hidden(rows=rows[order].astype(np.int64), values=values[order], gates=gates)


def _find(trace: Trace, sequence: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
    """[n] row of the trace for each (sequence, position), -1 where it has none."""
    keys = zip(trace.sequence.tolist(), trace.position.tolist(), strict=True)
    place = {key: row for row, key in enumerate(keys)}
    wanted = zip(sequence.tolist(), position.tolist(), strict=True)
    return np.asarray([place.get(key, -1) for key in wanted], dtype=np.int64)


def with_features(data: Routing, trace_path: Path, trace: Trace) -> Routing:
    """``data`` (made of ``trace``, grouped) with the features that lie beside ``trace_path``, if any."""
    from dataclasses import replace

    hidden = read_features(trace_path, trace)
    return data if hidden is None or not len(hidden.rows) else replace(data, hidden=hidden)
