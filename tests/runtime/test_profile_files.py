"""Profiles come from other people: whatever is in the folder, it is a profile of this model or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from daop.core import DaopError, Geometry
from daop.runtime.context_model import ContextModel
from daop.runtime.profile import Profile

GEOMETRY = Geometry.uniform(3, 8, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ids = np.argsort(np.random.default_rng(0).random((40, 3, 8)), axis=2)[:, :, :2]
    profile = Profile.from_routing(GEOMETRY, ids, np.repeat(np.arange(4), 10))
    profile.save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "head",
    [
        *("", "{", "[]", "null", "3", '"x"', "[" * 100_000 + "]" * 100_000),
        *({"experts": "ab"}, {"experts": [1e400] * 3}, {"experts": [-1] * 3}, {"experts": [8] * 2}),
        *({"top_k": 1e400}, {"top_k": None}, {"format": 2}),
    ],
)
def test_a_head_of_nonsense(folder: Path, head: str | dict[str, Any]) -> None:
    if isinstance(head, dict):
        head = json.dumps({**json.loads((folder / "profile.json").read_text()), **head})
    (folder / "profile.json").write_text(head)
    with pytest.raises(DaopError):
        Profile.load(folder, GEOMETRY)


@pytest.mark.parametrize("name", ["frequency", "matrices", "learnt.any"])
@pytest.mark.parametrize("value", [np.nan, np.inf, True])
def test_arrays_of_no_numbers(folder: Path, name: str, value: object) -> None:
    arrays = load_file(folder / "profile.safetensors")
    shape = arrays.get(name, np.zeros(3, dtype=np.float32)).shape
    arrays[name] = np.full(shape, value)
    save_file(arrays, folder / "profile.safetensors")
    with pytest.raises(DaopError, match="does not hold finite numbers"):
        Profile.load(folder, GEOMETRY)


@pytest.mark.parametrize("part", ["leads", "bias", "gain"])
def test_half_a_context_model(part: str) -> None:
    arrays = {f"context.{name}": np.zeros(1) for name in ("leads", "table", "bias", "gain") if name != part}
    with pytest.raises(DaopError, match="incomplete"):
        ContextModel.from_arrays(arrays, GEOMETRY)
