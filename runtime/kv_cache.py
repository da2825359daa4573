"""Bytes that attention keeps between tokens, from a model without weights.

transformers' own ``DynamicCache`` says which layers keep all tokens, a window of them, or a state of fixed
size; the layers' projections, or else the configuration, say how wide each is. Where that is not known for a
kind of state, the layer is counted as full attention, which is more, and ``KvCache.guessed`` says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """``stored``: bytes kept; ``growing``: bytes used besides while one layer takes in a token (the cache
    grows by copying) or unfolds its compressed keys and values. ``guessed``: kinds counted as full attention.
    """

    stored: int
    growing: int
    guessed: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.stored + self.growing


def kv_cache(model: Any, *, context: int, batch: int, itemsize: int) -> KvCache:
    """What a batch of sequences of ``context`` tokens needs; ``itemsize``: bytes of the model's dtype.

    ``model``: a transformers model; that its parameters are on the meta device does not matter.
    """
    from transformers import DynamicCache

    text_config = model.config.get_text_config()
    widths = projected_widths(model)
    layers = list(DynamicCache(config=text_config).layers)
    if not layers:  # a family for which transformers makes layers as they come
        layers = [None] * text_config.num_hidden_layers
    own = getattr(text_config, "per_layer_config", None)  # layers that differ, where the family has any
    stored, growing, guessed = 0, 0, set()
    for number, layer in enumerate(layers):
        layer_config = own[number] if own is not None and len(own) == len(layers) else text_config
        name = type(layer).__name__
        keeps_tokens = layer is None or hasattr(layer, "keys")
        size = 0
        if "Dummy" in name:
            continue
        if hasattr(layer, "conv_states"):
            state = recurrent_state(layer_config, itemsize)
            if state is None:
                guessed.add(name)
                keeps_tokens = True
            size += (state or 0) * batch
        if keeps_tokens:
            window = getattr(layer, "sliding_window", None)
            tokens = min(context, window) if isinstance(window, int) else context
            width = widths.get(number) or values_per_token(layer_config)
            size += batch * tokens * width * itemsize
            unfolded = batch * context * _unfolded(layer_config) * itemsize
            growing = max(growing, size + unfolded)
        stored += size
    return KvCache(stored=stored, growing=growing, guessed=tuple(sorted(guessed)))


def projected_widths(model: Any) -> dict[int, int]:
    """Layer -> numbers that its key and value projections make of a token, where it has both by name.

    Families differ here in ways that their configurations do not tell (more heads in some layers, say).
    """
    outputs: dict[int, dict[str, int]] = {}
    for name, module in model.named_modules():
        match = _PROJECTION.search(name)
        if match and hasattr(module, "out_features"):
            outputs.setdefault(int(match[1]), {})[match[2]] = int(module.out_features)
    return {layer: sum(found.values()) for layer, found in outputs.items() if len(found) == 2}


_PROJECTION = re.compile(r"\blayers\.(\d+)\.[\w.]*\b(k_proj|v_proj)$")


def values_per_token(config: Any) -> int:
    """Numbers that one layer of full attention keeps of a token: compressed (MLA), or keys and values."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return int(rank + config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * heads * head_size(config))


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _unfolded(config: Any) -> int:
    """Numbers per token that compressed keys and values become while a layer attends."""
    if not getattr(config, "kv_lora_rank", None):
        return 0
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return int(config.num_attention_heads * width)


def recurrent_state(config: Any, itemsize: int) -> int | None:
    """Bytes that a layer of linear attention, state space or convolution keeps of one sequence, whatever
    its length; states are counted in float32. None: not a kind that is known here."""
    has: dict[str, Any] = {name: getattr(config, name, None) for name in _SIZES}
    if has["linear_num_value_heads"]:  # gated delta net
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        convolution = (2 * keys + values) * config.linear_conv_kernel_dim
        return int(convolution * itemsize + values * config.linear_key_head_dim * FLOAT32)
    if has["mamba_d_state"] or has["ssm_state_size"]:  # Mamba 1 and 2
        state = has["mamba_d_state"] or has["ssm_state_size"]
        heads = has["mamba_n_heads"] or has["mamba_num_heads"]
        width = has["mamba_d_head"] or has["mamba_head_dim"]
        expand = has["mamba_expand"] or has["expand"] or 2
        inner = heads * width if heads and isinstance(width, int) else expand * config.hidden_size
        groups = has["mamba_n_groups"] or has["n_groups"] or 1
        kernel = has["mamba_d_conv"] or has["conv_kernel"] or 4
        return int((inner + 2 * groups * state) * kernel * itemsize + inner * state * FLOAT32)
    if has["conv_L_cache"]:  # short convolutions
        return int(config.hidden_size * config.conv_L_cache * itemsize)
    if config.model_type == "minimax":  # lightning attention: keys times values of every head
        return int(config.num_attention_heads * head_size(config) ** 2 * FLOAT32)
    return None


_SIZES = (
    *("linear_num_value_heads", "mamba_d_state", "ssm_state_size", "mamba_n_heads", "mamba_num_heads"),
    *("mamba_d_head", "mamba_head_dim", "mamba_expand", "expand", "mamba_n_groups", "n_groups"),
    *("mamba_d_conv", "conv_kernel", "conv_L_cache"),
)
