"""Hidden states recorded beside a trace: aligned with it, bounded, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from daop.core import DaopError, Geometry, Phase
from daop.training.dataset import to_routing
from daop.training.features import FeatureTap, features_path, find_routers, read_features, with_features
from daop.training.parquet import read_trace
from daop.training.recorder import TraceRecorder

LAYERS, EXPERTS, K, WIDTH = 3, 8, 2, 16


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=WIDTH,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
    )
    return Qwen3MoeForCausalLM(config).eval()


def record(model: Any, path: Path, *, max_bytes: int = 1 << 20) -> FeatureTap:
    """Two prompts of 5 tokens, 12 decoded tokens each, with the routing as the routers returned it."""
    chosen: dict[int, Any] = {}
    handles = [
        router.register_forward_hook(lambda _, __, out, layer=layer: chosen.__setitem__(layer, out[2]))
        for layer, (router, _) in enumerate(find_routers(model))
    ]
    tap = FeatureTap(model, max_bytes=max_bytes)
    generator = torch.Generator().manual_seed(1)
    with TraceRecorder(path, Geometry.uniform(LAYERS, EXPERTS, K)) as recorder, torch.no_grad():
        for sequence in range(2):
            tokens, cache, position = torch.randint(50, (1, 5), generator=generator), None, 0
            for _ in range(13):
                n = tokens.shape[1]
                recorder.begin_forward(
                    Phase.PREFILL if position == 0 else Phase.DECODE,
                    [sequence] * n,
                    range(position, position + n),
                )
                out = model(tokens, past_key_values=cache, use_cache=True)
                for layer in range(LAYERS):
                    recorder.record(layer, chosen[layer].numpy())
                recorder.end_forward()
                cache, position = out.past_key_values, position + n
                tokens = torch.randint(50, (1, 1), generator=generator)
    for handle in handles:
        handle.remove()
    tap.close()
    tap.save(features_path(path))
    return tap


def test_features_belong_to_the_tokens_they_say(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    record(model, path)
    trace = read_trace(path).grouped()
    data = with_features(to_routing(trace), path, trace)
    assert data.hidden is not None
    assert len(data.hidden.rows) == 24
    assert (trace.phase[data.hidden.rows] == 1).all()
    agree = 0.0
    for layer in range(LAYERS):
        logits = data.hidden.values[:, layer].astype(np.float32) @ data.hidden.gates.weights[layer].T
        top = np.argsort(-logits, axis=1)[:, :K] + layer * EXPERTS
        agree += (np.sort(top) == np.sort(data.flat[data.hidden.rows, layer])).mean() / LAYERS
    assert agree > 0.95  # float16 rounds a few near ties the other way
    norm = data.hidden.gates.norms[0]
    assert norm is not None
    assert norm.shape == (WIDTH,)


def test_the_sample_is_bounded(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    tap = record(model, path, max_bytes=10 * LAYERS * WIDTH * 2)
    assert tap.seen == 24
    trace = read_trace(path).grouped()
    hidden = read_features(path, trace)
    assert hidden is not None
    assert len(hidden.rows) == 10
    assert len(set(hidden.rows.tolist())) == 10
    assert (np.diff(hidden.rows) > 0).all()


def test_features_of_another_trace_or_damaged_ones_are_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    record(model, path)
    trace = read_trace(path).grouped()
    file = features_path(path)
    arrays = load_file(file)
    save_file({**arrays, "router.1.weight": np.zeros((9, WIDTH), np.float32)}, file)
    with pytest.raises(DaopError, match="another trace"):
        read_features(path, trace)
    save_file({**arrays, "hidden": np.full_like(arrays["hidden"], np.nan)}, file)
    with pytest.raises(DaopError, match="NaN"):
        read_features(path, trace)
    save_file({k: v for k, v in arrays.items() if k != "position"}, file)
    with pytest.raises(DaopError, match="damaged"):
        read_features(path, trace)
    file.write_bytes(b"not safetensors")
    with pytest.raises(DaopError, match="damaged"):
        read_features(path, trace)
    file.unlink()
    assert read_features(path, trace) is None


def test_a_model_without_routers_has_nothing_to_record() -> None:
    with pytest.raises(DaopError, match="no routers"):
        FeatureTap(torch.nn.Linear(2, 2))
