"""What does recording the routing cost a run?

    python benchmarks/capture_cost.py MODEL [--tokens 64] [--repeats 7] [--ecr 1.0]

Runs the same prompt with and without a trace being recorded, in turns within one process; decode time per
token, medians and spread. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from daop.api import load


def milliseconds(model: str, ecr: float, tokens: int, trace: Path | None) -> float:
    """Median decode time of a token in a fresh runtime, after a warm-up."""
    with load(model, ecr=ecr, policy="lru", trace=trace) as runtime:
        prompt = list(range(5, 37))
        runtime.generate([prompt], 8)
        return statistics.median(runtime.generate([prompt], tokens)[0].tpot_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ecr", type=float, default=1.0)
    args = parser.parse_args()
    plain: list[float] = []
    recorded: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            plain.append(milliseconds(args.model, args.ecr, args.tokens, None))
            path = Path(folder) / f"{repeat}.parquet"
            recorded.append(milliseconds(args.model, args.ecr, args.tokens, path))
            print(f"repeat {repeat}: {plain[-1]:.3f} ms without, {recorded[-1]:.3f} ms with", flush=True)
    ratios = [b / a for a, b in zip(plain, recorded, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"recording costs {ratio - 1:+.1%} of decode time ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"
    )
    print(
        json.dumps(
            {
                "benchmark": "capture_cost",
                "ms_per_token": statistics.median(plain),
                "ms_per_token_recorded": statistics.median(recorded),
                "ratio": ratio,
                "spread": [min(ratios), max(ratios)],
            }
        )
    )


if __name__ == "__main__":
    main()
