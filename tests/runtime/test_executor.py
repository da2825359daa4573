"""The executor on the device ``host``: policies, budgets, delays and faults change time, never the output."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import save_tiny

import daop.runtime.machinery
from daop.api import Runtime, load
from daop.core import DaopError, Forecast, Phase, Step
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.conductor import Conductor
from daop.runtime.files import FileReader
from daop.runtime.host_compute import HostExperts
from daop.runtime.host_executor import HostExecutor
from daop.runtime.model import build_model
from daop.runtime.policies.base import POLICIES, Plan, Policy, Prefetch, View
from daop.runtime.policies.lru import Lru
from daop.runtime.reference import reference_experts
from daop.runtime.transfers import FileTransfers

PROMPTS = ([5, 17, 2, 44, 9, 61, 30], [12, 3, 3], [80, 7, 21, 55])
STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """Greedy tokens of the plain path, each prompt alone."""
    checkpoint = open_checkpoint(model)
    built = build_model(checkpoint, lambda *call: reference_experts(checkpoint, built.forms)(*call))
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens = built.model.generate(ids, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
        out.append(tokens[0, len(prompt) :].tolist())
    return out


def tokens(runtime: Runtime, batch: int = 1) -> list[list[int]]:
    groups = [PROMPTS[i : i + batch] for i in range(0, len(PROMPTS), batch)]
    return [answer.token_ids for group in groups for answer in runtime.generate(group, STEPS)]


def slots(model: Path, count: int) -> int:
    """Bytes of so many slots."""
    return count * open_checkpoint(model).layouts[0].nbytes


CASES = [
    *((name, 7) for name, kind in POLICIES.items() if kind.exact and not kind.needs_future),
    *((policy, count) for policy in ("lru", "static", "speculative") for count in (0, 1, 3, 18)),
]


@pytest.mark.parametrize(("policy", "count"), CASES)
def test_every_policy_and_budget_gives_the_reference_tokens(
    model: Path, reference: list[list[int]], policy: str, count: int
) -> None:
    with load(model, policy=policy, fast_memory=slots(model, count)) as runtime:
        assert tokens(runtime) == reference
        assert tokens(runtime, batch=3) == reference
        figures = runtime.statistics()
        requests = figures["requests"]
        assert figures["slots"] == count
        if count == 0:
            assert requests["hits"] == 0
        assert requests["hits"] + requests["misses"] + requests["late"] > 0
        assert sum(len(layer) for layer in runtime.hot_set()) <= count


def test_a_policy_that_needs_the_future_is_refused(model: Path) -> None:
    with pytest.raises(DaopError, match="optimum must know the future"):
        load(model, policy="optimum")


def test_logits_do_not_depend_on_placement(model: Path) -> None:
    """Bit for bit: what is resident, and in what order the rest arrives, must not move a single rounding."""
    ids = torch.tensor([PROMPTS[0]])
    seen = []
    for policy in ("on_demand", "lru", "static", "speculative"):
        for count in (0, 5, 18):
            with load(model, policy=policy, fast_memory=slots(model, count)) as runtime:
                for _ in range(2):
                    seen.append(runtime.model(ids).logits)
    for other in seen[1:]:
        assert torch.equal(seen[0], other)


@contextmanager
def reader_of(make: Callable[[FileReader], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runtimes made inside read through ``make(FileReader)``."""

    class Wrapped(FileReader):
        def __init__(self, files: Sequence[Path], *, direct_io: bool, largest: int) -> None:
            super().__init__(files, direct_io=direct_io, largest=largest)
            self._inner = FileReader(files, direct_io=direct_io, largest=largest)
            self._outer = make(self._inner)

        def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
            self._outer.read(file, offset, out)  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(daop.runtime.machinery, "FileReader", Wrapped)
        yield


class Slow:
    """Reads after a random while, so that experts arrive in any order."""

    def __init__(self, inner: FileReader, seed: int) -> None:
        self.inner, self.random, self.lock = inner, random.Random(seed), threading.Lock()

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        with self.lock:
            pause = self.random.choice((0.0, 0.0, 0.0005, 0.003))
        time.sleep(pause)
        self.inner.read(file, offset, out)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["speculative", "lru", "static"])
def test_arrival_in_any_order_changes_nothing(
    model: Path, reference: list[list[int]], policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        reader_of(lambda inner: Slow(inner, seed), monkeypatch),
        load(model, policy=policy, fast_memory=slots(model, 5)) as runtime,
    ):
        assert tokens(runtime, batch=3) == reference


class AlwaysWrong(Lru):
    """Prefetches what the router announces least, and gives up live entries for it."""

    horizon = 2

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        asked = []
        for forecast in forecasts:
            base = self.geometry.offsets[forecast.layer]
            asked += [Prefetch(base + int(expert), 1.0) for expert in np.argsort(forecast.scores)[:3]]
        self._recency.use([prefetch.flat for prefetch in asked])
        return asked


def test_an_always_wrong_forecast_changes_nothing_but_time(model: Path, reference: list[list[int]]) -> None:
    with load(model, policy=AlwaysWrong(), fast_memory=slots(model, 9)) as runtime:
        assert tokens(runtime) == reference
        assert tokens(runtime, batch=3) == reference
        figures = runtime.statistics()
    assert figures["prefetches"]["issued"] > 0
    assert figures["bytes"]["wasted"] > 0


class Failing:
    """Fails every read while ``broken``."""

    def __init__(self, inner: FileReader) -> None:
        self.inner, self.broken = inner, False

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
        self.inner.read(file, offset, out)


@pytest.mark.parametrize("policy", ["on_demand", "lru", "static", "speculative"])
def test_a_read_error_mid_run_is_told_and_the_next_run_is_right(
    model: Path, reference: list[list[int]], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[Failing] = []

    def make(inner: FileReader) -> Failing:
        readers.append(Failing(inner))
        return readers[-1]

    with reader_of(make, monkeypatch), load(model, policy=policy, fast_memory=slots(model, 5)) as runtime:
        assert tokens(runtime) == reference
        readers[-1].broken = True
        with pytest.raises(DaopError, match="cannot read expert"):
            tokens(runtime)
        readers[-1].broken = False
        assert tokens(runtime) == reference


class FailsOnce:
    """While ``slow``, reads take long; the one that is ``armed`` fails at once, with the others under way."""

    def __init__(self, inner: FileReader) -> None:
        self.inner, self.armed, self.slow, self.lock = inner, False, False, threading.Lock()
        self.active = 0

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        with self.lock:
            fails, self.armed = self.armed, False
            self.active += not fails
        if fails:
            raise OSError(5, "Input/output error")
        time.sleep(0.1 if self.slow else 0.0)
        self.inner.read(file, offset, out)
        with self.lock:
            self.active -= 1


def test_reads_left_over_from_a_broken_run_cannot_reach_the_next(
    model: Path, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[FailsOnce] = []

    def make(inner: FileReader) -> FailsOnce:
        readers.append(FailsOnce(inner))
        return readers[-1]

    with reader_of(make, monkeypatch), load(model, policy="static", fast_memory=0) as runtime:
        for _ in range(3):
            readers[-1].armed = readers[-1].slow = True
            with pytest.raises(DaopError, match="cannot read expert"):
                runtime.generate([PROMPTS[2]], 1)
            assert readers[-1].active == 0  # no read is left that could write into a buffer used anew
            readers[-1].slow = False
            assert runtime.generate([PROMPTS[0]], 3)[0].token_ids == reference[0][:3]


PLACES = [
    (Lru, "plan"),
    (Lru, "victims"),
    (Lru, "observe"),
    (HostExperts, "run"),
    (HostExperts, "finish"),
    (HostExecutor, "_check"),
    (HostExecutor, "_charge"),
    (FileTransfers, "wait_any"),
    (FileTransfers, "kick"),
    (Conductor, "look_ahead"),
    (Conductor, "arrived"),
]


WRONG: dict[str, Any] = {
    "start": lambda *_: [18],
    "plan": lambda *_: Plan(),
    "victims": lambda *_: [0, 0],
    "look_ahead": lambda *_: [Prefetch(99, 1.0)],
}


@pytest.mark.parametrize("asked", WRONG)
def test_a_policy_that_answers_wrongly_is_named(model: Path, asked: str) -> None:
    mine = type("Mine", (Lru,), {asked: staticmethod(WRONG[asked]), "horizon": 1})
    with (
        pytest.raises(DaopError, match="policy Mine gave an answer that it may not give"),
        load(model, policy=mine(), fast_memory=slots(model, 4)) as runtime,
    ):
        runtime.generate([PROMPTS[0]], STEPS)


def until_it_breaks(runtime: Runtime) -> None:
    while True:
        runtime.generate([PROMPTS[0]], STEPS)
        runtime._executor._checked[:] = bytes(len(runtime._executor._checked))


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_a_run_that_breaks_off_anywhere_leaves_the_next_one_right(
    model: Path, reference: list[list[int]], kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a policy of somebody's own that raises, and the person goes on in the same process."""
    ours, left = getattr(kind, name), [1 << 30]

    def breaks(*given: Any, **named: Any) -> Any:
        found = ours(*given, **named)
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(kind, name, breaks)
    with load(model, policy="lru", fast_memory=slots(model, 5)) as runtime:
        residency = runtime._machinery.residency
        for after in (0, 1, 2, 5, 11, 30):
            left[0] = after
            with pytest.raises(KeyboardInterrupt):
                until_it_breaks(runtime)
            left[0] = 1 << 30
            assert not residency.filling.any()
            assert not residency.protected.any()
            assert residency.used_slots == int(residency.resident.sum()) <= 5
            assert tokens(runtime) == reference


def test_a_stale_slot_would_show(model: Path, reference: list[list[int]]) -> None:
    """Slots and staging are poisoned with NaN: any byte computed before it was read ends in NaN."""
    with load(model, policy="speculative", fast_memory=slots(model, 6)) as runtime:
        memory = runtime._machinery.memory  # type: ignore[attr-defined]
        for slab in (*memory.slabs, *memory.staging):
            slab.array[:] = 0xFF
        assert tokens(runtime) == reference


def test_prefill_reads_an_expert_at_most_once_per_layer(model: Path) -> None:
    with load(model, policy="static", fast_memory=0) as runtime:
        runtime.reset_statistics()
        prompt = list(np.random.default_rng(0).integers(1, 80, 60))
        runtime.generate([prompt], 1)
        figures = runtime.statistics()
        total = int(runtime.geometry.bytes_of.sum())
    assert figures["bytes"]["read"] <= total


def test_statistics_agree_with_the_bytes_that_were_read(model: Path) -> None:
    with load(model, policy="lru", fast_memory=slots(model, 6)) as runtime:
        runtime.reset_statistics()
        tokens(runtime)
        figures = runtime.statistics()
    assert figures["bytes"]["demand"] == figures["bytes"]["read"]
    assert figures["requests"]["misses"] * runtime.geometry.expert_bytes[0] == figures["bytes"]["read"]
    assert figures["hit_rate"] == pytest.approx(
        figures["requests"]["hits"] / sum(figures["requests"].values()), abs=0.3
    )


def test_phases_are_told_apart(model: Path) -> None:
    seen: list[tuple[Phase, int]] = []

    class Note(Policy):
        def begin(self, phase: Phase, rows: int) -> None:
            seen.append((phase, rows))

    with load(model, policy=Note(), fast_memory=0) as runtime:
        runtime.generate(PROMPTS, 3)
    longest = max(len(prompt) for prompt in PROMPTS)
    assert seen == [(Phase.PREFILL, 3 * longest), (Phase.DECODE, 3), (Phase.DECODE, 3)]
