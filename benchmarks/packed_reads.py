"""Are packed experts read at the disk's own bandwidth?

    python benchmarks/packed_reads.py MODEL PACKED [--repeats 5] [--mib 512]

MODEL is any checkpoint, PACKED what `daop pack` made of it. In every repeat, one after the other, past the
page cache and in random order: the disk alone (threads that read whole chunks of the packed files at
multiples of 4096, and nothing else), daop's reading threads on PACKED as in all reads of an expert but the
first, and with its checksum compared as in that one, and on MODEL. Prints a table and, last, a line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from disk_share import THREADS, disk_bandwidth

from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.transfers import CHUNK


def bare_bandwidth(checkpoint: Checkpoint, total_bytes: int, seed: int) -> float:
    """Bytes per second of chunks of the files that hold experts, read by threads into one buffer each."""
    files = sorted({checkpoint.ranges(flat)[0].file for flat in range(checkpoint.geometry.total)})
    handles = [os.open(checkpoint.files[file], os.O_RDONLY | os.O_DIRECT) for file in files]
    sizes = [checkpoint.files[file].stat().st_size // CHUNK for file in files]
    count = total_bytes // CHUNK // THREADS

    def read(thread: int) -> int:
        rng, buffer, got = random.Random(seed * THREADS + thread), mmap.mmap(-1, CHUNK), 0
        for _ in range(count):
            file = rng.randrange(len(handles))
            got += os.preadv(handles[file], [buffer], rng.randrange(sizes[file]) * CHUNK)
        return got

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            began = time.perf_counter()
            read_bytes = sum(pool.map(read, range(THREADS)))
            return read_bytes / (time.perf_counter() - began)
    finally:
        for handle in handles:
            os.close(handle)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model")
    parser.add_argument("packed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="read in each measurement")
    options = parser.parse_args()
    plain, packed = open_checkpoint(options.model), open_checkpoint(options.packed)
    ways: dict[str, Callable[[int, int], float]] = {
        "the disk alone": partial(bare_bandwidth, packed),
        "packed": partial(disk_bandwidth, dataclasses.replace(packed, pack=None)),
        "packed, first": partial(disk_bandwidth, packed),
        "as published": partial(disk_bandwidth, plain),
    }
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats):
        for name, run in ways.items():
            figures[name].append(run(options.mib << 20, repeat) / 1e9)
    shares = {
        name: [got / bare for got, bare in zip(values, figures["the disk alone"], strict=True)]
        for name, values in figures.items()
    }
    print(
        f"{THREADS} threads, chunks of {CHUNK >> 10} KiB, {options.mib} MiB each, {options.repeats} repeats"
    )
    for name, values in figures.items():
        share = shares[name]
        print(
            f"{name:16} {statistics.median(values):6.2f} GB/s, {statistics.median(share):5.0%} of the disk's "
            f"own ({min(share):.0%} .. {max(share):.0%})"
        )
    print(json.dumps({"benchmark": "packed_reads", "gb_per_s": figures, "share": shares}))


if __name__ == "__main__":
    main()
