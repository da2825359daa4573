"""The estimate of the KV cache against what transformers' cache really holds, for every tested family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from transformers import AutoModelForCausalLM

from daop.runtime.kv_cache import kv_cache

TOKENS, BATCH = 40, 2


def held_bytes(cache: Any) -> int:
    """Bytes of all tensors in a transformers cache."""
    own = getattr(cache, "linear_cache", ())  # minimax's
    total: int = sum(state.nbytes for state in own if len(state))
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in ("conv_states", "recurrent_states"):
            tensors += getattr(layer, states, {}).values()
        total += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    return total


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_estimate_is_what_the_cache_holds(family: str) -> None:
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model(torch.ones(BATCH, TOKENS, dtype=torch.int64), use_cache=True)
    held = held_bytes(output["cache"] if "cache" in output else output["past_key_values"])
    estimate = kv_cache(model, context=TOKENS, batch=BATCH, itemsize=4)
    assert held <= estimate.stored <= 1.25 * held, (held, estimate)
    assert not estimate.guessed
