"""The correction of a next layer's input: what it learns, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from early_runs import (
    correction,
    profile,
)
from tiny_models import save_tiny

from daop.api import load
from daop.core import DaopError
from daop.runtime.input_correction import InputCorrection, fit
from daop.runtime.policies.base import make_policy
from daop.runtime.profile import Profile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("mixtral", path)
    return path


def test_a_correction_of_another_model_is_refused(model: Path) -> None:
    known = profile(model)
    other = fit(np.ones((8, 3, 5), dtype=np.float32), [None] * 3)
    policy = make_policy("bounded", Profile(geometry=known.geometry, frequency=known.frequency, arrays=other))
    with pytest.raises(DaopError, match="inputs of 5 values, this model's have 48"):
        load(model, policy=policy, ecr=0.5)
    broken = {key: value for key, value in correction().items() if key != "input.0.up"}
    with pytest.raises(DaopError, match="layer 0 is incomplete"):
        InputCorrection(broken)


def test_the_correction_learns_what_is_linear() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(400, 8)).astype(np.float32)
    mix = rng.normal(size=(8, 2)) @ rng.normal(size=(2, 8))
    y = (x * 1.5 + x @ mix + 0.7).astype(np.float32)
    norms: Any = [np.ones(8, dtype=np.float32), np.full(8, 1.5, dtype=np.float32)]
    guess = InputCorrection(fit(np.stack([x, y], axis=1), norms, rank=2))(0, torch.from_numpy(x))
    assert float((guess - torch.from_numpy(y)).norm() / np.linalg.norm(y)) < 0.02
    plain = InputCorrection(fit(np.stack([x, y], axis=1), norms, rank=1))(0, torch.from_numpy(x))
    assert float((plain - torch.from_numpy(y)).norm() / np.linalg.norm(y)) > 0.02
