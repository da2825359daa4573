"""The model without a single weight: transformers' modules on the meta device, and the experts among them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from daop.core import DaopError
from daop.runtime.experts import Experts
from daop.runtime.families import TESTED, find_experts


@dataclass(frozen=True, eq=False)
class Skeleton:
    """``model`` has meta parameters only; ``experts`` are its routed experts, one entry per MoE layer."""

    model_type: str
    model_class: Any  # a PreTrainedModel class
    config: Any  # its PreTrainedConfig
    model: Any
    experts: tuple[Experts, ...]


def build_skeleton(folder: Path, tensors: int) -> Skeleton:
    """Build the folder's causal language model on the meta device; ``DaopError`` if daop cannot run it.

    ``tensors``: how many the files hold; a model of more layers is not begun.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise DaopError(
            f"transformers cannot read {folder / 'config.json'}: {' '.join(str(error).split())[:300]}"
        ) from error
    for part in (config, config.get_text_config()):  # the experts' format is ours to read: see codecs.stored
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > tensors:
        raise DaopError(
            f"{folder / 'config.json'} speaks of {layers} layers, but the files hold {tensors} tensors: they "
            "are of different models; fetch the whole folder again"
        )
    model_type = config.model_type
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise DaopError(
            f"{folder} is a {model_type!r} model, which transformers does not have as a causal language "
            "model. " + _supported()
        )
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if isinstance(model_class, tuple):
        wanted = config.architectures or []
        model_class = next((one for one in model_class if one.__name__ in wanted), model_class[0])
    text_config = config.get_text_config()
    if model_class.config_class is type(text_config):  # a language model inside a multimodal checkpoint
        config = text_config
        model_type = config.model_type
    try:
        with torch.device("meta"):
            model = model_class(config)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise DaopError(
            f"transformers cannot build the {model_type!r} model that {folder / 'config.json'} describes "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): fetch the file again"
        ) from error
    experts = find_experts(model)
    if not experts:
        odd = sorted({name for name, _ in model.named_parameters() if "expert" in name})
        if odd:
            raise DaopError(
                f"{folder} is a {model_type!r} model, whose experts ({odd[0]!r}, for one) daop cannot run. "
                + _supported()
            )
        raise DaopError(
            f"{folder} is a {model_type!r} model without routed experts: there is nothing for daop to "
            "place; run it with transformers. " + _supported()
        )
    return Skeleton(model_type, model_class, config, model, experts)


def _supported() -> str:
    return f"Supported and tested: {', '.join(TESTED)}."
