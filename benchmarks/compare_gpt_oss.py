"""Every exact policy on recorded gpt-oss-20b traffic, four consumer machines, three budgets, simulated.

    python benchmarks/compare_gpt_oss.py mmlu.npz [--sequences 6] [--profile DIR] [--policies ...]

``mmlu.npz`` holds ``ids`` u8[tokens, 24, 4] and ``offsets`` i32[sequences + 1] (the recorded traces of
github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, Apache-2.0). A fifth of the sequences is held
out by the seeded split of ``daop.training.split``; profile and context model are fitted on the rest, and
``--sequences`` of the held-out ones, evenly spread, are replayed at batch 1. MXFP4 experts of 13.2 MB.
``--foretold`` adds a row out of reach: ``adaptive`` told the coming token's routing (``foretold.py``).
``--predictor DIR``: ``adaptive`` and the policies that ask for next-layer forecasts run on ``visits``, fitted
on the same part (or found in that folder); a row ``adaptive_context`` is ``adaptive`` without it.
With ``--tune`` the replayed ones come from the fitted part's own fifth, which is left out of the fit.

Prints a table per machine and budget, then what must be reached, and last one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import foretold
import numpy as np

from daop.comparison import (
    BOUND,
    STATIC,
    Setting,
    budget_of,
    learn_profile,
    policies_of,
    simulate,
    simulate_one,
    traffic_of,
)
from daop.core import Geometry
from daop.hardware import load
from daop.predictors.artefact import save
from daop.predictors.visits import Visits
from daop.runtime.profile import Profile
from daop.runtime.sim_traffic import Traffic
from daop.taught import open_predictor
from daop.training.dataset import to_routing
from daop.training.split import split_by_sequence
from daop.training.trace import DECODE, Trace

GEOMETRY = Geometry.uniform(24, 32, 4, 13_200_000, fingerprint="gpt-oss-20b")
MACHINES = ("rtx4090", "rtx5090", "rtx5090-threadripper", "rtx5060ti")
SHARES = (0.125, 0.25, 0.375)
BEFORE = "adaptive_context"


def read(path: Path) -> Trace:
    with np.load(path, allow_pickle=False) as data:
        ids, offsets = data["ids"].astype(np.uint16), data["offsets"]
    lengths = np.diff(offsets)
    return Trace(
        geometry=GEOMETRY,
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        phase=np.full(len(ids), DECODE, dtype=np.uint8),
        ids=ids,
    )


def prepare(
    trace: Trace, sequences: int, folder: Path | None, tune: bool, predictor: Path | None
) -> tuple[Profile, Traffic]:
    """The profile of the fitted part, and the traffic to replay."""
    split = split_by_sequence(trace)
    fitted, scored = trace.select(split.train), trace.select(split.test)
    if tune:
        inner = split_by_sequence(fitted, seed=1)
        fitted, scored = fitted.select(inner.train), fitted.select(inner.test)
    pick = scored.sequences[np.linspace(0, len(scored.sequences) - 1, sequences).round().astype(int)]
    traffic = traffic_of(scored.select(pick), GEOMETRY)
    if folder is not None and (folder / "profile.json").exists():
        profile = Profile.load(folder, GEOMETRY)
    else:
        profile = learn_profile(fitted, GEOMETRY)
        if folder is not None:
            profile.save(folder)
    if predictor is not None:
        if not (predictor / "predictor.json").exists():
            save(Visits().fit(to_routing(fitted)), predictor)
        profile = replace(profile, predictor=open_predictor(predictor, GEOMETRY))
    return profile, traffic


def without_predictor(
    traffic: Traffic, profile: Profile, setting: Setting, other: dict[str, Any]
) -> dict[str, Any]:
    """``adaptive`` on its context model; ratios by another row of the same cell."""
    row = simulate_one(traffic, replace(profile, predictor=None), setting, "adaptive")
    faster = row["tokens_per_second"] / other["tokens_per_second"]
    ratios = {name: other[name] * faster for name in ("ratio_to_best_static", "ratio_to_optimum")}
    return {**row, **ratios, "policy": BEFORE}


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the cells say about ``adaptive``."""
    cells: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["hardware"], row["ecr"]), {})[row["policy"]] = row["tokens_per_second"]
    to_static, to_balanced, gap, ahead, told, before = [], [], [], [], [], []
    for cell in cells.values():
        mine, bound = cell["adaptive"], cell[BOUND]
        other = max(
            speed for name, speed in cell.items() if name not in ("adaptive", BEFORE, foretold.NAME, BOUND)
        )
        to_static.append(mine / max(cell[name] for name in STATIC))
        to_balanced.append(mine / cell["balanced"])
        gap.append((mine - other) / (bound - other))
        ahead.append(mine > other)
        if BEFORE in cell:
            before.append((cell[BEFORE] - other) / (bound - other))
        if foretold.NAME in cell:
            told.append((cell[foretold.NAME] - other) / (bound - other))
    return {
        "cells": len(cells),
        "geomean_to_best_static": float(np.exp(np.mean(np.log(to_static)))),
        "geomean_to_balanced": float(np.exp(np.mean(np.log(to_balanced)))),
        "ahead_in_every_cell": all(ahead),
        "gap_closed_min": min(gap),
        "gap_closed_mean": float(np.mean(gap)),
        "gaps_closed_by_40_percent": sum(share >= 0.4 for share in gap),
        **(
            {"context_gap_closed_min": min(before), "context_gap_closed_mean": float(np.mean(before))}
            if before
            else {}
        ),
        **(
            {"foretold_gap_closed_min": min(told), "foretold_gap_closed_mean": float(np.mean(told))}
            if told
            else {}
        ),
    }


def line(row: dict[str, Any]) -> str:
    stall = sum(row["stall_ms"].values()) / row["tokens"]
    return (
        f"  {row['policy']:20}{row['tokens_per_second']:8.1f} tokens/s"
        f"{row['ratio_to_best_static']:7.2f} x static{row['ratio_to_optimum']:6.2f} of optimum"
        f"   hits {row['hit_rate']:.3f}   stall {stall:6.2f} ms/token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--profile", type=Path, help="read the fitted profile here, or save it here")
    parser.add_argument("--predictor", type=Path, help="run on visits: read it here, or fit and save it here")
    parser.add_argument("--policies", default="all")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--foretold", action="store_true")
    parser.add_argument("--rows", type=Path, help="append each cell's rows here as they are done")
    options = parser.parse_args()
    trace = read(options.trace)
    profile, traffic = prepare(trace, options.sequences, options.profile, options.tune, options.predictor)
    extra = [foretold.register()] if options.foretold else []
    names = list(dict.fromkeys([*policies_of(options.policies), *STATIC, BOUND, *extra]))
    print(f"{len(traffic.ids)} tokens of {options.sequences} sequences, batch 1, experts of 13.2 MB")
    rows: list[dict[str, Any]] = []
    for machine in options.machines.split(","):
        for share in SHARES:
            began = time.process_time()
            setting = Setting(hardware=load(machine), ecr=share, weight_bits=4.25)
            cell = simulate(traffic, profile, setting, names)
            if options.predictor is not None:
                cell.append(without_predictor(traffic, profile, setting, cell[0]))
            rows += cell
            slots = budget_of(GEOMETRY, share)
            print(f"\n{machine}, ECR {share:g} ({slots} slots), {time.process_time() - began:.0f} s of CPU")
            for row in sorted(cell, key=lambda row: -float(row["tokens_per_second"])):
                print(line(row), flush=True)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in cell)
    found = verdict(rows) if "adaptive" in names and "balanced" in names else {}
    for key, value in found.items():
        print(f"{key:26}{value:.3f}" if isinstance(value, float) else f"{key:26}{value}")
    keep = (
        "policy",
        "hardware",
        "ecr",
        "tokens_per_second",
        "hit_rate",
        "ratio_to_best_static",
        "ratio_to_optimum",
    )
    print(
        json.dumps(
            {
                "benchmark": "compare_gpt_oss",
                "tokens": len(traffic.ids),
                "tuned_on_scored": options.tune,
                **found,
                "rows": [{key: row[key] for key in keep} for row in rows],
            }
        )
    )


if __name__ == "__main__":
    main()
