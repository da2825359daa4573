"""Measures the machine at hand, on the device ``host``: what it costs to read an expert, compute one, and
get to the next layer.

Each figure is fitted to timings made with what a run uses (``measure_host``); its source says how
it was measured and between which values the middle four fifths of the timings lay. Time and memory are
bounded whatever the size of an expert; nothing is written but where no model is given (``model_to_measure``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from daop.core import DaopError

from . import measure_host
from .checkpoint import Checkpoint
from .costs import Hardware
from .formats import format_of
from .host_compute import HostExperts
from .machinery import READ_THREADS, weight_bits
from .measure_formats import TOKENS, layouts_in, measure_formats, own_curve, spread, typical
from .measure_host import HostBench, LayerClock, Times

TOGETHER = (1, 2, 4)  # experts read at once
PROMPTS = (16, 512)
ANSWER = 16  # tokens generated after each prompt
ROUNDS = 3  # the prompts take turns, so that a machine that changes does so for all

Told = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured machine: its figures, for each how it was measured, and the experts that were used.

    ``pause_seconds``: what was left between bursts of reads."""

    hardware: Hardware
    sources: dict[str, str]
    expert_bytes: int
    weight_bits: float
    pause_seconds: float

    @property
    def format(self) -> str:
        """That of the experts."""
        return self.hardware.curves[0].format


def calibrate_host(
    checkpoint: Checkpoint,
    *,
    direct_io: bool = True,
    seconds: float = 20.0,
    formats: Sequence[str] = (),
    told: Told | None = None,
) -> Calibration:
    """Calibrate with a model's own experts and layers in about ``seconds``, loading not counted; each of
    ``formats`` that the experts are not in themselves takes an eighth of that time more."""
    say = told or (lambda _, __: None)
    if seconds <= 0:
        raise DaopError(f"--seconds is {seconds}, but must be above 0")
    own_format = format_of(checkpoint.layouts[0])
    others = layouts_in(checkpoint, [name for name in formats if name != own_format])
    say("loading everything but the experts", 0.0)
    clock = LayerClock(checkpoint)
    size = checkpoint.layouts[0].stored_bytes
    bits = weight_bits(checkpoint)
    say("attention, router and everything else of a layer", 0.1)
    figures, sources = _layers(clock, checkpoint.geometry.layers)
    found, how, computed, pause = _with_experts(
        checkpoint, clock, figures["layer_us"], direct_io, seconds, say
    )
    figures, sources = figures | found, sources | how
    own = own_curve(checkpoint.layouts[0], computed)
    curves = (own, *measure_formats(checkpoint, clock.built.forms[0], others, seconds / 8, say))
    say("done", 1.0)
    rounded = {n: float(f"{v:.4g}") for n, v in figures.items()}
    hardware = Hardware(name="this machine", tier="host", curves=curves, **rounded)
    return Calibration(
        hardware=hardware, sources=sources, expert_bytes=size, weight_bits=bits, pause_seconds=pause
    )


def _with_experts(
    checkpoint: Checkpoint, clock: LayerClock, layer_us: float, direct_io: bool, seconds: float, say: Told
) -> tuple[dict[str, float], dict[str, str], dict[int, Times], float]:
    """What computing and reading the experts costs; the timings of computing, by tokens; the pause."""
    size, bits = checkpoint.layouts[0].stored_bytes, weight_bits(checkpoint)
    with HostBench(checkpoint, direct_io=direct_io) as bench:
        bench.fill()
        say("computing experts", 0.3)
        share = 0.2 / len(TOKENS) * seconds
        computed = {n: measure_host.computing(bench.buffers, clock.compute, n, share) for n in TOKENS}
        say("computing experts while others are read", 0.5)
        beside, _ = measure_host.computing_beside_reads(bench, clock.compute, 0.1 * seconds)
        figures, sources = _experts(computed, beside, size, bits)
        say("reading experts", 0.6)
        pause = layer_us * 1e-6 + checkpoint.geometry.top_k * typical(computed[1])
        found, how = measure_link(bench, clock.compute, 0.4 * seconds, pause)
    return figures | found, sources | how, computed, pause


Fitted = tuple[dict[str, float], dict[str, str]]


def measure_link(bench: HostBench, compute: HostExperts, seconds: float, pause: float) -> Fitted:
    """The line through the times of n reads at once: its slope is what one read takes of the disk, and what
    one alone takes beyond that is latency."""
    reads = {n: measure_host.bursts(bench, compute, n, seconds / len(TOGETHER), pause) for n in TOGETHER}
    size = bench.checkpoint.layouts[0].stored_bytes
    found = {n: typical(times) for n, times in reads.items()}
    slope = float(np.polyfit(list(found), list(found.values()), 1)[0])
    own = min(max(slope, found[max(found)] / max(found) / 2), found[1])
    latency = found[1] - own
    each = ", ".join(f"{n} at once {spread(times)}" for n, times in reads.items())
    text = f"experts of {size} bytes, {READ_THREADS} threads {bench.way}, {pause * 1e3:.1f} ms pauses: {each}"
    return (
        {"link_gbs": size / own / 1e9, "link_latency_us": latency * 1e6, "link_parallel": READ_THREADS},
        {"link_gbs": text, "link_latency_us": "the same", "link_parallel": "the number of reading threads"},
    )


def _experts(computed: dict[int, Times], beside: Times, size: int, bits: float) -> Fitted:
    """Bandwidth from one token, arithmetic from many; and how much reads beside it slow computing down."""
    found = {n: typical(times) for n, times in computed.items()}
    gbs = size / found[1] / 1e9
    flops = 16.0 * size / bits
    gflops = max(n * flops / seconds for n, seconds in found.items()) / 1e9
    slows = max(1.0, typical(beside) / found[1])
    threads = f"{torch.get_num_threads()} threads"
    each = ", ".join(f"{n} tokens {spread(times)}" for n, times in computed.items())
    return (
        {
            **{"host_gbs": gbs, "host_gflops": gflops, "device_gbs": gbs, "device_gflops": gflops},
            "link_slows": slows,
        },
        {
            "device_gbs": f"one token {spread(computed[1])}, {threads}",
            "device_gflops": f"the best of {each}",
            "host_gbs": "the same processor as device",
            "host_gflops": "the same processor as device",
            "link_slows": f"one token while the disk is read {spread(beside)}",
        },
    )


def _layers(clock: LayerClock, layers: int) -> Fitted:
    """One row; each further row and each token of context from a longer prompt; the pass around them."""
    limit = getattr(clock.built.model.config.get_text_config(), "max_position_embeddings", None)
    longest = PROMPTS[1] if limit is None else max(PROMPTS[0] + 1, min(PROMPTS[1], limit - ANSWER - 1))
    prompts = (PROMPTS[0], longest)
    tokens: dict[int, Times] = {prompt: [] for prompt in prompts}
    decode: dict[int, Times] = {prompt: [] for prompt in prompts}
    whole: dict[int, Times] = {prompt: [] for prompt in prompts}
    for prompt in prompts * ROUNDS:
        clock.passes.clear()
        tokens[prompt] += clock.generate(prompt, ANSWER)
        steps = [(rows, times) for rows, times in clock.passes if times]
        decode[prompt] += [t for rows, times in steps if rows == 1 for t in times]
        whole[prompt] += [t for rows, times in steps if rows > 1 for t in times]
    prefill = {prompt: typical(times or [0.0]) for prompt, times in whole.items()}
    few, many = prompts
    one = typical(decode[few] or [typical(tokens[few]) / layers])
    per_context = max(0.0, typical(decode[many] or [one]) - one) / (many - few)
    attended = per_context * many * many / 2
    per_row = max(0.0, prefill[many] - one - attended) / (many - 1)
    outside = max(0.0, typical(tokens[few]) - layers * one)
    text = f"of {ROUNDS} x {ANSWER} tokens after a prompt of {few}, experts giving zeros"
    return (
        {
            **{"layer_us": one * 1e6, "layer_us_per_row": per_row * 1e6, "forward_us": outside * 1e6},
            "layer_us_per_context": per_context * 1e6,
        },
        {
            "layer_us": f"between the experts of two layers, {text}: {spread(decode[few])}",
            "layer_us_per_row": f"a prompt of {many} tokens, less attention to its context",
            "layer_us_per_context": f"after a prompt of {many} tokens instead: {spread(decode[many])}",
            "forward_us": f"{text}, less the layers: {spread(tokens[few])} a token",
        },
    )
