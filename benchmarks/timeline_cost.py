"""What does the timeline cost a run?

    python benchmarks/timeline_cost.py MODEL [--tokens 24] [--pairs 40] [--ecr 1.0,0.5] [--policy adaptive]

One runtime generates the same text over and over, by turns with and without the recorder; the order within
a pair alternates. The ratio is that of the pairs' decode times: median, and an interval of the median by
resampling the pairs. With all experts resident (ECR 1) a layer is shortest and the recorder's share largest.
Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from daop.api import load
from daop.runtime.machinery import HostMachinery
from daop.runtime.timeline import Timeline


def measure(model: str, policy: str, ecr: float, tokens: int, pairs: int) -> dict[str, Any]:
    timeline = Timeline()
    with load(model, ecr=ecr, policy=policy, watchers=[timeline]) as runtime:
        machinery = runtime._machinery
        assert isinstance(machinery, HostMachinery)
        conductor, transfers = machinery.executor.conductor, machinery.transfers
        watchers = conductor.watchers
        span = transfers.span
        prompt = list(range(5, 37))

        def seconds(recorded: bool) -> float:
            conductor.watchers = watchers if recorded else ()
            transfers.span = span if recorded else None
            return float(np.median(runtime.generate([prompt], tokens)[0].tpot_s))

        for _ in range(4):
            seconds(recorded=False)
        found = []
        for pair in range(pairs):
            first = pair % 2 == 0
            times = {first: seconds(recorded=first)}
            times[not first] = seconds(recorded=not first)
            found.append((times[False], times[True]))
        events = len(timeline)
    plain, recorded = np.asarray(found).T
    ratios = recorded / plain
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {
        "ecr": ecr,
        "policy": policy,
        "ms_per_token": float(np.median(plain)) * 1e3,
        "ratio": float(np.median(ratios)),
        "interval": [float(low), float(high)],
        "events_per_token": events / (pairs * tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--ecr", default="1.0,0.5")
    parser.add_argument("--policy", default="adaptive")
    args = parser.parse_args()
    rows = []
    print(f"{'ECR':>5} {'ms/token':>9} {'events/token':>13} {'cost':>7}  95 % interval")
    for share in args.ecr.split(","):
        row = measure(args.model, args.policy, float(share), args.tokens, args.pairs)
        rows.append(row)
        low, high = row["interval"]
        print(
            f"{row['ecr']:>5g} {row['ms_per_token']:>9.3f} {row['events_per_token']:>13.1f} "
            f"{row['ratio'] - 1:>+7.2%}  {low - 1:+.2%} to {high - 1:+.2%}",
            flush=True,
        )
    conditions = {"model": args.model, "tokens": args.tokens, "pairs": args.pairs}
    print(json.dumps({"benchmark": "timeline_cost", **conditions, "rows": rows}))


if __name__ == "__main__":
    main()
