"""Host memory for experts: mapped, in huge pages, and spread over the memory nodes whose processors compute.

On a machine with several memory nodes (sockets, or parts of one), memory lies where it was touched first:
with whichever thread read an expert from disk. Kernels hand tiles of rows to whoever comes next, so no row
has a thread that could touch it first for its own sake. Pages that alternate between the nodes fit that:
every thread finds the same mix of near and far pages, and all nodes' bandwidth serves every expert.

Memory is left as the system places it where there is nothing to gain or somebody has decided: one node; a
process bound to one node's processors; a process that was started under a memory policy (numactl); a kernel
that refuses, as containers without CAP_SYS_NICE do. ``placement`` says which.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path("/")
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
# Numbers of the system calls mbind and get_mempolicy, which glibc does not wrap.
CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
REMEDY = "numactl --interleave=all does it from outside, as does the capability SYS_NICE for a container"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """``nodes``: those that experts' pages alternate between, or () if they are left where they fall;
    ``present``: those that have memory for this process; ``said``: why, in words."""

    nodes: tuple[int, ...]
    present: tuple[int, ...]
    said: str


def map_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that begins at a page and costs nothing until it is touched. It is private, since the
    kernel gives huge pages to shared memory only where an administrator asked for it."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    nodes = placement().nodes
    if nodes:
        interleave(array, nodes)
    return array[:nbytes]


@cache
def placement() -> Placement:
    """What becomes of experts' memory here; decided once."""
    return decide(
        ROOT, frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    )


def decide(root: Path, affinity: frozenset[int]) -> Placement:
    """The same for the tree of files under ``root`` and a process that may run on ``affinity``."""
    present = memory_nodes(root)
    if len(present) < 2:
        return Placement(nodes=(), present=present, said="one memory node: nothing to spread")
    near = tuple(node for node in present if affinity & processors_of(root, node))
    if len(near) < 2:
        one = f"node {near[0]}" if near else "no node with memory"
        said = f"left where they fall: the processors that this process may use belong to {one}"
        return Placement(nodes=(), present=present, said=said)
    policy = own_policy()
    if policy not in (MPOL_DEFAULT, None):
        said = "left to the memory policy that this process was started with"
        return Placement(nodes=(), present=present, said=said)
    refusal = interleave(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.uint8), near)
    if refusal:
        said = f"left where they fall: the kernel does not let them be spread ({refusal}); {REMEDY}"
        return Placement(nodes=(), present=present, said=said)
    said = f"pages alternate between nodes {', '.join(map(str, near))}"
    return Placement(nodes=near, present=present, said=said)


def huge_pages(root: Path = ROOT) -> bool | None:
    """Whether ``map_memory`` gets huge pages, as long as some are free; None if the system does not say."""
    words = _text(root / "sys/kernel/mm/transparent_hugepage/enabled").split()
    return "[never]" not in words if words else None


def memory_nodes(root: Path) -> tuple[int, ...]:
    """Nodes that have memory which this process may use, ascending; () where the system does not say."""
    having = parse_list(_text(root / "sys/devices/system/node/has_memory"))
    for line in _text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            having &= parse_list(value)
    return tuple(sorted(having))


def processors_of(root: Path, node: int) -> frozenset[int]:
    return parse_list(_text(root / f"sys/devices/system/node/node{node}/cpulist"))


def parse_list(text: str) -> frozenset[int]:
    """Linux's lists of numbers: "0-3,8" and the like."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def interleave(memory: NDArray[np.uint8], nodes: tuple[int, ...]) -> str:
    """Ask that pages of ``memory`` (which begins at one) that are not there yet alternate between ``nodes``.
    Returns what the kernel says against it, '' if nothing."""
    words = [0] * (max(nodes) // WORD + 1)
    for node in nodes:
        words[node // WORD] |= 1 << node % WORD
    mask = (ctypes.c_ulong * len(words))(*words)
    length = -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    count = WORD * len(words) + 1  # the kernel looks at one bit less than it is told
    return _call(0, memory.ctypes.data, length, MPOL_INTERLEAVE, ctypes.addressof(mask), count, 0)


def own_policy() -> int | None:
    """The calling thread's memory policy; None if the kernel does not say."""
    mode = ctypes.c_int(MPOL_DEFAULT)
    return None if _call(1, ctypes.addressof(mode), 0, 0, 0, 0) else mode.value


def _call(which: int, *arguments: int) -> str:
    """A system call of ``CALLS``; what is wrong, or ''."""
    numbers = CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux" or WORD != 64:
        return f"not known how on {platform.system()} {platform.machine()}"
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(numbers[which]), *map(ctypes.c_long, arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
