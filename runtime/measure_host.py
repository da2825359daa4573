"""Raw timings on the device ``host`` with a model's own experts, files and layers: lists of seconds.

Everything that is measured is what a run uses: the pool of reading threads, the kernels, transformers'
layers. Time and memory are bounded by the caller's budget, whatever the size of an expert.

Shape legend: T tokens, H hidden size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from daop.core import DaopError

from .checkpoint import Checkpoint
from .files import FileReader
from .host_compute import HostExperts
from .layout import ExpertLayout
from .machinery import READ_THREADS
from .model import BuiltModel, build_model
from .slots import SlotMemory
from .transfers import CHUNK, FileTransfers

FEWEST, MOST = 4, 24  # experts held at once: more than a processor's caches, and a burst of reads
BYTES = 1 << 30  # of them all, if FEWEST do not take more

Times = list[float]


class HostBench:
    """Buffers of one layer's kind of experts, and the threads that fill them from the model's files.

    ``direct_io`` False reads through the page cache as it is. Where a file system refuses direct reads, the
    page cache is emptied before each burst instead. ``way`` says what is done.
    """

    def __init__(self, checkpoint: Checkpoint, *, direct_io: bool, seed: int = 0) -> None:
        self.checkpoint = checkpoint
        self.count = experts_held(checkpoint.layouts[0], checkpoint.geometry.total)
        self.flats = [
            flat
            for layer, layout in enumerate(checkpoint.layouts)
            if layout == checkpoint.layouts[0]
            for flat in range(checkpoint.geometry.offsets[layer], checkpoint.geometry.offsets[layer + 1])
        ]
        self._random = random.Random(seed)
        self.way = "past the page cache" if direct_io else "through the page cache"
        self._empties = False
        try:
            self.reader = FileReader(checkpoint.files, direct_io=direct_io, largest=CHUNK)
        except DaopError:
            if not direct_io:
                raise
            self.way, self._empties = "from a page cache that is emptied before each burst", True
            self.reader = FileReader(checkpoint.files, direct_io=False, largest=CHUNK)
        self.memory = SlotMemory(checkpoint.layouts, [0] * len(set(checkpoint.layouts)), self.count)
        self.pool = FileTransfers(checkpoint, self.memory, self.reader, threads=READ_THREADS)
        self.buffers = list(self.memory.staging[0].tensor.unbind(0))

    def __enter__(self) -> HostBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.close()
        self.reader.close()

    def fill(self) -> None:
        """Put an expert into every buffer, so that what is computed with are a model's numbers."""
        for start in range(0, self.count, FEWEST):
            self.burst(range(start, min(start + FEWEST, self.count)))

    def burst(self, buffers: Sequence[int], use: Callable[[torch.Tensor], None] | None = None) -> Times:
        """Read random experts into these buffers at once; seconds until each had arrived, ascending.

        ``use`` is called with every expert as it arrives, while the rest is read, as a run does.
        """
        if self._empties:
            self.reader.drop_cache()
        wanted = self._random.choices(self.flats, k=len(buffers))
        began = time.perf_counter()
        waiting = {self.pool.stream(flat, at): at for flat, at in zip(wanted, buffers, strict=True)}
        arrived: Times = []
        while waiting:
            done = self.pool.wait_any(list(waiting))
            arrived += [time.perf_counter() - began] * len(done)
            for ticket in done:
                buffer = self.buffers[waiting.pop(ticket)]
                if use is not None:
                    use(buffer)
        return arrived


def experts_held(layout: ExpertLayout, most: int) -> int:
    """How many experts of a layout are held to measure with, if there are ``most``."""
    return max(FEWEST, min(MOST, BYTES // layout.nbytes, most))


def bursts(
    bench: HostBench, compute: HostExperts, together: int, seconds: float, pause: float = 0.0
) -> Times:
    """How long reads of so many experts at once take, over and over for about ``seconds``, each expert
    being computed as it arrives.

    ``pause``: seconds between two bursts. A disk behind a limit (a cloud's, say) serves bursts with pauses
    faster than a steady stream, and a run makes pauses: it computes.
    """
    use = _one_token(compute)

    def once() -> float:
        time.sleep(pause)
        return bench.burst(range(together), use)[-1]

    return _repeat(once, seconds, fewest=3)


def _one_token(compute: HostExperts) -> Callable[[torch.Tensor], None]:
    """Computes the expert of a buffer for one token."""
    hidden = torch.randn(1, compute.form.hidden).to(torch.bfloat16)
    ids, weights = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)

    def use(slot: torch.Tensor) -> None:
        compute.run(compute.begin(hidden, ids, weights), [0], [slot])

    return use


def computing(
    experts: Sequence[torch.Tensor], compute: HostExperts, tokens: int, seconds: float, group: int = 1
) -> Times:
    """Computing one expert for so many tokens, ``group`` of them in one call, none of them in cache."""
    numbers: Iterator[int] = _round(len(experts))
    dtype = torch.bfloat16
    hidden = torch.randn(tokens, compute.form.hidden).to(dtype)
    ids = torch.arange(group).expand(tokens, group).contiguous()
    weights = torch.full((tokens, group), 1.0 / group)

    def once() -> float:
        slots = [experts[next(numbers)] for _ in range(group)]
        batch = compute.begin(hidden, ids, weights)
        began = time.perf_counter()
        compute.run(batch, range(group), slots)
        return (time.perf_counter() - began) / group

    once()
    return _repeat(once, seconds, fewest=3)


def computing_beside_reads(bench: HostBench, compute: HostExperts, seconds: float) -> tuple[Times, float]:
    """Computing one expert for one token while the disk is kept busy, and the bytes per second it gave."""
    half = bench.count // 2
    use = _one_token(compute)
    choose = random.Random(1)
    waiting = {bench.pool.stream(choose.choice(bench.flats), at): at for at in range(half)}
    bench.pool.kick()
    computed: Iterator[int] = _round(bench.count - half)
    times: Times = []
    read, began = bench.pool.bytes_read, time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 3:
        slot = bench.buffers[half + next(computed)]
        at = time.perf_counter()
        use(slot)
        times.append(time.perf_counter() - at)
        for ticket in [ticket for ticket in waiting if ticket.done]:
            bench.pool.wait_any([ticket])
            buffer = waiting.pop(ticket)
            waiting[bench.pool.stream(choose.choice(bench.flats), buffer)] = buffer
        bench.pool.kick()
    rate = (bench.pool.bytes_read - read) / (time.perf_counter() - began)
    bench.pool.wait_idle()
    return times, rate


class LayerClock:
    """A model whose experts give zeros at once: what is left is attention, norms, routers and generation.

    ``passes`` holds, per forward pass, the rows and the seconds from the end of one layer's experts to the
    beginning of the next one's, less the experts' own bookkeeping, which counts to the layer.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.built: BuiltModel = build_model(checkpoint, self._experts)
        self._compute = [
            HostExperts(layout, form, count)
            for layout, form, count in zip(
                checkpoint.layouts, self.built.forms, checkpoint.geometry.experts, strict=True
            )
        ]
        self.passes: list[tuple[int, Times]] = []
        self._last = 0.0

    @property
    def compute(self) -> HostExperts:
        return self._compute[0]

    def _experts(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if layer == 0:
            self.passes.append((hidden.shape[0], []))
        batch = self._compute[layer].begin(hidden, ids, weights)
        batch.weight_sums()
        now = time.perf_counter()
        if layer:
            self.passes[-1][1].append(now - self._last)
        out = torch.zeros_like(hidden)
        self._last = time.perf_counter()
        return out

    def generate(self, prompt: int, answer: int) -> Times:
        """Seconds of each token after the first, for a prompt of so many tokens."""
        from daop.generation import generate  # the loop that a run uses

        vocabulary = int(self.built.model.config.get_text_config().vocab_size)
        ids = torch.randint(0, vocabulary, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        options: dict[str, Any] = {"min_new_tokens": answer}
        done = generate(self.built.model, None, [ids], max_new_tokens=answer, **options)
        return done[0].tpot_s


def _round(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def _repeat(once: Callable[[], float], seconds: float, fewest: int) -> Times:
    """Call until the time is up; at least so often, unless one call alone takes several times as long."""
    began, times = time.perf_counter(), []
    while True:
        times.append(once())
        spent = time.perf_counter() - began
        if (spent > seconds and len(times) >= fewest) or spent > 4 * seconds:
            return times
