"""Agreement: the executor on the device host, and the simulator on the trace that it recorded.

    python benchmarks/agreement.py MODEL --prompts FILE [--ecr 0.25] [--policy on_demand static lru ...]
        [--profile DIR] [--count 2] [--tokens 24] [--repeats 3] [--no-direct-io]

The machine is calibrated once; every run is simulated with that ("calib.") and with a disk as fast as the
run's own reads were ("simulated", see ``daop.agreement``). Policies take turns in every repeat. Prints
tokens/s of decode and hits side by side; the verdict on a policy is the median of its ratios over the
repeats: within 15 % or not. Hits must be equal for policies that look at no clock. Exit code 1 if one of
either is not. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from transformers.utils import logging

from daop.agreement import CLOCKLESS, Comparison, run_and_replay
from daop.prompts import read_prompts
from daop.runtime.calibrate import calibrate_host
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.profile import Profile

LIMIT = 0.15


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--ecr", type=float, nargs="+", default=[0.25])
    parser.add_argument("--policy", nargs="+", default=["on_demand", "static", "lru", "lfu", "adaptive"])
    parser.add_argument("--count", type=int, default=2, help="prompts of each run")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of calibrating")
    parser.add_argument("--no-direct-io", action="store_true", help="through the page cache")
    options: argparse.Namespace = parser.parse_args()
    return options


def main() -> int:
    options = parse()
    logging.disable_progress_bar()
    direct = not options.no_direct_io
    checkpoint = open_checkpoint(options.model)
    asked = read_prompts(options.prompts, options.count)
    profile = None if options.profile is None else Profile.load(options.profile, checkpoint.geometry)
    calibration = calibrate_host(checkpoint, direct_io=direct, seconds=options.seconds)
    for name, source in calibration.sources.items():
        print(f"{name:22}{getattr(calibration.hardware, name):<10g}{source}")
    print(
        f"\n{'policy':18}{'ECR':>6}{'GB/s':>7}{'tok/s':>9}{'simulated':>10}{'ratio':>7}{'calib.':>8}", end=""
    )
    print(f"{'TTFT ms':>9}{'simulated':>10}{'hits':>7}{'simulated':>10}")
    found: dict[tuple[str, float], list[Comparison]] = defaultdict(list)
    for _ in range(options.repeats):
        for ecr in options.ecr:
            for policy in options.policy:
                one = run_and_replay(
                    options.model, asked, policy, ecr, calibration, profile=profile,
                    max_new_tokens=options.tokens, direct_io=direct,
                )  # fmt: skip
                found[policy, ecr].append(one)
                show(one)
    verdicts = []
    print(f"\n{'policy':18}{'ECR':>6}  ratio of tokens/s, median (range)   hits equal")
    for (policy, ecr), ones in found.items():
        ratios = sorted(one.ratio for one in ones)
        middle, equal = statistics.median(ratios), all(one.same_hits for one in ones)
        fine = abs(middle - 1) <= LIMIT and (equal or policy not in CLOCKLESS)
        verdicts.append(
            {"policy": policy, "ecr": ecr, "ratio": middle, "ratios": ratios, "hits_equal": equal}
        )
        verdicts[-1]["fine"] = fine
        print(f"{policy:18}{ecr:6g}  {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", end="")
        print(f"   {'yes' if equal else 'no'}{'' if policy in CLOCKLESS else ' (need not be)'}", end="")
        print("" if fine else "   NOT WITHIN THE LIMITS")
    print(json.dumps({"benchmark": "agreement", "limit": LIMIT, "rows": verdicts}))
    return 0 if all(row["fine"] for row in verdicts) else 1


def show(one: Comparison) -> None:
    real, simulated = one.measured, one.simulated
    print(f"{one.policy:18}{one.ecr:6g}{one.link_gbs:7.2f}", end="")
    print(f"{real['tokens_per_second']:9.2f}{simulated['tokens_per_second']:10.2f}{one.ratio:7.3f}", end="")
    print(f"{one.ratio_with_calibration:8.3f}", end="")
    print(f"{real['ttft_ms']:9.0f}{simulated['ttft_ms']:10.0f}", end="")
    print(f"{real['requests']['hits']:7}{simulated['requests']['hits']:10}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
