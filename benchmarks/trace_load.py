"""How long a trace of 100,000 tokens x 24 layers x top-4 takes to load, and how much memory.

    python benchmarks/trace_load.py [--tokens 100000] [--layers 24] [--experts 32] [--top-k 4]

Aim: under 2 s and under 500 MB. The trace is made up (uniform choices, the worst case for
compression); each load is a fresh process, so its peak memory includes Python, numpy and pyarrow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from daop.core import Geometry
from daop.training.trace import DECODE, Trace
from daop.training.writer import write_trace

LOAD = """
import re, sys, time
start = time.perf_counter()
from daop.training.parquet import read_trace
trace = read_trace(sys.argv[1])
seconds = time.perf_counter() - start
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)
print(seconds, time.process_time(), int(peak) * 1024, len(trace))
"""


def made_up(tokens: int, layers: int, experts: int, top_k: int) -> Trace:
    rng = np.random.default_rng(0)
    ids = np.stack(
        [np.argsort(rng.random((tokens, experts), np.float32), axis=1)[:, :top_k] for _ in range(layers)], 1
    )
    return Trace(
        geometry=Geometry.uniform(layers, experts, top_k),
        sequence=np.arange(tokens, dtype=np.int32) // 250,
        position=np.arange(tokens, dtype=np.int32) % 250,
        phase=np.full(tokens, DECODE, np.uint8),
        ids=ids.astype(np.uint16),
        weights=rng.random(ids.shape, np.float32).astype(np.float16),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 100_000), ("layers", 24), ("experts", 32), ("top-k", 4), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write_trace(made_up(args.tokens, args.layers, args.experts, args.top_k), path)
        runs = []
        for _ in range(args.repeats):
            done = subprocess.run(
                [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True
            )
            seconds, cpu, peak, rows = done.stdout.split()
            assert int(rows) == args.tokens
            runs.append((float(seconds), float(cpu), int(peak)))
        result = {
            "tokens": args.tokens,
            "layers": args.layers,
            "top_k": args.top_k,
            "file_mb": path.stat().st_size / 1e6,
            "seconds_median": statistics.median(s for s, _, _ in runs),
            "seconds_worst": max(s for s, _, _ in runs),
            "cpu_seconds_median": statistics.median(c for _, c, _ in runs),
            "peak_mb": max(p for _, _, p in runs) / 1e6,
        }
    print(f"file {result['file_mb']:.1f} MB, with router weights; {args.repeats} fresh processes")
    print(f"load {result['seconds_median']:.2f} s median, {result['seconds_worst']:.2f} s worst")
    print(
        f"     of which {result['cpu_seconds_median']:.2f} s of one core: more is waiting for other programs"
    )
    print(f"peak {result['peak_mb']:.0f} MB, Python and libraries included")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
