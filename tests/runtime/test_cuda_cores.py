"""Threads on cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daop.machine import physical_cores

CHECK = """
import os
import torch
from daop.runtime.cuda.cores import CoreBinding, bind_workers
torch.set_num_threads(2)
before = os.sched_getaffinity(0)
print(bind_workers())
assert os.sched_getaffinity(0) == before, "the caller stays free"
found = {}
for task in os.listdir("/proc/self/task"):
    found[task] = os.sched_getaffinity(int(task))
print(sum(len(cores) == 1 for cores in found.values()))
CoreBinding(enabled=False).bind()
"""


@pytest.mark.skipif(len(physical_cores()) < 2, reason="needs two cores")
def test_workers_are_bound_and_the_caller_is_not() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "2"},
    )
    bound, single = done.stdout.split("\n")[:2]
    if bound == "[]":
        pytest.skip("torch here runs on no OpenMP that can be asked")
    assert bound == str(physical_cores()[1:2])
    assert int(single) >= 1


def test_one_processor_of_every_core(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(str(number % 4 // 2))
        (folder / "core_id").write_text(str(number % 2))
    assert physical_cores(tmp_path, frozenset(range(8))) == [0, 1, 2, 3]
    assert physical_cores(tmp_path, frozenset({1, 5, 6})) == [1, 6]
    assert physical_cores(tmp_path / "nothing", frozenset({3, 4})) == [3, 4]
