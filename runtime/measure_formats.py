"""What computing an expert of a model's shape takes on the CPU in each number format, by tokens.

Experts of random numbers, through ``HostExperts``, as a run computes them: the kernels of the format, or
torch where a run would use it. More of them than the caches hold, within the same memory as ``HostBench``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from daop.core import DaopError

from . import measure_host
from .checkpoint import Checkpoint
from .codecs.base import SCALE
from .format_costs import Curve
from .formats import format_of, layout_in
from .host_compute import FEW_ROWS, HostExperts
from .layout import ExpertForm, ExpertLayout
from .measure_host import Times, experts_held
from .native import load_kernels

TOKENS = (1, 4, FEW_ROWS, FEW_ROWS + 1, 64, 256)
"""Up to FEW_ROWS the native kernels compute every format; beyond it, depending on CPU and format, torch."""


def own_curve(layout: ExpertLayout, computed: Mapping[int, Times]) -> Curve:
    """From the timings of a model's own experts, by tokens."""
    micro = {n: float(f"{typical(times) * 1e6:.4g}") for n, times in computed.items()}
    each = ", ".join(f"{n} tokens {spread(times)}" for n, times in computed.items())
    kernels = load_kernels()
    with_what = "without the compiled kernels" if kernels is None else f"kernels {kernels.variant}"
    return Curve(
        format=format_of(layout),
        nbytes=layout.stored_bytes,
        tokens=tuple(micro),
        microseconds=tuple(micro.values()),
        source=f"{torch.get_num_threads()} threads, {with_what}: {each}",
    )


def layouts_in(checkpoint: Checkpoint, names: Sequence[str]) -> list[ExpertLayout]:
    """How experts of the first MoE layer lie in each format; ``DaopError`` where one cannot hold them."""
    out = []
    for name in names:
        try:
            out.append(layout_in(checkpoint.skeleton.experts[0], checkpoint.layouts[0], name))
        except DaopError as error:
            raise DaopError(f"--format {name}: {error}; leave it out") from error
    return out


def measure_formats(
    checkpoint: Checkpoint,
    form: ExpertForm,
    layouts: Sequence[ExpertLayout],
    seconds: float,
    told: Callable[[str, float], None],
) -> list[Curve]:
    """A curve for each layout, of experts of random numbers, in about ``seconds`` each."""
    out = []
    for layout in layouts:
        told(f"computing experts of random numbers in {format_of(layout)}", 0.95)
        experts = random_experts(layout, experts_held(layout, checkpoint.geometry.total))
        compute = HostExperts(layout, form, len(experts))
        share = seconds / len(TOKENS)
        times = {n: measure_host.computing(experts, compute, n, share) for n in TOKENS}
        out.append(own_curve(layout, times))
    return out


def random_experts(layout: ExpertLayout, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Slots of numbers of a sensible size, so that no product is slow for being a denormal or a NaN."""
    generator = torch.Generator().manual_seed(seed)
    slots = list(torch.zeros(count, layout.nbytes, dtype=torch.uint8).unbind())
    for slot in slots:
        for role, view in layout.views(slot).items():
            _fill(view, role, generator)
    return slots


def _fill(view: torch.Tensor, role: str, generator: torch.Generator) -> None:
    if view.dtype in (torch.int8, torch.uint8):
        low, high = (-127, 128) if view.dtype == torch.int8 else (0, 256)
        if role.endswith(SCALE):  # MXFP4's: powers of two around 2 ** -6
            low, high = 119, 124
        view.random_(low, high, generator=generator)
        return
    noise = torch.randn(view.shape, generator=generator)
    if role.endswith(SCALE):
        noise = noise.abs() * 1e-3 + 1e-3
    elif view.dtype == torch.float8_e4m3fn:
        noise *= 40
    else:
        noise *= 0.03
    view.copy_(noise)


def typical(times: Sequence[float]) -> float:
    """The mean of the middle four fifths: what many of them take together, less rare interruptions."""
    ordered = sorted(times)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def spread(times: Sequence[float]) -> str:
    """Typical value, and the range of the middle four fifths, for people."""
    if not times:
        return "not measured"
    low, high = np.percentile(times, (10, 90)) * 1e3
    return f"{typical(times) * 1e3:.4g} ms ({low:.4g} to {high:.4g}, n={len(times)})"
