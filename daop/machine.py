"""What this machine is and what of it this process may use: cores, memory, disks, accelerators.

Reads Linux's own files. ``root`` stands for ``/`` in the tests, which bring file trees of other machines.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from daop import cgroups

ROOT = Path("/")
FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "bf16", "i8mm", "sve"),
)
"""The instruction sets that matter to matrix products, of x86-64 and of Arm."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of RAM. ``usable`` is what this process may still allocate, ``source`` who limits it."""

    total: int
    available: int
    usable: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """``threads`` is how many may run at once here (affinity, quota), ``cores`` how many of these are
    cores rather than siblings of one."""

    name: str
    threads: int
    cores: int
    quota: float | None
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file system that holds ``path``. ``in_memory``: tmpfs and the like."""

    path: str
    filesystem: str
    device: str
    total: int
    free: int
    rotational: bool | None
    in_memory: bool


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device as torch sees it."""

    name: str
    total: int
    free: int
    capability: str


def read_memory(root: Path = ROOT) -> Memory:
    """RAM and the tightest limit on it: the machine's own, or that of a container around the process."""
    fields = _fields(root / "proc/meminfo")
    total = _kib(fields.get("MemTotal", "0"))
    available = _kib(fields.get("MemAvailable", fields.get("MemFree", "0")))
    usable, source = available, "available RAM"
    for limit in cgroups.memory_limits(root):
        if limit.left < usable:
            usable, source = limit.left, f"container limit in {limit.file}"
    return Memory(total=total, available=available, usable=usable, source=source)


def read_cpu(root: Path = ROOT, affinity: frozenset[int] | None = None) -> Cpu:
    """``affinity``: the processors this process may run on; by default what the kernel says."""
    allowed = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    quota = cgroups.cpu_quota(root)
    siblings = _siblings(root, allowed)
    fields = _fields(root / "proc/cpuinfo")
    has = set((fields.get("flags") or fields.get("Features") or "").split())
    threads = len(allowed) if quota is None else max(1, min(len(allowed), int(quota + 0.999)))
    return Cpu(
        name=fields.get("model name") or platform.machine(),
        threads=threads,
        cores=min(threads, len(siblings)),
        quota=quota,
        flags=tuple(flag for flag in FLAGS if flag in has),
    )


def asked_threads() -> int:
    """What OMP_NUM_THREADS asks for; 0 if nothing (of a list, the first: that of the outermost loop)."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdigit() else 0


def physical_cores(root: Path = ROOT, affinity: frozenset[int] | None = None) -> list[int]:
    """One processor of every core that this process may use, ascending."""
    allowed = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    return sorted(_siblings(root, allowed).values())


def _siblings(root: Path, allowed: frozenset[int]) -> dict[tuple[str, ...], int]:
    """Cores, and the first processor of each that is allowed."""
    found: dict[tuple[str, ...], int] = {}
    for number in sorted(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        ids = tuple(_text(topology / name) for name in ("physical_package_id", "core_id"))
        found.setdefault(ids if all(ids) else (str(number),), number)
    return found


def read_disk(path: str | Path, root: Path = ROOT) -> Disk:
    """The disk under ``path``; for a path that is not there yet, under its nearest ancestor."""
    place = Path(path).expanduser().resolve()
    while not place.exists():
        place = place.parent
    status, space = place.stat(), os.statvfs(place)
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    filesystem, device = "unknown", number
    for mount in cgroups.mounts(root):
        if mount.number == number:
            filesystem, device = mount.kind, mount.device
    block = root / f"sys/dev/block/{number}"
    spins = _text(block / "queue/rotational") or _text(block / "../queue/rotational")
    return Disk(
        path=str(place),
        filesystem=filesystem,
        device=device,
        total=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        rotational=None if not spins else spins == "1",
        in_memory=filesystem in ("tmpfs", "ramfs"),
    )


def read_gpus() -> list[Gpu]:
    """CUDA devices; empty without torch, without a driver, or with a build of torch for CPUs."""
    if util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found.append(Gpu(name=name, total=total, free=free, capability=f"{major}.{minor}"))
    return found


def version_of(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, str]:
    """``name: value`` lines, the first of each name."""
    found: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _kib(value: str) -> int:
    return int(value.split()[0]) * 1024
