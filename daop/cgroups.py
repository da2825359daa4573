"""Limits that a container puts on this process: Linux control groups, versions 1, 2 and both at once.

A group's limit binds everything in the groups below it, so every group from the process's own up to the
top is looked at. Inside a container the top of the tree may be a group of the host: where the path that
/proc names is not visible, the mounted folder itself is the container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 says 'no limit' by a number of about 2**63."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A line of /proc/self/mountinfo. ``top``: the folder of the file system that is mounted at ``at``."""

    number: str
    top: str
    at: str
    kind: str
    device: str
    options: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """``left``: bytes that may still be allocated under the limit of this group; caches count as free."""

    file: str
    limit: int
    left: int


def mounts(root: Path) -> list[Mount]:
    """What is mounted, in the order of mounting."""
    found = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        if len(fields) >= 5 and len(more) >= 3:
            found.append(
                Mount(
                    number=fields[2],
                    top=fields[3],
                    at=fields[4],
                    kind=more[0],
                    device=more[1],
                    options=frozenset(more[2].split(",")),
                )
            )
    return found


def memory_limits(root: Path) -> list[MemoryLimit]:
    """Every memory limit that binds this process."""
    found = []
    for folder, version in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else _V1_MEMORY
        limit = _number(folder / names[0])
        if limit is None or limit >= UNLIMITED:
            continue
        used = _number(folder / names[1]) or 0
        stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if " " in line)
        prefix = "" if version == 2 else "total_"
        cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
        left = max(0, limit - max(0, used - cached))
        shown = "/" + str((folder / names[0]).relative_to(root))
        found.append(MemoryLimit(file=shown, limit=limit, left=left))
    return found


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def cpu_quota(root: Path) -> float | None:
    """Processors' worth of time that this process may use, or None if nothing limits it."""
    quotas = []
    for folder, version in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(folder / "cpu.max").partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of the groups around this process that may limit ``controller``, and their version."""
    mounted = mounts(root)
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, wanted = 2, [mount for mount in mounted if mount.kind == "cgroup2"]
        elif controller in controllers.split(","):
            version = 1
            wanted = [m for m in mounted if m.kind == "cgroup" and controller in m.options]
        else:
            continue
        for mount in wanted[:1]:
            base = root / mount.at.lstrip("/")
            for folder in _upwards(path, mount.top):
                if (base / folder).is_dir():
                    yield base / folder, version


def _upwards(path: str, top: str) -> list[str]:
    """Relative folders from a group's own up to what is mounted; just the latter if it lies elsewhere."""
    group, mounted = PurePosixPath(path), PurePosixPath(top)
    if ".." in group.parts or not group.is_relative_to(mounted):
        return ["."]
    inside = group.relative_to(mounted)
    return [str(inside), *(str(parent) for parent in inside.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None
