"""What other traffic taught about a model's experts: food for policies, saved as safetensors and JSON.

A folder holds ``profile.safetensors`` (arrays) and ``profile.json`` (format, geometry, origin). It is
checked against the model's geometry before use. Nothing in it names a prompt or a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError, FloatArray, Geometry

if TYPE_CHECKING:
    from daop.predictors.visits import Visits

FORMAT = 1
MATRICES = 300  # stored activation matrices: enough for the nearest to be near, small enough to search


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """``frequency`` [total]: share of tokens that chose each expert.

    ``matrices`` [n, total]: the same share in single sequences, or None.
    ``arrays``: what a policy learnt for itself, by name.
    ``predictor``: forecasts in place of the context model; it is saved in a folder of its own.
    """

    geometry: Geometry
    frequency: FloatArray
    matrices: FloatArray | None = None
    arrays: dict[str, NDArray[Any]] | None = None
    predictor: Visits | None = None

    @classmethod
    def from_routing(cls, geometry: Geometry, ids: NDArray[Any], sequence: NDArray[Any]) -> Profile:
        """Count ``ids`` [N, L, K] by expert, in all and by ``sequence`` [N] (ascending runs)."""
        if not len(ids):
            raise DaopError("a profile cannot be made from a trace without tokens")
        flat = ids.astype(np.int64) + np.asarray(geometry.offsets[:-1])[:, None]
        starts = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(ids)]
        step = max(1, -(-(len(starts) - 1) // MATRICES))
        counts = np.bincount(flat.ravel(), minlength=geometry.total)
        matrices = [
            np.bincount(flat[a:b].ravel(), minlength=geometry.total) / (b - a)
            for a, b in list(pairwise(starts))[::step]
        ]
        return cls(
            geometry=geometry,
            frequency=(counts / len(ids)).astype(np.float32),
            matrices=np.asarray(matrices, dtype=np.float32),
        )

    def save(self, folder: Path) -> None:
        """Write both files, making the folder."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, NDArray[Any]] = {"frequency": self.frequency}
        if self.matrices is not None:
            arrays["matrices"] = self.matrices
        arrays.update({f"learnt.{name}": array for name, array in (self.arrays or {}).items()})
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, folder / "profile.safetensors")
        head = {
            "format": FORMAT,
            "experts": list(self.geometry.experts),
            "top_k": self.geometry.top_k,
            "fingerprint": self.geometry.fingerprint,
        }
        (folder / "profile.json").write_text(json.dumps(head, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, geometry: Geometry) -> Profile:
        """Read a saved profile and check that it fits ``geometry``."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            head = json.loads((folder / "profile.json").read_text())
            arrays = load_file(folder / "profile.safetensors")
            experts = tuple(int(n) for n in head["experts"])
            if head["format"] != FORMAT:
                raise DaopError(f"{folder}: profile format {head['format']} is not {FORMAT}; make it again")
            theirs = Geometry(
                experts=experts,
                top_k=int(head["top_k"]),
                expert_bytes=(0,) * len(experts),
                layer_to_model_layer=tuple(range(len(experts))),
            )
        except (
            *(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError),
            SafetensorError,
        ) as error:
            raise DaopError(f"{folder} is not a profile (--profile): {error}") from error
        geometry.check_same_shape(theirs, "the model", f"the profile {folder}")
        frequency, matrices = arrays.pop("frequency", None), arrays.pop("matrices", None)
        for name, array, ndim in (("frequency", frequency, 1), ("matrices", matrices, 2)):
            missing = array is None and name == "frequency"
            if missing or (array is not None and (array.ndim != ndim or array.shape[-1] != geometry.total)):
                raise DaopError(f"{folder}: {name!r} does not have one figure for each expert; make it again")
        for name, array in {"frequency": frequency, "matrices": matrices, **arrays}.items():
            if array is not None and not (array.dtype.kind in "iu" or _is_finite(array)):
                raise DaopError(f"{folder}: {name!r} does not hold finite numbers; make it again")
        learnt = {name.removeprefix("learnt."): array for name, array in arrays.items()}
        return cls(geometry=geometry, frequency=frequency, matrices=matrices, arrays=learnt or None)


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f" and bool(np.isfinite(array).all())
