"""How close to the memory's speed are experts computed on the host?

    python benchmarks/expert_kernels.py [--shape 2048x1024:8/64 --shape 4096x14336:2/8] [--tokens 1 4 16]
                                        [--format bf16 int8 int4 fp8 mxfp4] [--repeats 9] [--variant avx2]

For every shape (hidden x intermediate : chosen / experts) and number of tokens per expert, one after the
other within each repeat, on other experts each time: reading the chosen experts' bytes and nothing else (the
better of our own read loop and torch.sum), daop's native kernels, daop's torch path, and torch's products in
the weights' dtype (what transformers' eager experts do; of a quantised format, in bf16, whose weights torch
would hold instead). Medians; shares and ratios are formed within each repeat. INT8 is in groups of 64, INT4
of 32; --group changes both. Experts lie in memory as daop's own do (huge pages where the system gives them).
Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from daop.runtime.codecs.base import SCALE, Codec
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.host_compute import HostExperts
from daop.runtime.layout import ExpertForm, ExpertLayout
from daop.runtime.native import Kernels, load_kernels
from daop.runtime.native_library import library_path
from daop.runtime.numa import map_memory

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]  # hidden, ids, weights, slots
FORMATS = ("bf16", "f16", "f32", "int8", "int4", "fp8", "mxfp4")


def codec_of(name: str, group: int | None) -> Codec:
    if name.startswith("int"):
        return Integers(int(name[3:]), group or {"int8": 64, "int4": 32}[name])
    return {"fp8": Fp8(), "mxfp4": Mxfp4()}.get(name, PLAIN)


def silu_gate(fused: torch.Tensor) -> torch.Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return functional.silu(gate) * up


class Case:
    """Random experts of one shape, and the four ways to pass over some of them."""

    def __init__(
        self, hidden: int, inner: int, chosen: int, count: int, name: str, codec: Codec, kernels: Kernels
    ) -> None:
        parts = []
        for role, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            for suffix, piece in codec.pieces(rows, columns).items():
                kind = piece.dtypes[0] if codec.by_rows else name.upper()
                parts.append((role + suffix, piece.shape, kind))
        self.layout = ExpertLayout.pack(parts, codec)
        form = ExpertForm(
            hidden=hidden,
            intermediate=inner,
            has_gate=True,
            has_bias=False,
            transposed=False,
            interleaved=False,
            activation="silu",
            apply_gate=silu_gate,
        )
        self.chosen, self.hidden, self.kernels = chosen, hidden, kernels
        memory = torch.from_numpy(map_memory(count * self.layout.nbytes))  # as daop holds experts
        self.slab = memory.view(count, self.layout.nbytes)
        self.parts = [self.layout.views(slot) for slot in self.slab]
        for views in self.parts:
            for role, view in views.items():
                fill(view, hidden**-0.5, role.endswith(SCALE))
        self.native = HostExperts(self.layout, form, count, kernels=kernels)
        self.torch = HostExperts(self.layout, form, count, kernels=None)
        self.dtype = torch.bfloat16 if codec.by_rows else self.parts[0]["down"].dtype
        # What torch multiplies: the same bytes if it can, else its own bf16 copies, more than a cache holds.
        self.eager_parts = self.parts
        if codec.by_rows:
            self.eager_parts = [
                {
                    "gate_up": torch.randn(2 * inner, hidden).mul_(hidden**-0.5).bfloat16(),
                    "down": torch.randn(hidden, inner).mul_(inner**-0.5).bfloat16(),
                }
                for _ in range(min(count, max(chosen, -(-(256 << 20) // (6 * inner * hidden)))))
            ]

    def pick(self) -> list[int]:
        return sorted(random.sample(range(len(self.slab)), self.chosen))

    def inputs(self, experts: list[int], tokens: int) -> Inputs:
        ids = torch.tensor(experts).expand(tokens, -1)
        hidden = torch.ones(tokens, self.hidden, dtype=self.dtype)
        return hidden, ids, torch.full(ids.shape, 1 / len(experts)), [self.slab[expert] for expert in experts]

    def read(self, experts: list[int], _: Inputs) -> None:
        for expert in experts:
            self.kernels.read(self.slab[expert])

    def sum(self, experts: list[int], _: Inputs) -> None:
        for expert in experts:
            self.slab[expert].view(torch.float32).sum()

    def daop(self, host: HostExperts, experts: list[int], inputs: Inputs) -> torch.Tensor:
        hidden, ids, weights, slots = inputs
        batch = host.begin(hidden, ids, weights)
        host.run(batch, experts, slots)
        return host.finish(batch)

    def eager(self, experts: list[int], inputs: Inputs) -> torch.Tensor:
        x = inputs[0]
        out = torch.zeros_like(x)
        for expert in experts:
            parts = self.eager_parts[expert % len(self.eager_parts)]
            inner = silu_gate(functional.linear(x, parts["gate_up"]))
            out += functional.linear(inner, parts["down"]) / len(experts)
        return out


def fill(view: torch.Tensor, size: float, scale: bool) -> None:
    """Random weights of that size, or scales, in the range that a published model has: FP8 uses its own up to
    the largest number, MXFP4's powers of two make weights of a thousandth to a tenth."""
    flat = view.view(-1)
    if view.dtype == torch.uint8:
        noise = torch.randint(118, 125, (1 << 20,)) if scale else torch.randint(0, 256, (1 << 20,))
    elif view.dtype == torch.int8:
        noise = torch.randint(-127, 128, (1 << 20,))
    elif view.dtype == torch.float8_e4m3fn:
        noise = torch.randn(1 << 20).mul_(100).clamp_(-448, 448)
    else:
        noise = torch.randn(1 << 20) * (size * 0.01 if scale else size)
    noise = noise.to(view.dtype)
    for at in range(0, flat.numel(), noise.numel()):
        flat[at : at + noise.numel()].copy_(noise[: flat.numel() - at])


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(case: Case, tokens: int, repeats: int) -> dict[str, float]:
    ways: dict[str, Callable[[list[int], Inputs], object]] = {
        "read": case.read,
        "sum": case.sum,
        "native": lambda experts, inputs: case.daop(case.native, experts, inputs),
        "torch": lambda experts, inputs: case.daop(case.torch, experts, inputs),
        "eager": case.eager,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            experts = case.pick()
            inputs = case.inputs(experts, tokens)  # what a model would hand over
            taken = seconds(lambda run=run, e=experts, i=inputs: run(e, i))  # type: ignore[misc]
            if repeat:  # the first one warms up
                times[name].append(taken)
    nbytes = case.chosen * case.layout.stored_bytes
    bandwidth = [nbytes / min(a, b) for a, b in zip(times["read"], times["sum"], strict=True)]
    shares = [nbytes / t / b for t, b in zip(times["native"], bandwidth, strict=True)]
    gains = [min(a, b) / t for a, b, t in zip(times["torch"], times["eager"], times["native"], strict=True)]
    result = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in times.items()}
    result["read_gb_per_s"] = statistics.median(bandwidth) / 1e9
    result["share_of_bandwidth"] = statistics.median(shares)
    result["times_torch"] = statistics.median(gains)
    result["share_min"], result["share_max"] = min(shares), max(shares)
    return result


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", action="append", help="hidden x intermediate : chosen / experts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--format", nargs="+", default=["bf16"], choices=FORMATS)
    parser.add_argument("--group", type=int, help="inputs per scale of int8 and int4")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--variant", default="")
    options = parser.parse_args()
    path = library_path()
    kernels = Kernels(path, options.variant) if path and options.variant else load_kernels()
    if kernels is None:
        parser.error("the native kernels are not built; build them with: python -m daop.runtime.native")
    random.seed(0)
    results = []
    print(f"{kernels.variant}, {torch.get_num_threads()} threads, {options.repeats} repeats")
    print(
        "format shape            tokens  read GB/s  native ms  torch ms  eager ms  of bandwidth      x torch"
    )
    shapes = options.shape or ["2048x1024:8/64", "4096x14336:2/8"]
    for name, shape in itertools.product(options.format, shapes):
        hidden, inner, chosen, count = (int(number) for number in re.split("[x:/]", shape))
        case = Case(hidden, inner, chosen, count, name, codec_of(name, options.group), kernels)
        for tokens in options.tokens:
            got = measure(case, tokens, options.repeats)
            results.append({"format": name, "shape": shape, "tokens": tokens, **got})
            print(
                f"{name:7}{shape:17}{tokens:6} {got['read_gb_per_s']:10.1f} {got['native_ms']:10.2f} "
                f"{got['torch_ms']:9.2f} {got['eager_ms']:9.2f}  {got['share_of_bandwidth']:4.0%} "
                f"({got['share_min']:.0%}..{got['share_max']:.0%}) {got['times_torch']:7.2f}"
            )
        del case
    print(json.dumps({"variant": kernels.variant, "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
