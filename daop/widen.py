"""Enlarges a checkpoint's experts to realistic sizes without changing its function.

Every expert's intermediate size grows by zeros: rows of ``gate_proj`` and ``up_proj``, columns of
``down_proj``. What a zero row yields is multiplied by a zero column, so logits stay the same, and so
does the routing; only the bytes and the arithmetic grow. For measurements with real routing and real bytes.

The source is a Hugging Face folder with one tensor per expert and projection (the layout of qwen3_moe,
olmoe, deepseek and others). The target appears only when complete; one output shard is in memory at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from daop.core import DaopError
from daop.units import format_size

EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight$")
GIB = 2**30
SHARD_BYTES = GIB // 2
ROUNDING = 8  # of the intermediate size that --target-gib chooses


@dataclass(frozen=True, kw_only=True)
class Tensor:
    name: str
    file: Path
    shape: tuple[int, ...]
    item_bytes: int

    def wide(self, intermediate: int) -> tuple[int, ...]:
        """The shape after widening; only experts change."""
        match = EXPERT.search(self.name)
        if not match:
            return self.shape
        rows, columns = self.shape
        return (rows, intermediate) if match[1] == "down_proj" else (intermediate, columns)

    def wide_bytes(self, intermediate: int) -> int:
        return int(torch.Size(self.wide(intermediate)).numel()) * self.item_bytes


def size_key(config: dict[str, Any]) -> str:
    """The configuration's name for the experts' intermediate size."""
    return "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"


def read_tensors(source: Path) -> list[Tensor]:
    """All tensors of a folder from the headers of its safetensors files, in the order of the files."""
    tensors = []
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                part = handle.get_slice(name)
                item_bytes = {"F32": 4, "F16": 2, "BF16": 2}.get(part.get_dtype())
                if item_bytes is None:
                    raise DaopError(
                        f"{file}: {name} is {part.get_dtype()}; only F32, F16 and BF16 can be widened"
                    )
                tensors.append(
                    Tensor(name=name, file=file, shape=tuple(part.get_shape()), item_bytes=item_bytes)
                )
    if not any(EXPERT.search(tensor.name) for tensor in tensors):
        raise DaopError(f"{source}: no '...experts.N.gate_proj.weight' in its safetensors files")
    return tensors


def fitting_intermediate(tensors: list[Tensor], target_bytes: float) -> int:
    """The largest multiple of ROUNDING with which all experts together take at most ``target_bytes``."""
    per_unit = sum(tensor.wide_bytes(1) for tensor in tensors if EXPERT.search(tensor.name))
    return int(target_bytes // per_unit) // ROUNDING * ROUNDING


def shards(tensors: list[Tensor], intermediate: int) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    size = 0
    for tensor in tensors:
        more = tensor.wide_bytes(intermediate)
        if shard and size + more > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += more
    yield shard


def widened(tensor: Tensor, intermediate: int) -> torch.Tensor:
    with safe_open(tensor.file, framework="pt") as handle:
        value: torch.Tensor = handle.get_tensor(tensor.name)
    shape = tensor.wide(intermediate)
    if shape == tensor.shape:
        return value
    wide = torch.zeros(shape, dtype=value.dtype)
    wide[: value.shape[0], : value.shape[1]] = value
    return wide


@dataclass(frozen=True, kw_only=True)
class Widened:
    """What was written: the new intermediate size, bytes of all tensors and of the experts alone."""

    folder: Path
    intermediate: int
    total_bytes: int
    expert_bytes: int


def widen(
    source: Path,
    target: Path,
    *,
    intermediate: int | None = None,
    target_bytes: float | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Widened:
    """Write ``source`` with experts of that intermediate size, or of about ``target_bytes`` in all."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    key = size_key(config)
    tensors = read_tensors(source)
    if intermediate is None:
        intermediate = fitting_intermediate(tensors, target_bytes or 0)
    if intermediate < config[key]:
        raise DaopError(f"{source} has {key} {config[key]} already, {intermediate} would be smaller")
    if target.exists():
        raise DaopError(f"{target} exists; remove it or name another folder")
    total = sum(tensor.wide_bytes(intermediate) for tensor in tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < total * 1.02:
        raise DaopError(f"{target}: {format_size(total)} are needed, the disk has less free")

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_shards(tensors, partial, intermediate, total, progress or (lambda _, __: None))
        for path in source.iterdir():
            if path.is_file() and ".safetensors" not in path.name and path.name != "README.md":
                shutil.copy(path, partial / path.name)
        config[key] = intermediate
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    experts = sum(t.wide_bytes(intermediate) for t in tensors if EXPERT.search(t.name))
    return Widened(folder=target, intermediate=intermediate, total_bytes=total, expert_bytes=experts)


def _write_shards(
    tensors: list[Tensor],
    folder: Path,
    intermediate: int,
    total: int,
    progress: Callable[[str, float], None],
) -> None:
    plan = list(shards(tensors, intermediate))
    weight_map: dict[str, str] = {}
    written = 0
    for number, shard in enumerate(plan, start=1):
        file = f"model-{number:05}-of-{len(plan):05}.safetensors"
        values = {tensor.name: widened(tensor, intermediate) for tensor in shard}
        save_file(values, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map.update(dict.fromkeys(values, file))
        written += sum(tensor.wide_bytes(intermediate) for tensor in shard)
        progress(f"writing {file}", written / total)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
