"""Measures the machine at hand: what it costs to read an expert, compute one, and get to the next layer.

The tier ``host``: fast memory is RAM, behind it is a disk, one processor computes. Under two minutes. The
result has the form of the hardware profiles that daop ships, each figure with how it was measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from daop.core import DaopError

from .costs import Hardware

READERS = 8
EXPERTS = 24  # experts that are read or computed; together they outgrow a processor's caches
ALIGNED = 4096

Told = Callable[[str, float], None]


def measure(
    folder: Path, size: int, *, threads: int | None = None, told: Told | None = None
) -> tuple[Hardware, dict[str, str]]:
    """Calibrate with experts of ``size`` bytes; writes and reads ``EXPERTS`` of them in ``folder``.

    Returns the machine, and for each figure how it was measured.
    """
    say = told or (lambda _, __: None)
    if threads is not None:
        torch.set_num_threads(threads)
    size = max(ALIGNED, size // ALIGNED * ALIGNED)
    say("reading from the disk", 0.0)
    disk_gbs, latency_us, direct = read_speed(folder, size)
    say("computing experts for one token", 0.4)
    one = expert_seconds(size, 1)
    say("computing experts for many tokens", 0.6)
    many = expert_seconds(size, 64)
    say("attention and router of a layer", 0.8)
    layer, per_row = layer_seconds()
    say("done", 1.0)
    gbs = size / one / 1e9
    gflops = 64 * size / many / 1e9  # bf16: one product and one sum per two bytes
    way = "O_DIRECT" if direct else "through the page cache, which this file system cannot bypass"
    hardware = Hardware(
        name="this machine",
        tier="host",
        link_gbs=round(disk_gbs, 4),
        link_latency_us=round(latency_us, 1),
        host_gbs=round(gbs, 3),
        host_gflops=round(max(gflops, gbs), 3),
        device_gbs=round(gbs, 3),
        device_gflops=round(max(gflops, gbs), 3),
        layer_us=round(layer * 1e6, 1),
        layer_us_per_row=round(per_row * 1e6, 2),
    )
    computed = f"bf16 experts of {size} bytes, {torch.get_num_threads()} threads, median"
    sources = {
        "link_gbs": f"{READERS} readers at once, {size} bytes each, {way}",
        "link_latency_us": "4 KiB read, median",
        "host_gbs": f"one token, {computed}",
        "host_gflops": f"64 tokens, {computed}",
        "device_gbs": "the same processor as host",
        "device_gflops": "the same processor as host",
        "layer_us": "attention block of width 1024 for one row, float32",
        "layer_us_per_row": "the same for 64 rows",
    }
    return hardware, sources


def read_speed(folder: Path, size: int) -> tuple[float, float, bool]:
    """(GB/s with several readers, microseconds of one small read, whether the page cache was bypassed)."""
    path = folder / f".daop-calibrate-{os.getpid()}"
    try:
        with path.open("wb") as file:
            block = os.urandom(size)
            for _ in range(EXPERTS):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        descriptor, direct = _open(path)
        try:
            began = time.perf_counter()
            with ThreadPoolExecutor(READERS) as pool:
                for got in pool.map(lambda i: _read(descriptor, i * size, size), range(EXPERTS)):
                    if got != size:
                        raise DaopError(f"{path}: a read gave {got} of {size} bytes")
            took = time.perf_counter() - began
            small = [_timed(partial(_read, descriptor, i * size, ALIGNED)) for i in range(EXPERTS)]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DaopError(
            f"cannot measure the disk in {folder}: {error}; name another with --folder"
        ) from error
    finally:
        path.unlink(missing_ok=True)
    return EXPERTS * size / took / 1e9, statistics.median(small) * 1e6, direct


def _open(path: Path) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, os.O_RDONLY | direct), True
        except OSError:
            pass
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor, False


def _read(descriptor: int, offset: int, size: int) -> int:
    import mmap

    with mmap.mmap(-1, size) as buffer:  # anonymous maps are aligned as O_DIRECT asks
        return os.preadv(descriptor, [buffer], offset)


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def expert_seconds(size: int, tokens: int) -> float:
    """Computing one gated expert for so many tokens, its weights not in cache: the median."""
    width = max(64, int((size / 2 / 3) ** 0.5) // 64 * 64)
    inner = max(64, size // 2 // (3 * width))
    weights = [
        (torch.randn(2 * inner, width).bfloat16(), torch.randn(width, inner).bfloat16())
        for _ in range(EXPERTS)
    ]
    hidden = torch.randn(tokens, width).bfloat16()

    def compute(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = (hidden @ up.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * value) @ down.T

    with torch.inference_mode():
        compute(*weights[0])
        times = [_timed(partial(compute, *pair)) for pair in weights]
    return statistics.median(times)


def layer_seconds(width: int = 1024, context: int = 512) -> tuple[float, float]:
    """(one row, each further row) of an attention block with router: an orientation, not a model's figure."""
    project = torch.randn(4 * width, width)
    router = torch.randn(64, width)
    keys = torch.randn(1, 16, context, width // 16)

    def run(rows: int) -> None:
        hidden = torch.randn(rows, width)
        mixed = (hidden @ project.T).chunk(4, dim=-1)
        query = mixed[0].reshape(1, rows, 16, -1).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(query, keys, keys)
        torch.softmax(mixed[1] @ router.T, dim=-1).topk(4)

    with torch.inference_mode():
        run(1)
        one = statistics.median(_timed(lambda: run(1)) for _ in range(30))
        many = statistics.median(_timed(lambda: run(64)) for _ in range(10))
    return one, max(0.0, many - one) / 63
