"""Does an LRU replay of BigMoeOnEdge's traces agree with the cache hits its engine recorded?

    python benchmarks/edge_replay.py qwen.route.csv 4000 [gptoss.route.csv 3000 ...]

Takes route trace files of github.com/Helldez/BigMoeOnEdge and the cache budget of each run in MiB. One LRU
pool over all layers, counted in bytes; a prompt is one forward pass that reads each expert of a layer once.
Aim: the hit rate of decode within 0.2 points of the recorded one.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from daop.training.importers.base import ImportOptions
from daop.training.importers.big_moe_on_edge import big_moe_on_edge
from daop.training.trace import DECODE, Trace


class BytePool:
    """LRU over experts of different sizes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._held: OrderedDict[int, int] = OrderedDict()

    def touch(self, flat: int, size: int) -> bool:
        if flat in self._held:
            self._held.move_to_end(flat)
            return True
        while self._held and self.used + size > self.budget:
            self.used -= self._held.popitem(last=False)[1]
        self._held[flat] = size
        self.used += size
        return False


def replay(trace: Trace, budget: int) -> dict[str, Any]:
    """Decode hit rates, ours and recorded; and ours with prefill included, as the engine prints it."""
    assert trace.forward is not None
    assert trace.hits is not None
    pool, size = BytePool(budget), trace.geometry.bytes_of
    hits = lookups = prefill = same = 0
    for forward in range(int(trace.forward.max()) + 1):
        rows = np.flatnonzero(trace.forward == forward)
        decode = trace.phase[rows[0]] == DECODE
        for layer in range(trace.geometry.layers):
            chosen, recorded = trace.flat[rows, layer].ravel(), trace.hits[rows, layer].ravel()
            seen: set[int] = set()
            for flat, was_hit in zip(chosen.tolist(), recorded.tolist(), strict=True):
                if flat < 0 or (not decode and flat in seen):
                    continue
                seen.add(flat)
                hit = pool.touch(flat, int(size[flat]))
                if decode:
                    hits, lookups, same = hits + hit, lookups + 1, same + (hit == was_hit)
                else:
                    prefill += 1
    recorded_rate = float(trace.hits[trace.phase == DECODE][trace.flat[trace.phase == DECODE] >= 0].mean())
    return {
        "replayed": hits / lookups,
        "recorded": recorded_rate,
        "points_apart": 100 * abs(hits / lookups - recorded_rate),
        "same_answer": same / lookups,
        "with_prefill": hits / (lookups + prefill),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="trace file and budget in MiB, in turn")
    runs = parser.parse_args().runs
    result = {}
    for name, budget in zip(runs[::2], runs[1::2], strict=True):
        trace = big_moe_on_edge(Path(name), ImportOptions()).validate(name)
        assert isinstance(trace, Trace)
        found = result[Path(name).stem] = replay(trace, int(budget) << 20)
        print(
            f"{name}: decode hits {found['replayed']:.2%} replayed, {found['recorded']:.2%} recorded, "
            f"{found['points_apart']:.2f} points apart; {found['same_answer']:.2%} of lookups alike; "
            f"prefill included {found['with_prefill']:.1%}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
