"""How long ``import daop`` and ``daop --help`` take, each in a fresh process.

    python benchmarks/import_time.py [--repeat 9]

Prints the median and the spread; bounds: 0.3 s and 1 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import daop": ([sys.executable, "-c", "import daop"], 0.3),
    "daop --help": ([sys.executable, "-m", "daop.cli.main", "--help"], 1.0),
    "python alone": ([sys.executable, "-c", "pass"], None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    repeat = parser.parse_args().repeat
    result: dict[str, dict[str, float]] = {}
    within = True
    for name, (command, bound) in COMMANDS.items():
        times = []
        for _ in range(repeat + 1):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        times = sorted(times[1:])  # the first one warms the page cache
        median = statistics.median(times)
        within &= bound is None or median < bound
        limit = f"bound {bound} s" if bound is not None else ""
        print(f"{name:14} {median:6.3f} s   ({times[0]:.3f} .. {times[-1]:.3f}, {repeat} runs)   {limit}")
        result[name] = {"median_s": median, "min_s": times[0], "max_s": times[-1]}
    print(json.dumps({"benchmark": "import_time", "within_bounds": within, **result}))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
