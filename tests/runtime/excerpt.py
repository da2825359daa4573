"""The excerpt of a recorded trace that tests replay, and a profile of its first half."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from daop.core import Geometry
from daop.hardware import load
from daop.runtime.costs import HardwareCosts
from daop.runtime.policies.base import make_policy
from daop.runtime.profile import Profile
from daop.runtime.sim_forecasts import OnlineForecaster
from daop.runtime.sim_run import Run
from daop.runtime.sim_traffic import Traffic
from daop.runtime.simulator import Simulator

PATH = Path(__file__).parents[1] / "data" / "gpt-oss-20b-excerpt.npz"
GEOMETRY = Geometry.uniform(24, 32, 4, 13_200_000)


@cache
def excerpt() -> Traffic:
    with np.load(PATH, allow_pickle=False) as data:
        return Traffic(geometry=GEOMETRY, ids=data["ids"], sequence=data["sequence"])


@cache
def profile() -> Profile:
    """Of the first two sequences; frequencies and matrices only."""
    traffic = excerpt()
    part = traffic.sequence < 2
    return Profile.from_routing(GEOMETRY, traffic.ids[part], traffic.sequence[part])


def replay(
    name: str, slots: int, traffic: Traffic | None = None, known: Profile | None = None, batch: int = 1
) -> Run:
    """A policy on the machine ``rtx4090``."""
    traffic, known = traffic or excerpt(), known or profile()
    policy = make_policy(name, known)
    costs = HardwareCosts(load("rtx4090").hardware, GEOMETRY, weight_bits=4.25)
    forecaster = OnlineForecaster(GEOMETRY, known) if policy.horizon else None
    return Simulator(policy, GEOMETRY, costs, slots, forecaster).run(traffic, batch)


@cache
def replayed(name: str, slots: int) -> Run:
    """``replay`` of the excerpt, once for all tests that look at the same run."""
    return replay(name, slots)
