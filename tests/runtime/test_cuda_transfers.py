"""Copies into HBM on a stand-in: right bytes in every order of events, demand first, nothing written too
early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest
import torch
from cuda_runs import DEVICES, check_faults, open_gpu_of, read
from cuda_standin import Point, StandIn
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.core import DaopError, Geometry
from daop.runtime.checkpoint import ByteRange, Checkpoint
from daop.runtime.cuda.arenas import HostWeights
from daop.runtime.cuda.launches import from_staging
from daop.runtime.cuda.slabs import DeviceMemory
from daop.runtime.cuda.streams import Gpu, PinError
from daop.runtime.cuda.transfers import LinkTransfers
from daop.runtime.files import FileReader
from daop.runtime.layout import ExpertLayout

EXPERTS = 12
LAYOUT = ExpertLayout.pack([("up", (37, 5), "F32"), ("down", (5, 37), "F32")])
PART = LAYOUT.parts[0].nbytes
CHUNK = 256


@dataclass
class Files:
    """A checkpoint reduced to what transfers read: twelve experts in one file, part behind part."""

    geometry: Geometry
    files: tuple[Path, ...]
    layouts: tuple[ExpertLayout, ...]

    def ranges(self, flat: int) -> tuple[ByteRange, ...]:
        return tuple(
            ByteRange(0, 3 + (2 * flat + i) * PART, PART, part.offset) for i, part in enumerate(LAYOUT.parts)
        )

    def describe(self, flat: int) -> str:
        return f"expert {flat} in {self.files[0]}"

    def content(self, flat: int) -> bytes:
        slot = bytearray(LAYOUT.nbytes)
        data = self.files[0].read_bytes()
        for part in self.ranges(flat):
            slot[part.slot_offset : part.slot_offset + part.nbytes] = data[part.offset :][: part.nbytes]
        return bytes(slot)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = tmp_path_factory.mktemp("experts") / "a"
    numbers = np.random.default_rng(0).standard_normal((3 + EXPERTS * 2 * PART) // 4 + 1, dtype=np.float32)
    path.write_bytes(b"abc" + numbers.tobytes())
    return Files(Geometry.uniform(3, 4, 2, LAYOUT.stored_bytes), (path,), (LAYOUT,) * 3)


@contextmanager
def transfers(
    files: Files, gpu: Gpu, *, ram: float = 99, depth: int = 2 * CHUNK
) -> Iterator[tuple[LinkTransfers, DeviceMemory]]:
    checkpoint = cast(Checkpoint, files)
    reader = FileReader(files.files, direct_io=False, largest=1 << 20)
    weights = HostWeights(checkpoint, gpu, int(ram * LAYOUT.nbytes), arena_bytes=3 * LAYOUT.nbytes)
    weights.fill(reader)
    memory = DeviceMemory(gpu, files.layouts, [EXPERTS], 2)
    for slab in (*memory.slabs, *memory.staging):
        slab.tensor.fill_(0xEE)
    gpu.synchronize()
    engine = LinkTransfers(checkpoint, gpu, memory, weights, reader, chunk=CHUNK, depth=depth)
    try:
        yield engine, memory
    finally:
        engine.close()
        gpu.synchronize()
        weights.close()
        reader.close()
    check_faults(gpu)


def slot(memory: DeviceMemory, number: int, *, staged: bool = False) -> bytes:
    """The slot's stored bytes; what lies between parts is nobody's."""
    tensor = (memory.staging if staged else memory.slabs)[0].tensor[number]
    parts = [tensor[part.offset : part.offset + part.nbytes] for part in LAYOUT.parts]
    return bytes(torch.cat(parts).cpu().tolist())


def stored(files: Files, flat: int) -> bytes:
    content = files.content(flat)
    return b"".join(content[part.offset : part.offset + part.nbytes] for part in LAYOUT.parts)


@pytest.mark.parametrize(("pin_limit", "ram"), [(1 << 40, 99), (0, 99), (1 << 40, 5), (1 << 40, 0)])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_every_expert_arrives_whole(
    files: Files, pin_limit: int, ram: float, seed: int | None, device: str
) -> None:
    gpu = open_gpu_of(device, None if seed is None else Random(seed), pin_limit=pin_limit)
    with transfers(files, gpu, ram=ram) as (engine, memory):
        for flat in range(EXPERTS):
            engine.fetch(flat, EXPERTS - 1 - flat, demand=flat % 2 == 0)
        for flat in range(EXPERTS):
            engine.join(engine.ticket(flat))
            assert slot(memory, EXPERTS - 1 - flat) == stored(files, flat)
        assert list(engine.poll()) == []  # what was joined is not told again
        assert engine.bytes_moved >= EXPERTS * LAYOUT.stored_bytes


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(st.sampled_from("fspcwjx"), st.integers(0, EXPERTS - 1)), max_size=40),
    seed=st.integers(0, 1 << 16),
    ram=st.sampled_from([99, 6, 0]),
)
def test_any_order_of_events_ends_each_fetch_once(
    files: Files, device: str, events: list[tuple[str, int]], seed: int, ram: int
) -> None:
    """f demand, s speculation, p promote, c cancel, j join, x evict and compute; and at the end all that was
    told to have arrived has, and everything that was asked for was told once."""
    gpu = open_gpu_of(device, Random(seed))
    with transfers(files, gpu, ram=ram) as (engine, memory):
        open_: set[int] = set()
        there: set[int] = set()

        def settle() -> None:
            for flat in engine.poll():
                assert slot(memory, flat) == stored(files, flat), "told before it was there"
                open_.remove(flat)
                there.add(flat)

        for kind, flat in events:
            settle()
            if kind in "fs" and flat not in open_ | there:
                memory.slabs[0].tensor[flat] = 0xEE
                if device == "cuda":  # which fills on a stream of its own
                    gpu.synchronize()
                engine.fetch(flat, flat, demand=kind == "f")
                open_.add(flat)
            elif kind == "p" and flat in open_:
                engine.promote(flat)
            elif kind == "c" and flat in open_ and engine.cancel(flat):
                open_.remove(flat)
            elif kind == "j" and flat in open_:
                engine.join(engine.ticket(flat))
                open_.remove(flat)
                there.add(flat)
                assert slot(memory, flat) == stored(files, flat)
            elif kind == "x" and flat in there:
                read(gpu, memory.slabs[0], flat)
                engine.used([memory.slabs[0].address(flat)])
                there.remove(flat)
        engine.wait_idle()
        settle()
        assert open_ == set()
        assert engine.link_free_at == pytest.approx(engine.now, abs=1e-3)


class Log(StandIn):
    """Notes what was enqueued on the stream of copies."""

    def __init__(self) -> None:
        super().__init__(None)
        self.enqueued: list[int] = []  # targets

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        with self.lock:
            self.enqueued.append(target)
            super().copy_in(target, source, nbytes)


def test_a_demand_overtakes_a_speculation_in_its_middle(files: Files) -> None:
    gpu = Log()
    with transfers(files, gpu, depth=2 * CHUNK) as (engine, memory):
        base = memory.slabs[0].address(0)
        with gpu.lock:  # the feeding thread cannot wait for a mark meanwhile: two chunks at most are ahead
            engine.fetch(0, 0, demand=False)
            engine.kick()
            engine.fetch(1, 1, demand=True)
            engine.kick()
            ahead = gpu.enqueued.index(memory.slabs[0].address(1))
            assert ahead <= 2
            assert gpu.largest_copy == LAYOUT.nbytes, "a pinned demand is one copy"
        engine.join(engine.ticket(0))
        chunks = -(-LAYOUT.nbytes // CHUNK)
        assert chunks > 3
        assert gpu.enqueued[0] in (base, memory.slabs[0].address(1))
        assert slot(memory, 0) == stored(files, 0)


def test_speculation_is_never_far_ahead(files: Files) -> None:
    gpu = StandIn(None)  # nothing moves by itself
    with transfers(files, gpu, depth=3 * CHUNK) as (engine, _):
        seen = []
        real = gpu.copy_in

        def copy_in(target: int, source: int, nbytes: int) -> None:
            real(target, source, nbytes)
            seen.append(sum(what[2] for what in gpu.queue if not isinstance(what, Point)))

        gpu.copy_in = copy_in  # type: ignore[method-assign]
        for flat in range(6):
            engine.fetch(flat, flat, demand=False)
        engine.wait_idle()
        assert max(seen) <= 3 * CHUNK
        assert len(seen) == 6 * -(-LAYOUT.nbytes // CHUNK)


def test_promotion_sends_the_rest_at_once_and_forbids_cancelling(files: Files) -> None:
    gpu = StandIn(None)
    with transfers(files, gpu, depth=CHUNK) as (engine, memory):
        for flat in range(4):
            engine.fetch(flat, flat, demand=False)
        engine.promote(3)
        assert engine.ticket(3).open == 0, "all of it is in the stream"
        assert not engine.cancel(3)
        assert engine.cancel(2)
        engine.wait_idle()
        assert sorted(engine.poll()) == [0, 1, 3]
        assert slot(memory, 2) == bytes([0xEE] * LAYOUT.stored_bytes)


def test_a_cancelled_fetch_leaves_the_slot_guarded(files: Files) -> None:
    """The copy that takes its place still waits for the computation that read the slot."""
    gpu = StandIn(None)
    with transfers(files, gpu, depth=CHUNK) as (engine, memory):
        address = memory.slabs[0].address(5)
        gpu.note_reads([(address, LAYOUT.nbytes)])
        engine.used([address])
        with gpu.lock:  # the feeding thread is held up by the first of these
            for flat in range(4):
                engine.fetch(flat, flat, demand=False)
            engine.fetch(5, 5, demand=False)
            assert engine.cancel(5)
            engine.fetch(6, 5, demand=True)
            engine.kick()
        engine.wait_idle()
        assert slot(memory, 5) == stored(files, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_staging_slots_wait_for_the_computation_before(files: Files, device: str) -> None:
    gpu = open_gpu_of(device, Random(3))
    with transfers(files, gpu) as (engine, memory):
        for flat in range(EXPERTS):
            number = flat % 2
            ticket = engine.stream(flat, number)
            engine.join(ticket)
            assert slot(memory, number, staged=True) == stored(files, flat)
            address = memory.staging[0].address(number)
            read(gpu, memory.staging[0], number)
            engine.used([address])


@pytest.mark.parametrize("device", DEVICES)
def test_what_shares_a_staging_slot_stays_in_order(files: Files, device: str) -> None:
    """A copy that need not wait for a disk does not overtake one before it in the slot that must."""
    with transfers(files, open_gpu_of(device, Random(0)), ram=6) as (engine, _):
        weights = engine._weights
        order = sorted(range(EXPERTS), key=weights.in_ram)  # those on disk first
        launches = from_staging(order, 2, engine, weights)
        for index, launch in enumerate(launches):
            before = [weights.is_pinned(flat) for flat in order[index % 2 : index + 1 : 2]]
            assert launch.prompt == all(before)
            assert len(launch.tickets) == (index < 2)
            assert launch.next is (launches[index + 2] if index + 2 < EXPERTS else None)
        engine.wait_idle()


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_error_names_the_expert_and_the_file(files: Files, device: str) -> None:
    with transfers(files, open_gpu_of(device, Random(0)), ram=0) as (engine, _):

        def fail(file: int, offset: int, out: object) -> None:
            raise OSError(5, "I/O error")

        engine.handover._reader.read = fail  # type: ignore[method-assign]
        engine.fetch(6, 0, demand=True)
        engine.fetch(7, 1, demand=False)
        with pytest.raises(DaopError, match=r"cannot read expert 6 in .*I/O error"):
            engine.join(engine.ticket(6))
        engine.wait_idle()
        assert sorted(engine.failed()) == [6, 7]
        assert list(engine.poll()) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dying_threads_end_in_an_error_not_a_hang(files: Files, device: str) -> None:
    with transfers(files, open_gpu_of(device, Random(0)), ram=0) as (engine, _):

        def die(file: int, offset: int, out: object) -> None:
            raise SystemExit(1)

        engine.handover._reader.read = die  # type: ignore[method-assign]
        for flat in range(8):
            engine.fetch(flat, flat, demand=True)
        with pytest.raises(DaopError, match=r"have died|cannot read"):
            engine.join(engine.ticket(7))
        engine.wait_idle()  # returns too


def test_a_ring_that_cannot_be_locked_is_an_error(files: Files) -> None:
    class Mean(StandIn):
        def pinned(self, nbytes: int) -> torch.Tensor:
            raise PinError("no")

    with (
        pytest.raises(DaopError, match=r"cannot lock even .*ulimit -l"),
        transfers(files, Mean(pin_limit=0)),
    ):
        pass
