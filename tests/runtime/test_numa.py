"""Host memory: huge pages, and pages that alternate between memory nodes, as the kernel itself reports it."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from daop.runtime import numa
from daop.runtime.layout import ExpertLayout
from daop.runtime.slots import Slab

LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="Linux's own files are read")


def machine(root: Path, nodes: dict[int, str], allowed: str) -> Path:
    """A tree of files as a machine has it whose ``nodes`` own these processors."""
    files = {
        "sys/devices/system/node/has_memory": ",".join(map(str, nodes)),
        "proc/self/status": f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n",
    }
    files |= {f"sys/devices/system/node/node{node}/cpulist": cpus for node, cpus in nodes.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What the kernel was asked for, where it says yes to everything."""
    calls: list[tuple[int, ...]] = []

    def agree(memory: NDArray[np.uint8], nodes: tuple[int, ...]) -> str:
        calls.append(nodes)
        return ""

    monkeypatch.setattr(numa, "interleave", agree)
    monkeypatch.setattr(numa, "own_policy", lambda: numa.MPOL_DEFAULT)
    return calls


def maps_of(memory: NDArray[np.uint8]) -> str:
    """The kernel's line about the mapping in which ``memory`` lies (neighbours of a kind are one mapping)."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line for line in lines if int(line.split()[0], 16) <= memory.ctypes.data][-1]


@pytest.mark.parametrize(
    ("nodes", "allowed", "affinity", "spread", "said"),
    [
        ({0: "0-3"}, "0", range(4), (), "one memory node"),
        ({}, "0", range(4), (), "one memory node"),
        ({0: "0-3,8-11", 1: "4-7,12-15"}, "0-1", range(16), (0, 1), "between nodes 0, 1"),
        ({0: "0-3", 1: "4-7"}, "1", range(8), (), "one memory node"),
        ({0: "0-3", 1: "4-7"}, "0-1", range(4, 6), (), "belong to node 1"),
        ({0: "", 1: "4-7", 2: "0-3"}, "0-2", range(8), (1, 2), "between nodes 1, 2"),
        ({0: "0-3", 1: "4-7"}, "0-1", (99,), (), "no node with memory"),
    ],
)
def test_what_is_spread_over_which_nodes(
    tmp_path: Path,
    asked: list[tuple[int, ...]],
    nodes: dict[int, str],
    allowed: str,
    affinity: range | tuple[int, ...],
    spread: tuple[int, ...],
    said: str,
) -> None:
    got = numa.decide(machine(tmp_path, nodes, allowed), frozenset(affinity))
    assert got.nodes == spread
    assert said in got.said
    assert asked == ([spread] if spread else [])


def test_a_policy_from_outside_stays(
    tmp_path: Path, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "own_policy", lambda: 2)
    got = numa.decide(machine(tmp_path, {0: "0", 1: "1"}, "0-1"), frozenset((0, 1)))
    assert (got.nodes, got.present, asked) == ((), (0, 1), [])
    assert "memory policy" in got.said


def test_a_kernel_that_refuses_is_said_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "_call", lambda *_: "Operation not permitted")
    got = numa.decide(machine(tmp_path, {0: "0", 1: "1"}, "0-1"), frozenset((0, 1)))
    assert got.nodes == ()
    assert "Operation not permitted" in got.said
    assert "numactl" in got.said


@LINUX
def test_pages_that_alternate_are_the_kernels_policy_of_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = numa.memory_nodes(Path("/"))
    if not nodes or numa.interleave(numa.map_memory(1), nodes[:1]):
        pytest.skip("this kernel knows no memory nodes, or lets nobody place memory")
    chosen = numa.Placement(nodes=nodes, present=nodes, said="")
    monkeypatch.setattr(numa, "placement", lambda: chosen)
    slab = Slab(ExpertLayout.pack([("down", (64, 64), "F32")]), 5)
    slab.array[:] = 7
    assert f"interleave:{nodes[0]}" in maps_of(slab.array)
    assert bool((slab.tensor == 7).all())


@LINUX
def test_memory_is_private_and_asks_for_huge_pages() -> None:
    memory = numa.map_memory(4 << 20)
    memory[:] = 1
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            inside = first <= memory.ctypes.data < last
        elif inside and name == "VmFlags:":
            flags = rest
    assert flags
    assert "sh" not in flags, "the kernel gives shared memory no huge pages by itself"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


@pytest.mark.parametrize(
    ("text", "expected"), [("always [madvise] never", True), ("always madvise [never]", False), ("", None)]
)
def test_whether_there_are_huge_pages(tmp_path: Path, text: str, expected: bool | None) -> None:
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert numa.huge_pages(tmp_path) is expected


def test_no_bytes_are_memory_too() -> None:
    assert numa.map_memory(0).shape == (0,)


@given(st.frozensets(st.integers(0, 300)))
def test_lists_as_linux_writes_them(numbers: frozenset[int]) -> None:
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n for n in numbers if n + 1 not in numbers)
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    assert numa.parse_list(",".join(spans) + "\n") == numbers
