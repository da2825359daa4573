"""What other traffic taught, as ``--profile`` and ``--predictor`` name it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from daop.core import DaopError, Geometry
from daop.predictors.artefact import load
from daop.predictors.visits import Visits
from daop.runtime.profile import Profile

NAME = "visits"


def open_profile(
    profile: str | Path | None, predictor: str | Path | None, geometry: Geometry
) -> Profile | None:
    """The profile, with the predictor that policies are to run on. ``predictor`` is the folder of one, or the
    folder that ``daop train`` wrote; without ``profile`` the one that lies there is taken."""
    if predictor is None:
        return None if profile is None else Profile.load(Path(profile), geometry)
    folder = Path(predictor)
    if not (folder / "predictor.json").is_file() and (folder / NAME).is_dir():
        folder = folder / NAME
    found = open_predictor(folder, geometry)
    if profile is None:
        profile = folder.parent
        if not (profile / "profile.json").is_file():
            raise DaopError(
                f"--predictor {predictor}: no profile lies beside it; name the one of the same traffic "
                "with --profile"
            )
    return replace(Profile.load(Path(profile), geometry), predictor=found)


def open_predictor(folder: Path, geometry: Geometry) -> Visits:
    """A trained predictor that is fast enough to run beside a model of this geometry."""
    found = load(folder)
    if not isinstance(found, Visits):
        raise DaopError(
            f"--predictor {folder}: policies run on the predictor {NAME}, which takes microseconds, not "
            f"on {type(found).__name__}; train it with `daop train --predictor {NAME}`"
        )
    geometry.check_same_shape(found.geometry_, "the model", f"the predictor {folder}")
    return found
