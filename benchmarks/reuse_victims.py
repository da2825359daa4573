"""What is a reuse forecast worth as a victim rule? One pool, gpt-oss-20b routing, 80/20 by sequence.

    python benchmarks/reuse_victims.py mmlu.npz [--predictors recency,frequency,mlp_reuse,lightgbm_reuse]

Prints hit rates of LRU, LFU, the forecasts and the optimum (Belady, which knows the future) side by side,
with the share of the distance from LRU to the optimum that was closed; then what scoring every expert of a
model of 48 layers x 128 experts costs. Aims: at ECR 25 % a hit rate of 0.70; at 12.5 % half of the
distance; cost under 2 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daop.core import Geometry
from daop.predictors.artefact import load, save
from daop.predictors.base import PREDICTORS, Reuse
from daop.predictors.data import Routing
from daop.predictors.history import Context, walk
from daop.training.dataset import to_routing
from daop.training.importers.base import IMPORTERS, ImportOptions
from daop.training.reuse_replay import replay, score_waits
from daop.training.split import split_by_sequence
from daop.training.trace import Trace

DEFAULT = "recency,frequency,mlp_reuse,lightgbm_reuse"


def fitted(name: str, data: Routing, folder: Path | None) -> Reuse:
    """Fitted now, or loaded from where an earlier run of this benchmark kept it."""
    if folder is not None and (folder / name).is_dir():
        predictor = load(folder / name)
    else:
        predictor = PREDICTORS.get(name)().fit(data)
        if folder is not None:
            save(predictor, folder / name)
    assert isinstance(predictor, Reuse)
    return predictor


def cost(name: str, layers: int = 48, experts: int = 128, top_k: int = 8, repeats: int = 31) -> float:
    """Median milliseconds to score all experts after one token; fitted on a little made-up routing."""
    rng = np.random.default_rng(0)
    geometry = Geometry.uniform(layers, experts, top_k)
    n = 240
    ids = np.argsort(rng.random((n, layers, experts)) - np.linspace(0, 0.5, experts), axis=2)[:, :, :top_k]
    shift = np.asarray(geometry.offsets[:-1])[None, :, None]
    data = Routing(
        geometry=geometry,
        flat=(ids + shift).astype(np.int32),
        offsets=np.arange(0, n + 1, 60, dtype=np.int64),
    )
    predictor = PREDICTORS.get(name)().fit(data)
    assert isinstance(predictor, Reuse)
    times = []
    for i, (rows, before, after) in enumerate(walk(data, 1)):
        context = Context(geometry=geometry, layer=layers - 1, chosen=data.flat[rows], past=before)
        start = time.perf_counter()
        predictor.wait(context, after)
        times.append(time.perf_counter() - start)
        if i >= repeats:
            break
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mmlu", type=Path)
    parser.add_argument("--predictors", default=DEFAULT)
    parser.add_argument("--ecr", default="0.125,0.25,0.5")
    parser.add_argument(
        "--keep", type=Path, help="folder to keep fitted predictors in, and to take them from"
    )
    parser.add_argument("--no-cost", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trace = IMPORTERS.get("gpt-oss-npz")(args.mmlu, ImportOptions()).validate(str(args.mmlu))
    assert isinstance(trace, Trace)
    split = split_by_sequence(trace)
    fit_on, test = to_routing(trace.select(split.train)), to_routing(trace.select(split.test))
    print(f"fitted on {len(fit_on)} tokens of {fit_on.sequences} sequences")
    print(f"replayed {len(test)} tokens of {test.sequences} others")
    names = args.predictors.split(",")
    waits = {name: score_waits(fitted(name, fit_on, args.keep), test, np.float16) for name in names}
    result: dict[str, Any] = {"pools": {}, "milliseconds_48x128": {}}
    for ecr in map(float, args.ecr.split(",")):
        slots = round(ecr * test.geometry.total)
        rates = {rule: replay(test, slots, rule).hit_rate for rule in ("lru", "lfu", "optimum")}
        gap = rates["optimum"] - rates["lru"]
        print(f"ECR {ecr:.1%} ({slots} slots): " + "  ".join(f"{r} {v:.4f}" for r, v in rates.items()))
        for name in names:
            rates[name] = replay(test, slots, "forecast", waits[name]).hit_rate
            print(
                f"  {name:16} {rates[name]:.4f}  closes {(rates[name] - rates['lru']) / gap:.1%}", flush=True
            )
        result["pools"][str(ecr)] = rates
    for name in names if not args.no_cost else ():
        result["milliseconds_48x128"][name] = cost(name)
        print(f"{name:16} {result['milliseconds_48x128'][name]:.2f} ms for all experts of 48 x 128")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
