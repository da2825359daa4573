"""Fitting predictors on traces, with everything a person needs to trust the result lying beside it.

``DIR/NAME/`` holds each predictor and its ``card.json``; ``DIR/split.json`` the sequences that were held out;
``DIR/leaderboard.json`` how all of them did on those.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from daop.core import DaopError
from daop.predictors.artefact import load, name_of, save
from daop.predictors.base import PREDICTORS, NextLayer, Predictor, names_of
from daop.predictors.data import Counts, Routing

from .dataset import read_traces, to_counts, to_routing
from .evaluate import evaluate
from .features import with_features
from .metrics import DEFINITIONS
from .split import Split, sequence_digests, split_by_sequence
from .trace import CountsTrace, Trace

log = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``daop train`` was asked for. ``predictor`` is a name, ``module:Class`` or ``all``."""

    predictor: str = "all"
    target: str | None = None
    test_share: float = 0.2
    seed: int = 0
    max_tokens: int = 200_000

    def names(self) -> list[str]:
        """The predictors to fit."""
        if self.target not in (None, "next", "reuse"):
            raise DaopError(f"--target is {self.target!r}, but must be next or reuse")
        if self.predictor != "all":
            cls = PREDICTORS.get(self.predictor)
            if self.target is not None and cls.kind != self.target:
                raise DaopError(f"{self.predictor} forecasts {cls.kind}, not {self.target}; drop --target")
            return [self.predictor]
        return [n for kind in ("next", "reuse") if self.target in (None, kind) for n in names_of(kind)]


def train(
    paths: Sequence[Path], out: Path, options: Options, *, update: Path | None = None, progress: Progress
) -> dict[str, Any]:
    """Split, fit, save, evaluate; returns the leaderboard document that was written.

    ``update``: a folder of fitted predictors that go on learning from these traces.
    """
    trace = read_traces(paths, round(options.max_tokens / (1 - min(options.test_share, 0.9))), options.seed)
    if isinstance(trace, CountsTrace):
        return _train_counts(trace, paths, out, options, progress)
    trace = trace.grouped()
    split = split_by_sequence(trace, test_share=options.test_share, seed=options.seed)
    data = with_features(to_routing(trace), paths[0], trace) if len(paths) == 1 else to_routing(trace)
    in_test = np.isin(trace.sequences, split.test)
    fit_on = _bounded(data.select(np.flatnonzero(~in_test)), options, progress)
    test = data.select(np.flatnonzero(in_test))
    progress(
        f"{len(split.train)} sequences ({len(fit_on)} tokens) to fit on, "
        f"{len(split.test)} ({len(test)}) held out"
    )
    names = options.names() if update is None else _saved(update, options)
    predictors: dict[str, Predictor] = {}
    spent: dict[str, dict[str, float]] = {}
    for name in names:
        lacking = None if update is not None else _lacks(PREDICTORS.get(name), fit_on)
        if lacking is not None:
            if options.predictor == name:
                raise DaopError(f"{name} needs {lacking}, which {paths[0]} does not have")
            progress(f"{name}: left out, it needs {lacking}, which the trace does not have")
            continue
        progress(f"{name}: fitting")
        start, cpu = time.perf_counter(), time.process_time()
        if update is None:
            predictors[name] = PREDICTORS.get(name)().fit(fit_on)
        else:
            old = load(update / _folder(name), allow=options.predictor)
            old.geometry_.check_same_shape(fit_on.geometry, f"the predictor {name}", str(paths[0]))
            predictors[name] = old.update(fit_on)
        spent[name] = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        save(predictors[name], out / _folder(name))
        progress(f"{name}: fitted in {spent[name]['seconds']:.1f} s")
    if not predictors:
        raise DaopError(
            f"none of the predictors can be fitted on {paths[0]}; `daop trace info` says what it has"
        )
    _write_json(out / "split.json", _split_document(split, trace))
    progress("evaluating on the held-out sequences")
    reports = evaluate(predictors, test)
    return _publish(out, paths, trace, split, predictors, reports, spent, updated=update is not None)


def _bounded(data: Routing, options: Options, progress: Progress) -> Routing:
    small = data.sample(options.max_tokens, options.seed)
    if len(small) < len(data):
        progress(
            f"fitting on {len(small)} of {len(data)} tokens: whole sequences drawn at random to bound memory "
            "(--max-tokens)"
        )
    return small


def _lacks(cls: type[Predictor], data: Routing) -> str | None:
    if cls.needs.token_ids and data.token_ids is None:
        return "token ids"
    if cls.needs.hidden and data.hidden is None:
        return "hidden states"
    if cls.needs.weights and data.weights is None:
        return "router weights"
    if issubclass(cls, NextLayer) and data.geometry.layers < 2:
        return "at least two MoE layers"
    return None


def _saved(folder: Path, options: Options) -> list[str]:
    names = [n for n in options.names() if (folder / _folder(n) / "predictor.json").is_file()]
    if not names:
        raise DaopError(f"{folder} holds none of the predictors that were asked for; train them first")
    return names


def _folder(name: str) -> str:
    return name.replace(":", ".")


def _train_counts(
    trace: CountsTrace, paths: Sequence[Path], out: Path, options: Options, progress: Progress
) -> dict[str, Any]:
    """Only popularity and frequency learn from counts; without tokens there is nothing to evaluate them
    on."""
    data: Counts = to_counts(trace)
    fitted: dict[str, Predictor] = {}
    for name in options.names():
        try:
            fitted[name] = PREDICTORS.get(name)().fit_counts(data)
        except DaopError as error:
            if options.predictor == name:
                raise
            progress(f"{name}: left out: {error}")
            continue
        save(fitted[name], out / _folder(name))
    document = {
        "data": [str(p.name) for p in paths],
        "note": "fitted on counts per sequence; evaluate on a trace of tokens with `daop evaluate`",
        "predictors": {name: {"kind": p.kind} for name, p in fitted.items()},
    }
    _write_json(out / "leaderboard.json", document)
    return document


def fingerprint(trace: Trace) -> str:
    """Identifies the data a predictor was fitted on: a digest over all sequences' routing."""
    return hashlib.sha256("".join(sequence_digests(trace)).encode()).hexdigest()[:32]


def _split_document(split: Split, trace: Trace) -> dict[str, Any]:
    return {
        "seed": split.seed,
        "test_share": split.test_share,
        "by": "sequence; sequences with the same routing stay on one side",
        "data_fingerprint": fingerprint(trace),
        "test_sequences": split.test.tolist(),
    }


def _publish(
    out: Path,
    paths: Sequence[Path],
    trace: Trace,
    split: Split,
    predictors: dict[str, Predictor],
    reports: dict[str, dict[str, Any]],
    spent: dict[str, dict[str, float]],
    *,
    updated: bool,
) -> dict[str, Any]:
    data = {
        "files": [p.name for p in paths],
        "fingerprint": fingerprint(trace),
        "source": trace.source,
        "tokens": len(trace),
        "sequences": len(trace.sequences),
        "held_out_sequences": len(split.test),
        "seed": split.seed,
        "test_share": split.test_share,
    }
    for name, predictor in predictors.items():
        card = {
            "predictor": name_of(predictor),
            "updated": updated,
            "parameters": predictor.parameters(),
            "data": data,
            "held_out": reports[name],
            "definitions": DEFINITIONS,
            "cost": spent[name],
            "versions": versions(),
        }
        _write_json(out / _folder(name) / "card.json", card)
    document = {
        "data": data,
        "geometry": {"experts": trace.geometry.experts, "top_k": trace.geometry.top_k},
        "definitions": DEFINITIONS,
        "predictors": {name: reports[name] | {"fit": spent[name]} for name in predictors},
        "versions": versions(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    _write_json(out / "leaderboard.json", document)
    return document


def versions() -> dict[str, str]:
    """Of everything whose change could change a figure."""
    out = {"python": platform.python_version()}
    for name in ("daop", "numpy", "torch", "scikit-learn", "lightgbm", "pyarrow"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "not installed as a package"
    return out


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(path.name + ".tmp")
    hidden.write_text(json.dumps(document, indent=1, allow_nan=False))
    os.replace(hidden, path)
