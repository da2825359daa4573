"""Does a run stay within the memory that it announced?

    python benchmarks/peak_memory.py MODEL [--ecr 0.1 0.25 0.5] [--policy lru static] [--tokens 32]

Every case runs in a process of its own: the process's memory once torch and transformers are imported is
the base; announced is base + experts + non-experts + KV cache + workspace of the plan. The peak is the
kernel's own high-water mark. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

CASE = """
import json, resource, sys
import torch, transformers, transformers.models.auto.modeling_auto
import daop, daop.api
def now():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}
model, policy, ecr, tokens = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
torch.zeros(256, 256) @ torch.zeros(256, 256)
base = now()["VmRSS"]
with daop.load(model, policy=policy, ecr=ecr, direct_io=True) as runtime:
    runtime.generate([list(range(5, 5 + 256))], tokens)
    plan = runtime.plan
    print(json.dumps({"base": base, "peak": now()["VmHWM"], "experts": plan.experts,
        "non_experts": plan.non_experts, "kv_cache": plan.kv_cache, "workspace": plan.workspace}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ecr", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--policy", nargs="+", default=["static", "lru"])
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    rows = []
    print(f"{'policy':>10} {'ecr':>6} {'announced MiB':>14} {'peak MiB':>10} {'peak/announced':>15}")
    for ecr in args.ecr:
        for policy in args.policy:
            command = [sys.executable, "-c", CASE, args.model, policy, str(ecr), str(args.tokens)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            figures = json.loads(out.strip().splitlines()[-1])
            announced = sum(
                figures[key] for key in ("base", "experts", "non_experts", "kv_cache", "workspace")
            )
            rows.append({"policy": policy, "ecr": ecr, "announced": announced, **figures})
            print(
                f"{policy:>10} {ecr:>6} {announced / 2**20:>14.0f} {figures['peak'] / 2**20:>10.0f} "
                f"{figures['peak'] / announced:>15.3f}",
                flush=True,
            )
    print(json.dumps({"benchmark": "peak_memory", "rows": rows}))


if __name__ == "__main__":
    main()
