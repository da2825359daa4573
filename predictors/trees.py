"""Growing and reading LightGBM's trees, with the settings that make a fit repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daop.core import FloatArray


def grow(
    x: FloatArray,
    y: FloatArray,
    *,
    features: Sequence[str],
    objective: str,
    trees: int,
    leaves: int,
    learning_rate: float,
    least: int,
    seed: int,
) -> str:
    """x [N, features], y [N] -> a model in LightGBM's text format; ``least`` rows at least in a leaf."""
    import lightgbm

    parameters = {
        "objective": objective,
        "num_leaves": leaves,
        "learning_rate": learning_rate,
        "min_data_in_leaf": least,
        "verbosity": -1,
        "num_threads": 1,
        "seed": seed,
        "deterministic": True,
    }
    table = lightgbm.Dataset(x, y, feature_name=list(features), free_raw_data=True)
    return str(lightgbm.train(parameters, table, trees).model_to_string())


def read(text: str, features: Sequence[str]) -> Any:
    """The booster of a text; raises ValueError if it wants other features."""
    import lightgbm

    booster = lightgbm.Booster(model_str=text)
    if booster.num_feature() != len(features):
        raise ValueError(f"the trees want {booster.num_feature()} features, not {len(features)}")
    return booster
