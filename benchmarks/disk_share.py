"""Experts on disk: what share of the disk's own bandwidth does decode turn into progress?

    python benchmarks/disk_share.py MODEL --prompts FILE [--ecr 0.25] [--policy on_demand lru] [--repeats 3]

For every repeat, one after the other: the disk alone (the same files, the same threads and chunks, whole
experts in random order, past the page cache), then decode with direct reads under each policy. Bound:
tokens/s if the bytes that were missed had come at the disk's bandwidth and everything else had cost
nothing. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from daop.api import load
from daop.prompts import encode, read_prompts
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.files import FileReader
from daop.runtime.slots import SlotMemory
from daop.runtime.transfers import CHUNK, FileTransfers

THREADS = 8
DEPTH = 8  # experts in flight in the bare measurement


def disk_bandwidth(checkpoint: Checkpoint, total_bytes: int, seed: int) -> float:
    """Bytes per second of whole experts in random order, nothing being computed."""
    memory = SlotMemory(checkpoint.layouts, [0] * len(set(checkpoint.layouts)), DEPTH)
    reader = FileReader(checkpoint.files, direct_io=True, largest=CHUNK)
    pool = FileTransfers(checkpoint, memory, reader, threads=THREADS)
    order = random.Random(seed).choices(range(checkpoint.geometry.total), k=10_000)
    began = time.perf_counter()
    waiting = {pool.stream(order.pop(), slot): slot for slot in range(DEPTH)}
    while waiting and pool.bytes_read < total_bytes:
        for ticket in pool.wait_any(waiting):
            slot = waiting.pop(ticket)
            waiting[pool.stream(order.pop(), slot)] = slot
    seconds = time.perf_counter() - began
    read = pool.bytes_read
    pool.wait_idle()
    pool.close()
    reader.close()
    return read / seconds


def decode(
    model: str, policy: str, ecr: float, prompts: Path, count: int, tokens: int
) -> tuple[float, float]:
    """Decode seconds per token and bytes read per decoded token; prefill is left out of both."""
    with load(model, policy=policy, ecr=ecr, direct_io=True) as runtime:
        asked = [
            encode(prompt.messages, runtime.tokenizer, prompt.source)
            for prompt in read_prompts(prompts, count)
        ]
        runtime.generate([asked[0]], 4)  # warm the hot set and the kernels
        marks: list[int] = []  # bytes read after every forward pass; the first of each prompt is its prefill
        runtime.model.register_forward_hook(lambda *_: marks.append(runtime.statistics()["bytes"]["read"]))
        seconds, steps, read = 0.0, 0, 0
        for ids in asked:
            marks.clear()
            answer = runtime.generate([ids], tokens)[0]
            seconds += sum(answer.tpot_s)
            steps += len(answer.tpot_s)
            read += marks[-1] - marks[0]
    return seconds / steps, read / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--ecr", type=float, default=0.25)
    parser.add_argument("--policy", nargs="+", default=["on_demand", "static", "lru"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--count", type=int, default=3, help="prompts per measurement")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    rows: dict[str, list[tuple[float, float, float]]] = {policy: [] for policy in args.policy}
    for repeat in range(args.repeats):
        for policy in args.policy:
            disk = disk_bandwidth(checkpoint, 512 << 20, repeat)
            seconds, read = decode(args.model, policy, args.ecr, args.prompts, args.count, args.tokens)
            bound = read / disk
            rows[policy].append((disk, seconds, bound / seconds))
            print(
                f"repeat {repeat} {policy:>12}: disk {disk / 1e9:.2f} GB/s, {1 / seconds:6.2f} tokens/s, "
                f"{read / 1e6:7.1f} MB missed per token, bound {1 / bound if bound else float('inf'):6.2f} "
                f"tokens/s, reached {bound / seconds:.0%}",
                flush=True,
            )
    result = {
        policy: {
            "disk_gb_per_s": statistics.median(row[0] for row in found) / 1e9,
            "tokens_per_second": 1 / statistics.median(row[1] for row in found),
            "share_of_disk_bound": statistics.median(row[2] for row in found),
            "spread": [min(row[2] for row in found), max(row[2] for row in found)],
        }
        for policy, found in rows.items()
    }
    print(json.dumps({"benchmark": "disk_share", "ecr": args.ecr, "threads": THREADS, "rows": result}))


if __name__ == "__main__":
    main()
