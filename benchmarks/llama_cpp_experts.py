"""Experts alone: daop's kernels and llama.cpp's on equal weights, as shares of the memory's bandwidth.

    python benchmarks/llama_cpp_experts.py [--shape 2048x1024:8/64] [--tokens 1 4 16]
                                           [--format bf16 int8 int4 mxfp4] [--repeats 5] [--threads 2]

One layer's chosen experts (hidden x intermediate : chosen / experts) for so many tokens each. llama.cpp's
side is the graph of its own MoE layers (mul_mat_id for gate, up and down, swiglu, router weights, sum) on
the ggml that its Python bindings bring, with repacked weights where it repacks that type. The two run in
processes that take turns; each turn is a few calls on other experts each time, their median counts, and
daop's turn also reads as many bytes and does nothing else. Shares and ratios are formed within each repeat.
Before anything is timed, both results are compared with one in float32 from decoded weights. Prints a table
and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from llama_cpp_common import GGML_NAMES, GGML_TYPES, Side, bindings, expert_blocks
from numpy.typing import NDArray
from torch.nn import functional

from daop.runtime.codecs.base import SCALE, Codec
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.host_compute import HostExperts
from daop.runtime.layout import ExpertForm, ExpertLayout
from daop.runtime.native import load_kernels
from daop.runtime.slots import Slab

CALLS = 7  # of one turn
TOLERANCE = 0.02  # of the result's norm: activations are rounded to 8 bits
HEAD = (
    "format        shape           tokens  read GB/s  daop ms  ggml ms  of bandwidth: daop, ggml "
    "         x ggml    errors: daop, ggml"
)
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Task:
    """What is computed; ``seed`` makes the same weights in every process."""

    hidden: int
    inner: int
    chosen: int
    count: int
    format: str
    seed: int = 0

    @property
    def codec(self) -> Codec:
        coded: dict[str, Codec] = {"int8": Integers(8, 64), "int4": Integers(4, 32), "mxfp4": Mxfp4()}
        return coded.get(self.format, PLAIN)

    def slab(self) -> Slab:
        """Random experts."""
        parts = []
        for role, rows, columns in (
            ("gate_up", 2 * self.inner, self.hidden),
            ("down", self.hidden, self.inner),
        ):
            for suffix, piece in self.codec.pieces(rows, columns).items():
                parts.append((role + suffix, piece.shape, piece.dtypes[0] if self.codec.by_rows else "BF16"))
        slab = Slab(ExpertLayout.pack(parts, self.codec), self.count)
        generator = torch.Generator().manual_seed(self.seed)
        size = max(part.nbytes for part in slab.layout.parts) + self.count * 1024
        bytes_ = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        floats = (torch.randn(size, generator=generator) * self.hidden**-0.5).bfloat16()
        for expert, slot in enumerate(slab.tensor):
            for role, view in slab.layout.views(slot).items():
                first, last = expert * 1024, expert * 1024 + view.numel()
                if role.endswith(SCALE):
                    low = bytes_[first:last].view(view.shape) & 3
                    view.copy_(low + 117 if view.dtype == torch.uint8 else (low.float() + 1) * 2**-13)
                else:
                    noise = floats if view.dtype == torch.bfloat16 else bytes_.view(view.dtype)
                    view.copy_(noise[first:last].view(view.shape))
                    if view.dtype == torch.int8:
                        view.clamp_(min=-127)
        return slab

    def step(self, turn: int, tokens: int) -> tuple[list[int], Floats]:
        """The chosen experts and the hidden states [tokens, hidden], in BF16's values, of a call."""
        generator = torch.Generator().manual_seed(turn)
        experts = torch.randperm(self.count, generator=generator)[: self.chosen].sort().values.tolist()
        x = torch.randn(tokens, self.hidden, generator=generator).bfloat16().float()
        return experts, x.numpy()


class Ours:
    """daop's kernels."""

    def __init__(self, task: Task, threads: int) -> None:
        torch.set_num_threads(threads)
        kernels = load_kernels()
        if kernels is None:
            raise SystemExit(
                "the native kernels are not built; build them with: python -m daop.runtime.native"
            )
        self.kernels, self.task, self.slab = kernels, task, task.slab()
        form = ExpertForm(
            hidden=task.hidden,
            intermediate=task.inner,
            has_gate=True,
            has_bias=False,
            transposed=False,
            interleaved=False,
            activation="silu",
            apply_gate=functional.silu,  # not called: these kernels know the activation
        )
        self.experts = HostExperts(self.slab.layout, form, task.count, kernels=kernels)
        self.said = f"{kernels.variant} kernels"

    def run(self, experts: list[int], x: Floats) -> Floats:
        ids = torch.tensor(experts).expand(len(x), -1)
        weights = torch.full(ids.shape, 1 / len(experts))
        batch = self.experts.begin(torch.from_numpy(x), ids, weights)
        self.experts.run(batch, experts, [self.slab.tensor[expert] for expert in experts])
        return self.experts.total(batch).numpy()

    def read(self, experts: list[int], x: Floats) -> None:
        for expert in experts:
            self.kernels.read(self.slab.tensor[expert])

    def exact(self, experts: list[int], x: Floats) -> Floats:
        """From decoded weights, nothing rounded."""
        out = torch.zeros(x.shape)
        for expert in experts:
            parts, task = self.slab.layout.views(self.slab.tensor[expert]), self.task
            both = task.codec.decode(parts, "gate_up", task.hidden, 0, 2 * task.inner).float()
            down = task.codec.decode(parts, "down", task.inner, 0, task.hidden).float()
            gate, up = functional.linear(torch.from_numpy(x), both).chunk(2, dim=-1)
            out += functional.linear(functional.silu(gate) * up, down) / len(experts)
        return out.numpy()


class Theirs:
    """The graph of a MoE layer on ggml."""

    def __init__(self, task: Task, threads: int) -> None:
        from llama_cpp_ggml import Ggml

        self.ggml = Ggml(threads)
        slab = task.slab()
        blocks = [expert_blocks(task.codec, slab.layout.views(slot)) for slot in slab.tensor]
        widths = {"gate": task.hidden, "up": task.hidden, "down": task.inner}
        self.weights = self.ggml.weights(GGML_TYPES[task.format], widths, blocks)
        self.task = task
        self.layers: dict[int, Any] = {}
        self.said = f"llama.cpp {bindings().__version__}, {self.weights.where}"

    def run(self, experts: list[int], x: Floats) -> Floats:
        if len(x) not in self.layers:
            self.layers[len(x)] = self.ggml.layer(self.weights, len(x), self.task.chosen)
        ids = np.tile(np.array(experts, dtype=np.int32), (len(x), 1))
        result: Floats = self.layers[len(x)](x, ids, np.full(ids.shape, 1 / len(experts), dtype=np.float32))
        return result


KEPT: dict[str, Any] = {}  # of a process: its contender


def begin(kind: type[Ours] | type[Theirs], task: Task, threads: int) -> str:
    KEPT.clear()
    KEPT["side"] = kind(task, threads)
    return str(KEPT["side"].said)


def result(way: str, tokens: int) -> Floats:
    run: Callable[[list[int], Floats], Floats] = getattr(KEPT["side"], way)
    return run(*KEPT["side"].task.step(0, tokens))


def calling(turn: int, threads: int) -> float:
    """Seconds of a call of daop's for one token, experts so small that nothing but the call takes time."""
    if "small" not in KEPT:
        task: Task = KEPT["side"].task
        KEPT["small"] = Ours(replace(task, hidden=64, inner=64), threads)
    return seconds("run", 1, turn, "small")


def seconds(way: str, tokens: int, turn: int, which: str = "side") -> float:
    """Median of a few calls; the first only wakes the threads."""
    side, taken = KEPT[which], []
    run = getattr(side, way)
    for call in range(CALLS + 1):
        experts, x = side.task.step(1 + turn * (CALLS + 1) + call, tokens)
        began = time.perf_counter()
        run(experts, x)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def error(got: Floats, exact: Floats) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def measure(ours: Side, theirs: Side, task: Task, tokens: int, repeats: int) -> dict[str, float]:
    exact = ours.call(result, "exact", tokens)
    errors = {
        name: error(side.call(result, "run", tokens), exact)
        for name, side in (("daop", ours), ("ggml", theirs))
    }
    if max(errors.values()) > TOLERANCE:
        raise SystemExit(f"{task}: not the same experts: errors of the norm {errors}")
    turns = []
    for turn in range(repeats):
        read, mine = ours.call(seconds, "read", tokens, turn), ours.call(seconds, "run", tokens, turn)
        turns.append((read, mine, theirs.call(seconds, "run", tokens, turn)))
    part = task.codec.pieces(task.inner, task.hidden) if task.codec.by_rows else None
    nbytes = task.chosen * (
        sum(_nbytes(piece) for piece in part.values()) * 3 if part else 6 * task.inner * task.hidden
    )
    ratios = [theirs_s / ours_s for _, ours_s, theirs_s in turns]
    return {
        "read_gb_per_s": nbytes / statistics.median(read for read, _, _ in turns) / 1e9,
        "daop_ms": 1e3 * statistics.median(mine for _, mine, _ in turns),
        "ggml_ms": 1e3 * statistics.median(other for _, _, other in turns),
        "daop_of_bandwidth": statistics.median(read / mine for read, mine, _ in turns),
        "ggml_of_bandwidth": statistics.median(read / other for read, _, other in turns),
        "times_ggml": statistics.median(ratios),
        "times_ggml_min": min(ratios),
        "times_ggml_max": max(ratios),
        "daop_error": errors["daop"],
        "ggml_error": errors["ggml"],
    }


def _nbytes(piece: Any) -> int:
    return int(np.prod(piece.shape)) * (2 if piece.dtypes[0] == "BF16" else 1)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", action="append", help="hidden x intermediate : chosen / experts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--format", nargs="+", default=list(GGML_TYPES), choices=list(GGML_TYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    bindings()
    ours, theirs = Side(options.threads), Side(options.threads)
    results: list[dict[str, object]] = []
    for name, shape in itertools.product(options.format, options.shape or ["2048x1024:8/64"]):
        hidden, inner, chosen, count = (int(number) for number in re.split("[x:/]", shape))
        task = Task(hidden, inner, chosen, count, name)
        said = (
            ours.call(begin, Ours, task, options.threads),
            theirs.call(begin, Theirs, task, options.threads),
        )
        if not results:
            print(
                f"{said[0]} beside {said[1].partition(',')[0]}, {options.threads} threads, "
                f"{options.repeats} repeats"
            )
            print(HEAD)
        for tokens in options.tokens:
            got = measure(ours, theirs, task, tokens, options.repeats)
            where = said[1].rpartition(", ")[2]
            results.append({"format": name, "shape": shape, "tokens": tokens, "ggml_buffer": where, **got})
            print(
                f"{name:5} {GGML_NAMES[name]:6} {shape:17}{tokens:6} {got['read_gb_per_s']:10.1f} "
                f"{got['daop_ms']:8.2f} {got['ggml_ms']:8.2f} {got['daop_of_bandwidth']:14.0%} "
                f"{got['ggml_of_bandwidth']:10.0%} {got['times_ggml']:8.2f} "
                f"({got['times_ggml_min']:.2f} .. {got['times_ggml_max']:.2f})   "
                f"{got['daop_error']:.0e}  {got['ggml_error']:.0e} {where}"
            )
    for side in (ours, theirs):
        side.close()
    print(json.dumps({"benchmark": "llama_cpp_experts", "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
