"""How many layer-steps the simulator does per second of one core, and how that grows with the trace.

    python benchmarks/simulator_speed.py mmlu.npz [--policy lru] [--tokens 2000,8000,32000]

A layer-step is one MoE layer of one forward pass: router known, placed, moved, computed, counted.
Processor time, so that other work on the machine counts little. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from compare_gpt_oss import GEOMETRY, read

from daop.comparison import traffic_of
from daop.hardware import load
from daop.runtime.costs import HardwareCosts
from daop.runtime.policies.base import make_policy
from daop.runtime.simulator import Simulator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--ecr", type=float, default=0.25)
    parser.add_argument("--tokens", default="2000,8000,32000")
    options = parser.parse_args()
    whole = traffic_of(read(options.trace), GEOMETRY)
    costs = HardwareCosts(load("rtx4090").hardware, GEOMETRY, weight_bits=4.25)
    slots = round(GEOMETRY.total * options.ecr)
    rows = []
    print(f"{'tokens':>8}{'layer-steps':>13}{'seconds':>9}{'layer-steps/s':>15}   {options.policy}")
    for text in options.tokens.split(","):
        traffic = whole.head(int(text))
        steps = len(traffic.ids) * GEOMETRY.layers
        began = time.process_time()
        Simulator(make_policy(options.policy), GEOMETRY, costs, slots).run(traffic)
        took = time.process_time() - began
        rows.append({"tokens": len(traffic.ids), "seconds": took, "layer_steps_per_second": steps / took})
        print(f"{len(traffic.ids):8}{steps:13}{took:9.2f}{steps / took:15.0f}", flush=True)
    print(json.dumps({"benchmark": "simulator_speed", "policy": options.policy, "rows": rows}))


if __name__ == "__main__":
    main()
