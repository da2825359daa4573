"""Gate look-ahead, plain and with each improvement, side by side on traces with hidden states.

    daop trace capture MODEL --prompts train.jsonl -o train.parquet --features
    daop trace capture MODEL --prompts heldout.jsonl -o heldout.parquet --features
    python benchmarks/gate_demo.py train.parquet heldout.parquet

Fits every variant on the first trace and scores all on the generated tokens of the second. Aim: the best at
least 5 points of recall@k above plain, or above 0.95. Forecasts from routing alone are shown beside them
(--routing).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from daop.core import DaopError
from daop.predictors.base import PREDICTORS
from daop.predictors.data import Routing
from daop.training.dataset import to_routing
from daop.training.evaluate import evaluate
from daop.training.features import with_features
from daop.training.parquet import read_trace
from daop.training.split import without_copies

VARIANTS = ("gate_lookahead", "gate_lookahead_norm", "gate_lookahead_residual", "gate_lookahead_corrected")


def load(path: Path) -> Routing:
    trace = read_trace(path).grouped()
    data = with_features(to_routing(trace), path, trace)
    if data.hidden is None:
        raise DaopError(f"{path} has no features beside it; capture it with --features")
    return data


def show(name: str, r: dict[str, Any]) -> None:
    ahead = " ".join(f"{v:.3f}" for v in r["by_horizon"].values())
    low, high = r["interval"]
    print(f"{name:26} recall@k {r['recall_at_k']:.3f} ({low:.3f} to {high:.3f})  horizons 1-4 {ahead}")
    cost = f"{r['microseconds']:.0f} us a forecast"
    print(f"{'':26} whole set {r['whole_set']:.3f}  ECE {r['ece']:.3f}  {cost}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--routing", default="transition", help="predictors without hidden states, or ''")
    args = parser.parse_args()
    torch.set_num_threads(1)
    copies = without_copies(read_trace(args.heldout).grouped(), read_trace(args.train))[1]
    fit_on, test = load(args.train), load(args.heldout)
    assert fit_on.hidden is not None
    assert test.hidden is not None
    print(
        f"fitted on {len(fit_on.hidden.rows)} generated tokens of {fit_on.sequences} sequences, scored on "
        f"{len(test.hidden.rows)} of {test.sequences} others ({copies} in both)"
    )
    found: dict[str, Any] = {}
    for name in (*VARIANTS, *filter(None, args.routing.split(","))):
        predictor = PREDICTORS.get(name)().fit(fit_on)
        report = evaluate({name: predictor}, test if predictor.needs.hidden else replace(test, hidden=None))[
            name
        ]
        found[name] = {
            "recall_at_k": report["recall_at_k"],
            "interval": report["recall_at_k_interval"],
            "by_horizon": {h: r["recall_at_k"] for h, r in report["by_horizon"].items()},
            "per_layer": report["per_layer"]["recall_at_k"],
            "whole_set": report["whole_set"],
            "ece": report["ece"],
            "microseconds": report["microseconds_per_forecast"],
        }
        show(name, found[name])
    best = max(VARIANTS, key=lambda n: found[n]["recall_at_k"])
    gain = found[best]["recall_at_k"] - found["gate_lookahead"]["recall_at_k"]
    print(f"best: {best}, {100 * gain:.1f} points above plain")
    print(json.dumps({"variants": found, "best": best, "points_above_plain": 100 * gain}))


if __name__ == "__main__":
    main()
