"""What tests of approximate policies share: rows and a profile of a tiny model, and counted runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from daop.api import load
from daop.core import Geometry
from daop.quality import Batch, teacher
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.input_correction import fit
from daop.runtime.policies.approximate import Approximate, Routing, Settled
from daop.runtime.policies.base import POLICIES
from daop.runtime.profile import Profile
from daop.runtime.sequence_placement import SequencePlacement

LAYERS, E, K, H = 3, 6, 3, 48  # of tiny_models
PROMPT = 7
OPTIONS: dict[str, dict[str, Any]] = {
    "daop": {"first": 0},
    "deferral": {"immediate": 1},
    "bounded": {"tolerance": 1.15, "calls": 2},
}
APPROXIMATE = sorted(name for name, policy in POLICIES.items() if not policy.exact)


def rows(count: int, length: int = 20, seed: int = 3) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(2, 89, length).tolist()) for _ in range(count))


def correction() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return fit(rng.normal(size=(64, LAYERS, H)).astype(np.float32), [None] * LAYERS, rank=5)


def profile(model: Path) -> Profile:
    geometry = open_checkpoint(model).geometry
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.gumbel(size=(90, LAYERS, E)) + np.arange(E) * 0.3, axis=2)[:, :, :K]
    learnt = Profile.from_routing(geometry, ids, np.repeat([0, 1, 2], 30))
    return Profile(geometry=geometry, frequency=learnt.frequency, arrays=correction())


def scores(
    model: Path, policy: Approximate, sequences: tuple[tuple[int, ...], ...], ecr: float
) -> tuple[torch.Tensor, Any]:
    policy.profile = profile(model)
    with load(model, policy=policy, ecr=ecr) as runtime:
        found = teacher(runtime)(Batch(tokens=sequences, prompt=PROMPT))
        counts = runtime.statistics()["approximate"]
    assert found.calls is not None
    assert counts["approximated"] == found.calls[:, 0].sum()
    assert counts["calls"] == found.calls[:, 1].sum() == len(sequences) * 12 * LAYERS * K
    return found.logits, found.calls


class Everything(Approximate):
    """Starts all that the next router names, and defers the last choice: early and late calls at once."""

    weighs = True

    def start(self, geometry: Geometry, slots: int, *_: Any) -> list[int]:
        self.geometry = geometry
        self.placement = SequencePlacement(geometry, [], None)
        return []

    def asks(self, layer: int) -> bool:
        return layer < self.geometry.layers - 1

    def announce(self, layer: int, sequences: Any, forecast: Routing, scores: Any) -> Settled:
        self.named = forecast.ids
        return Settled(forecast, early=np.ones(forecast.ids.shape, dtype=np.bool_))

    def settle(self, layer: int, sequences: Any, routing: Routing, distances: Any) -> Settled:
        late = np.zeros(routing.ids.shape, dtype=np.bool_)
        late[:, -1] = layer < self.geometry.layers - 1
        if distances is None:
            return Settled(routing, late=late)
        named = (routing.ids[:, :, None] == self.named[:, None, :]).any(axis=2)
        return Settled(routing, early=named & ~late, late=late)
