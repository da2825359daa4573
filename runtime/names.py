"""What each tensor of a checkpoint is to the model, by transformers' own conversion mapping.

A checkpoint's names are seldom the model's: transformers renames them, and gathers one tensor per expert
into a fused parameter. We ask it for the renaming and read off, per tensor, the parameter that it becomes
and which part of it. Conversions of expert weights that move or change numbers (transposing, interleaving,
dequantising) are refused: an expert must be usable as its bytes lie in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from daop.core import DaopError
from daop.runtime.codecs.stored import StoredFormat


@dataclass(frozen=True, slots=True)
class Target:
    """What a tensor becomes. ``expert`` is None for a tensor that is the parameter as it stands; else it is
    that expert's piece number ``piece`` of ``pieces`` along the output. ``coded``: which piece of a quantised
    weight it holds ("" the weights, "_scale", see ``codecs``), None if it is plain numbers."""

    parameter: str
    expert: int | None = None
    piece: int = 0
    pieces: int = 1
    coded: str | None = None


def targets(
    model: Any, names: Iterable[str], experts: frozenset[str], stored: StoredFormat | None = None
) -> dict[str, Target]:
    """The target of every tensor of ``names`` that belongs to the model; ``experts`` are the names of the
    model's routed-expert parameters, ``stored`` says how a quantised checkpoint names its pieces. A tensor
    that the model does not want is left out."""
    names = list(names)
    pieces = stored.pieces(set(names)) if stored is not None else {}
    plain = _plain_targets(model, {pieces.get(name, (name, ""))[0] for name in names}, experts)
    out = {}
    for name in names:
        base, suffix = pieces.get(name, (name, None))
        if base in plain:
            out[name] = plain[base] if suffix is None else replace(plain[base], coded=suffix)
    return out


def _plain_targets(model: Any, names: Iterable[str], experts: frozenset[str]) -> dict[str, Target]:
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters = model.state_dict()
    prefix = model.base_model_prefix
    out = {}
    # transformers walks the names in this order, and some of its renamings depend on what came before.
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed, pattern = rename_source_key(name, [], [], prefix, parameters)
        if renamed not in parameters:
            continue
        if pattern is None or renamed not in experts:
            out[name] = Target(renamed)
        else:
            out[name] = _expert_target(name, renamed, pattern, by_pattern[pattern])
    return out


def _expert_target(name: str, parameter: str, pattern: str, converter: WeightConverter) -> Target:
    kinds = [type(operation) for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    pieces = len(converter.source_patterns)
    merges = kinds == [MergeModulelist] and dims == [0] and pieces == 1
    joins = kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
    if not (merges or joins) or "*" not in pattern:
        raise DaopError(
            f"tensor {name!r} becomes {parameter!r} by {converter.operations}, which changes how its "
            "numbers lie, and daop needs experts that can be used as they are stored"
        )
    # The star is the expert's number; what is around it is a regular expression already.
    before, after = pattern.split("*", 1)
    number = re.search(f"{before}(\\d+){after}", name) or re.search(r"\.(\d+)\.(?!.*\.\d+\.)", name)
    if number is None:
        raise DaopError(f"cannot tell which expert tensor {name!r} belongs to")
    return Target(parameter, int(number[1]), converter.source_patterns.index(pattern), pieces)
