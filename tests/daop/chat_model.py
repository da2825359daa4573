"""A tiny random model with a tokenizer of single bytes, for tests of the front door."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LAYERS, EXPERTS, TOP_K = 3, 8, 2
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_chat_model(folder: Path, *, template: bool = False) -> Path:
    """Write the model and its tokenizer into ``folder``."""
    special = ["<pad>", "<s>", "</s>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    if template:
        fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=len(names),
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.set_num_threads(1)  # tiny products are slower on several threads
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
