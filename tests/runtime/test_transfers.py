"""The reading pool: right bytes in every order of events, demand first, no hang when it breaks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from daop.core import DaopError, Geometry
from daop.runtime.checkpoint import ByteRange, Checkpoint
from daop.runtime.files import FileReader
from daop.runtime.layout import ExpertLayout
from daop.runtime.slots import SlotMemory
from daop.runtime.transfers import FileTransfers, Reader

EXPERTS = 12
LAYOUT = ExpertLayout.pack([("up", (37, 5), "F32"), ("down", (5, 37), "F32")])
PART = LAYOUT.parts[0].nbytes


@dataclass
class Files:
    """A checkpoint reduced to what transfers read: twelve experts in two files, parts apart."""

    geometry: Geometry
    files: tuple[Path, ...]
    layouts: tuple[ExpertLayout, ...]

    def checksum(self, flat: int) -> int | None:
        return None

    def ranges(self, flat: int) -> tuple[ByteRange, ...]:
        up, down = LAYOUT.parts
        return (
            ByteRange(0, 3 + flat * PART, PART, up.offset),
            ByteRange(1, 5 + flat * PART, PART, down.offset),
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("experts")
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).write_bytes(random.bytes(8 + EXPERTS * PART))
    return Files(Geometry.uniform(3, 4, 2, LAYOUT.stored_bytes), (folder / "a", folder / "b"), (LAYOUT,) * 3)


def expected(files: Files, flat: int) -> list[bytes]:
    out = []
    for place in files.ranges(flat):
        with files.files[place.file].open("rb") as file:
            file.seek(place.offset)
            out.append(file.read(place.nbytes))
    return out


def content(slot: NDArray[np.uint8]) -> list[bytes]:
    return [slot[part.offset : part.offset + part.nbytes].tobytes() for part in LAYOUT.parts]


@contextmanager
def transfers(
    files: Files,
    slots: int,
    reader: Reader | None = None,
    threads: int = 3,
    chunk: int = 256,
    direct: bool = False,
) -> Iterator[tuple[FileTransfers, SlotMemory]]:
    memory = SlotMemory(files.layouts, [slots], 2)
    own = FileReader(files.files, direct_io=direct, largest=chunk)
    pool = FileTransfers(cast(Checkpoint, files), memory, reader or own, threads=threads, chunk=chunk)
    try:
        yield pool, memory
    finally:
        pool.close()
        own.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("chunk", [64, 256, 1 << 20])
def test_every_expert_arrives_whole(files: Files, chunk: int, direct: bool) -> None:
    with transfers(files, EXPERTS, chunk=chunk, direct=direct) as (pool, memory):
        memory.slabs[0].array[:] = 0xEE  # poison: an unread byte shows
        for flat in range(EXPERTS):
            pool.fetch(flat, flat, demand=flat % 2 == 0)
        waiting = {flat: pool.ticket(flat) for flat in range(EXPERTS)}
        while waiting:
            for ticket in pool.wait_any(waiting.values()):
                assert content(memory.slabs[0].array[ticket.flat]) == expected(files, ticket.flat)
                del waiting[ticket.flat]
        assert pool.poll() == ()  # what was waited for is not reported again
        assert pool.bytes_read == EXPERTS * LAYOUT.stored_bytes


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("fspcw"), st.integers(0, EXPERTS - 1)), max_size=40))
def test_any_order_of_events_ends_each_fetch_once(files: Files, events: list[tuple[str, int]]) -> None:
    """f: demand, s: speculation, p: promote, c: cancel, w: wait; then every fetch ended exactly once."""
    with transfers(files, EXPERTS) as (pool, memory):
        open_: set[int] = set()
        for kind, flat in events:
            ended = set(pool.poll())
            assert ended <= open_
            open_ -= ended
            if kind in "fs" and flat not in open_:
                memory.slabs[0].array[flat] = 0xEE
                pool.fetch(flat, flat, demand=kind == "f")
                open_.add(flat)
            elif kind == "p":
                pool.promote(flat)
            elif kind == "c" and flat in open_ and pool.cancel(flat):
                open_.discard(flat)
            elif kind == "w" and flat in open_:
                pool.wait_any([pool.ticket(flat)])
                open_.discard(flat)
                assert content(memory.slabs[0].array[flat]) == expected(files, flat)
        pool.wait_idle()
        assert set(pool.poll()) == open_
        for flat in open_:
            assert content(memory.slabs[0].array[flat]) == expected(files, flat)


class Gate:
    """A reader that waits at a gate and notes the order of reads."""

    def __init__(self, inner: Reader) -> None:
        self.inner = inner
        self.opened = threading.Event()
        self.offsets: list[tuple[int, int]] = []

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        self.opened.wait(10)
        self.offsets.append((file, offset))
        self.inner.read(file, offset, out)


def test_a_demand_overtakes_a_speculation_in_its_middle(files: Files) -> None:
    gate = Gate(FileReader(files.files, direct_io=False, largest=256))
    with transfers(files, EXPERTS, reader=gate, threads=1, chunk=64) as (pool, _):
        pool.fetch(0, 0, demand=False)
        pool.fetch(1, 1, demand=True)
        gate.opened.set()
        pool.wait_idle()
    demand = [i for i, (_, offset) in enumerate(gate.offsets) if offset >= 3 + PART]
    assert demand[0] <= 1  # at most the chunk already begun went first
    assert demand == list(range(demand[0], demand[0] + len(demand)))


def test_a_promoted_speculation_goes_first_and_cannot_be_cancelled(files: Files) -> None:
    gate = Gate(FileReader(files.files, direct_io=False, largest=256))
    with transfers(files, EXPERTS, reader=gate, threads=1, chunk=1 << 20) as (pool, _):
        for flat in range(4):
            pool.fetch(flat, flat, demand=False)
        pool.promote(3)
        assert not pool.cancel(3)
        assert pool.cancel(2)
        gate.opened.set()
        pool.wait_idle()
        assert sorted(pool.poll()) == [0, 1, 3]
    assert 3 + 3 * PART in [offset for _, offset in gate.offsets[:2]]  # behind at most the chunk begun


class Faulty:
    """A reader that raises from its n-th read on."""

    def __init__(self, inner: Reader, good: int, error: Callable[[], BaseException]) -> None:
        self.inner, self.good, self.error = inner, good, error
        self.lock = threading.Lock()

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        with self.lock:
            self.good -= 1
            fails = self.good < 0
        if fails:
            raise self.error()
        self.inner.read(file, offset, out)


def test_a_read_error_names_the_expert_and_the_file(files: Files) -> None:
    faulty = Faulty(FileReader(files.files, direct_io=False, largest=256), 1, lambda: OSError(5, "I/O error"))
    with transfers(files, 4, reader=faulty) as (pool, _):
        pool.fetch(6, 0, demand=True)
        with pytest.raises(DaopError, match=r"expert 2 of MoE layer 1 from .*a: .*I/O error"):
            pool.wait_any([pool.ticket(6)])
        pool.wait_idle()
        assert pool.failed() == [6]
        assert pool.poll() == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dying_workers_end_in_an_error_not_a_hang(files: Files) -> None:
    dying = Faulty(FileReader(files.files, direct_io=False, largest=256), 0, lambda: SystemExit(1))
    with transfers(files, 4, reader=dying, threads=2, chunk=64) as (pool, _):
        for flat in range(3):
            pool.fetch(flat, flat, demand=True)
        with pytest.raises(DaopError, match=r"have died|cannot read"):
            pool.wait_any([pool.ticket(2)])
        pool.wait_idle()  # returns too


def test_a_file_that_ends_early_is_an_error(files: Files, tmp_path: Path) -> None:
    short = tmp_path / "a"
    short.write_bytes(files.files[0].read_bytes()[: 3 + PART // 2])
    cut = Files(files.geometry, (short, files.files[1]), files.layouts)
    for direct in (False, True):
        with transfers(cut, 4, direct=direct) as (pool, _):
            pool.fetch(0, 0, demand=True)
            with pytest.raises(DaopError, match="the file ends at byte"):
                pool.wait_any([pool.ticket(0)])


def test_direct_io_refused_by_the_file_system_names_the_flag(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DaopError, match="--direct-io"):
        FileReader(files.files, direct_io=True, largest=256)


def test_the_next_reader_takes_over_the_bounce_buffers_of_a_closed_one(tmp_path: Path) -> None:
    """Runs that are compared in one process read into the same pages."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)

    readers = []  # kept, so that what they hold is not given back to the system

    def read() -> int:
        reader = FileReader([path], direct_io=True, largest=777 * 16)
        readers.append(reader)
        out = np.zeros(1000, dtype=np.uint8)
        try:
            reader.read(0, 5, out)
        finally:
            reader.close()
        assert bytes(out[:3]) == bytes([5, 6, 7])
        return int(reader._local.array.ctypes.data)

    assert read() == read()


def reading(pool: FileTransfers, wanted: int) -> int:
    """Chunks being read, once they are as many as wanted and had time to become more."""
    for _ in range(500):
        if pool._reading >= wanted:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    return pool._reading


def test_speculation_leaves_threads_for_a_demand(files: Files) -> None:
    """Two of five threads may speculate; a prefetch that becomes a demand is read by all."""
    gate = Gate(FileReader(files.files, direct_io=False, largest=256))
    with transfers(files, EXPERTS, reader=gate, threads=5, chunk=64) as (pool, memory):
        pool.fetch(0, 0, demand=False)
        pool.kick()
        assert reading(pool, 2) == 2
        pool.promote(0)
        assert reading(pool, 5) == 5
        gate.opened.set()
        pool.wait_any([pool.ticket(0)])
        assert content(memory.slabs[0].array[0]) == expected(files, 0)
        assert pool._ahead == 0
