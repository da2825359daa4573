"""Limits of containers, read from file trees as different machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from daop.cgroups import cpu_quota, memory_limits
from daop.machine import read_cpu, read_disk, read_memory

GIB = 1 << 30
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = (
    "33 32 0:30 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 32 0:31 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
)


def tree(root: Path, files: dict[str, str]) -> Path:
    usual = {"proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 16777216 kB\n"}
    for name, text in (usual | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups_the_available_ram_counts(tmp_path: Path) -> None:
    memory = read_memory(tree(tmp_path, {}))
    assert (memory.total, memory.usable, memory.source) == (32 * GIB, 16 * GIB, "available RAM")


def test_version_2_seen_from_inside_a_container(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
    )
    memory = read_memory(root)
    assert memory.usable == 3 * GIB, "cached file pages are given back when needed"
    assert memory.source == "container limit in /sys/fs/cgroup/memory.max"
    assert cpu_quota(root) == 1.5
    assert read_cpu(root, affinity=frozenset(range(8))).threads == 2


def test_version_2_nested_the_tightest_counts_and_max_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod7/box\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/kubepods/pod7/box/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod7/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod7/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod7/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{12 * GIB}\n",
            "sys/fs/cgroup/kubepods/memory.current": f"{11 * GIB + GIB // 2}\n",
        },
    )
    assert {limit.left for limit in memory_limits(root)} == {GIB, GIB // 2}
    assert read_memory(root).usable == GIB // 2, "neighbours in the outer group leave less than the own limit"
    assert cpu_quota(root) is None


@pytest.mark.parametrize(("top", "group"), [("/", ""), ("/docker/abc", ""), ("/", "docker/abc")])
def test_version_1_as_hosts_and_containers_show_it(tmp_path: Path, top: str, group: str) -> None:
    memory = f"sys/fs/cgroup/memory/{group}/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n",
            "proc/self/mountinfo": V1.format(top=top),
            f"{memory}.limit_in_bytes": f"{GIB}\n",
            f"{memory}.usage_in_bytes": f"{GIB // 2}\n",
            f"{memory}.stat": "inactive_file 99\ntotal_inactive_file 0\ntotal_active_file 4096\n",
            f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us": "50000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_memory(root).usable == GIB // 2 + 4096
    assert cpu_quota(root) == 0.5
    assert read_cpu(root, affinity=frozenset({0, 1})).threads == 1


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n5:cpu,cpuacct:/\n",
            "proc/self/mountinfo": V1.format(top="/"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limits(root) == []
    assert cpu_quota(root) is None


def test_a_path_that_climbs_out_is_not_followed(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "machine",
        {
            "proc/self/cgroup": "0::/../../secret\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/memory.max": "max\n",
        },
    )
    (tmp_path / "machine/sys/secret").mkdir()
    (tmp_path / "machine/sys/secret/memory.max").write_text("1")
    assert memory_limits(root) == []


def test_cores_are_told_from_their_siblings(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "model name : Some CPU\nflags : sse avx2 fma avx512f\n"}
    for number in range(8):
        folder = f"sys/devices/system/cpu/cpu{number}/topology"
        files |= {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{number // 2}\n"}
    root = tree(tmp_path, files)
    cpu = read_cpu(root, affinity=frozenset({0, 1, 2, 3, 6}))
    assert (cpu.threads, cpu.cores, cpu.name) == (5, 3, "Some CPU")
    assert cpu.flags == ("avx2", "fma", "avx512f")


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    assert 0 < read_memory().usable <= read_memory().total
    assert 1 <= read_cpu().cores <= read_cpu().threads
    disk = read_disk(tmp_path / "not" / "there" / "yet")
    assert 0 < disk.free <= disk.total
