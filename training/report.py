"""Scoring saved predictors on another trace, and how much each figure fell since training (drift)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daop.core import DaopError
from daop.predictors.artefact import load
from daop.predictors.base import PREDICTORS, Predictor

from .dataset import to_routing
from .evaluate import evaluate
from .features import with_features
from .metrics import DEFINITIONS
from .parquet import read_trace
from .split import split_by_sequence, without_copies
from .trace import Trace
from .train import fingerprint, versions

FIGURES = ("recall_at_k", "recall_at_2k", "whole_set", "top_1", "hit_rate")


def evaluate_saved(
    what: str,
    path: Path,
    *,
    only: str | None = None,
    train_on: Path | None = None,
    max_tokens: int,
    seed: int = 0,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """``what`` is a folder of ``daop train``, one predictor's folder, or a name that is fitted here and
    now."""
    trace = read_trace(path).grouped()
    folder = Path(what)
    cards: dict[str, dict[str, Any]] = {}
    if folder.is_dir():
        predictors, cards = _load_all(folder, only)
        trace = _unseen(trace, folder, progress)
    else:
        predictors, trace = _fit_here(what, path, trace, train_on, seed, progress)
    for name, predictor in predictors.items():
        predictor.geometry_.check_same_shape(trace.geometry, f"the predictor {name}", str(path))
    data = with_features(to_routing(trace), path, trace)
    usable = {n: p for n, p in predictors.items() if data.hidden is not None or not p.needs.hidden}
    for name in predictors.keys() - usable.keys():
        progress(f"{name}: left out, the trace has no hidden states (record with --features)")
    if not usable:
        raise DaopError(f"{path} has nothing to score {', '.join(predictors)} on; record it with --features")
    progress(f"scoring {', '.join(usable)} on {len(trace)} tokens")
    reports = evaluate(usable, data, max_tokens=max_tokens, seed=seed)
    document: dict[str, Any] = {
        "trace": path.name,
        "data": {"fingerprint": fingerprint(trace), "tokens": len(trace), "sequences": len(trace.sequences)},
        "geometry": {"experts": trace.geometry.experts, "top_k": trace.geometry.top_k},
        "definitions": DEFINITIONS,
        "predictors": reports,
        "versions": versions(),
    }
    if cards:
        document["drift"] = {n: drift(cards[n], reports[n]) for n in reports if n in cards}
    return document


def _load_all(folder: Path, only: str | None) -> tuple[dict[str, Predictor], dict[str, dict[str, Any]]]:
    single = (folder / "predictor.json").is_file()
    folders = [folder] if single else sorted(p.parent for p in folder.glob("*/predictor.json"))
    if only is not None and not single:
        folders = [f for f in folders if f.name == only.replace(":", ".")]
    if not folders:
        raise DaopError(
            f"{folder} holds no predictor{f' {only}' if only else ''}; train one with `daop train`"
        )
    predictors = {f.name: load(f, allow=only) for f in folders}
    cards = {}
    for f in folders:
        try:
            cards[f.name] = dict(json.loads((f / "card.json").read_text())["held_out"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a predictor that was copied without its card can still be scored
    return predictors, cards


def _unseen(trace: Trace, folder: Path, progress: Callable[[str], None]) -> Trace:
    """On the very trace of training, only the sequences that were held out."""
    for place in (folder, folder.parent):
        try:
            split = json.loads((place / "split.json").read_text())
        except (OSError, ValueError):
            continue
        if split.get("data_fingerprint") == fingerprint(trace):
            progress("this is the trace of training: only its held-out sequences are scored")
            return trace.select(split["test_sequences"])
    return trace


def _fit_here(
    name: str, path: Path, trace: Trace, train_on: Path | None, seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Predictor], Trace]:
    if "/" in name or Path(name).exists():
        raise DaopError(f"there is no folder {name}: give one that `daop train` wrote, or a predictor's name")
    cls = PREDICTORS.get(name)
    if train_on is None:
        split = split_by_sequence(trace, seed=seed)
        source, trace = trace.select(split.train), trace.select(split.test)
        progress(
            f"{name}: fitted on {len(split.train)} of the sequences, scored on the other {len(split.test)}"
        )
    else:
        source, dropped = without_copies(read_trace(train_on).grouped(), trace)
        if dropped:
            progress(
                f"{dropped} sequences of {train_on} also stand in the trace to score on and were left out"
            )
    origin = path if train_on is None else train_on
    fitted = cls().fit(with_features(to_routing(source), origin, source))
    return {name.replace(":", "."): fitted}, trace


def drift(card: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """New figure minus the one of training, for each that both have; and per layer where recall is known."""
    figures = {f: now[f] - card[f] for f in FIGURES if now.get(f) is not None and card.get(f) is not None}
    out: dict[str, Any] = {"figures": figures}
    then = card.get("per_layer", {}).get("recall_at_k")
    later = now.get("per_layer", {}).get("recall_at_k")
    if then and later:
        falls = [None if a is None or b is None else b - a for a, b in zip(then, later, strict=True)]
        out["per_layer"] = {"recall_at_k": falls}
        known = [(layer, fall) for layer, fall in enumerate(falls) if fall is not None]
        out["worst_layers"] = sorted(known, key=lambda item: item[1])[:3]
    return out
