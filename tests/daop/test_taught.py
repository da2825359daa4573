"""``--profile`` and ``--predictor``: what policies run on, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daop.core import DaopError, Geometry
from daop.hardware import load
from daop.predictors.artefact import save
from daop.predictors.base import State
from daop.predictors.network import shapes
from daop.predictors.popularity import Popularity
from daop.predictors.visit_task import FORECASTS
from daop.predictors.visits import Visits
from daop.runtime.costs import HardwareCosts
from daop.runtime.policies.base import make_policy
from daop.runtime.profile import Profile
from daop.runtime.sim_forecasts import OnlineForecaster
from daop.runtime.simulator import Simulator
from daop.taught import open_profile

GEOMETRY = Geometry.uniform(3, 6, 2, 100)


def trained(folder: Path, geometry: Geometry = GEOMETRY) -> Path:
    """A folder as ``daop train`` leaves it: the profile, and the predictor in a folder of its own."""
    ids = np.random.default_rng(0).integers(0, 6, (20, geometry.layers, 2))
    Profile.from_routing(geometry, ids, np.zeros(20, dtype=np.int32)).save(folder)
    arrays = {n: np.zeros(s, np.float32) for n, s in shapes(geometry, 4, FORECASTS, Visits.sight).items()}
    save(Visits(width=4).restore(State(arrays=arrays), geometry), folder / "visits")
    return folder


def test_the_folder_of_a_training_is_enough(tmp_path: Path) -> None:
    folder = trained(tmp_path / "learnt")
    for named in (folder, folder / "visits"):
        found = open_profile(None, named, GEOMETRY)
        assert found is not None
        assert isinstance(found.predictor, Visits)
    without = open_profile(folder, None, GEOMETRY)
    assert without is not None
    assert without.predictor is None
    assert open_profile(None, None, GEOMETRY) is None


def test_policy_and_simulated_gate_run_on_it(tmp_path: Path) -> None:
    found = open_profile(None, trained(tmp_path / "learnt"), GEOMETRY)
    assert found is not None
    costs = HardwareCosts(load("rtx4090").hardware, GEOMETRY)
    for known, source in ((found, "visits"), (replace(found, predictor=None), "context model")):
        assert OnlineForecaster(GEOMETRY, known)._state.source == source
        policy = make_policy("adaptive", known)
        Simulator(policy, GEOMETRY, costs, 9).start()
        assert policy.forecast is not None
        assert policy.forecast["source"] == source


def test_what_cannot_be_run_on_is_refused(tmp_path: Path) -> None:
    folder = trained(tmp_path / "learnt")
    share = State(arrays={"share": np.full(18, 0.3, dtype=np.float32)})
    popularity = Popularity().restore(share, GEOMETRY)
    save(popularity, folder / "popularity")
    with pytest.raises(DaopError, match="train it with `daop train --predictor visits`"):
        open_profile(None, folder / "popularity", GEOMETRY)
    with pytest.raises(DaopError, match="no predictor in"):
        open_profile(folder, tmp_path / "nowhere", GEOMETRY)
    with pytest.raises(DaopError, match="MoE layers"):
        open_profile(None, folder, Geometry.uniform(4, 6, 2, 100))
    (folder / "visits").rename(tmp_path / "visits")
    with pytest.raises(DaopError, match="no profile lies beside it"):
        open_profile(None, tmp_path / "visits", GEOMETRY)
