"""Expert counts per sequence as npz: ``n_tokens [S]`` and one or more arrays ``[S, L, E]`` of how often
each expert was chosen (one per variant of the model). Such as olmoe-1b-7b of
github.com/pjordanandrsn/experts4bit-qlora (MIT). No order of tokens: only popularity and frequency can be
fitted on it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daop.core import DaopError, Geometry
from daop.training.trace import CountsTrace

from .base import IMPORTERS, ImportOptions, load_npz


@IMPORTERS.register("sequence-counts")
def sequence_counts(path: Path, options: ImportOptions) -> CountsTrace:
    """Counts per sequence; --array names the variant (default: the file's first)."""
    arrays = load_npz(path, ("n_tokens",))
    tokens = arrays.pop("n_tokens").astype(np.int64)
    names = [name for name, a in arrays.items() if a.ndim == 3 and len(a) == len(tokens)]
    if options.array is not None and options.array not in names:
        raise DaopError(f"{path} has no counts {options.array!r}; it has {', '.join(names) or 'none at all'}")
    if not names or len(tokens) == 0 or (tokens < 1).any():
        raise DaopError(f"{path} holds no array [sequences, layers, experts] for its n_tokens")
    name = options.array or names[0]
    counts = arrays[name]
    top_k, rest = divmod(int(counts[0, 0].sum()), int(tokens[0]))
    if rest or not 1 <= top_k <= counts.shape[2]:
        raise DaopError(f"{path}: {name!r} counts {int(counts[0, 0].sum())} choices for {tokens[0]} tokens")
    return CountsTrace(
        geometry=Geometry.uniform(counts.shape[1], counts.shape[2], top_k),
        sequence=np.arange(len(tokens), dtype=np.int32),
        tokens=tokens.astype(np.int32),
        counts=counts.reshape(len(tokens), -1).astype(np.uint32),
        source={"format": "sequence-counts", "file": path.name, "array": name, "arrays": names},
    )
