from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from daop.config import RunConfig, fast_memory_bytes, policy_options
from daop.core import DaopError
from daop.machine import Cpu


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": ""}, "no model"),
        ({"ecr": 0.5, "fast_memory": 1}, "not both"),
        ({"ecr": -0.1}, "--ecr"),
        ({"ecr": float("nan")}, "--ecr"),
        ({"fast_memory": -5}, "--fast-memory"),
        ({"fast_memory": "many"}, "--fast-memory"),
        ({"dtype": "int3"}, "--dtype int3.*bfloat16"),
        ({"threads": 0}, "--threads"),
        ({"threads": 1_000_000}, "--threads.*at most"),
        ({"context": 0}, "--context"),
        ({"batch": -1}, "--batch"),
        ({"seed": -1}, "--seed"),
        ({"ercr": 0.5}, "unknown option ercr; known: batch"),
    ],
)
def test_nonsense_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DaopError, match=words):
        RunConfig.from_mapping({"model": "m"} | options)


def test_resolving_gives_a_new_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = RunConfig.from_mapping({"model": "m", "fast_memory": "2GiB"})
    cpu = Cpu(name="x", threads=8, cores=4, quota=None, flags=())
    assert config.fast_memory == 2 << 30
    assert (config.threads, config.resolved(cpu).threads) == (None, 4)
    assert dataclasses.replace(config, threads=3).resolved(cpu).threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert config.resolved(cpu).threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")  # of nested loops
    assert config.resolved(cpu).threads == 2
    assert "model" not in config.load_options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_values_of_flags() -> None:
    assert fast_memory_bytes(None) is None
    assert fast_memory_bytes(" AUTO ") is None
    assert policy_options(["ahead=3", "name=a=b", "on=true"]) == {"ahead": 3, "name": "a=b", "on": True}
    with pytest.raises(DaopError, match="NAME=VALUE"):
        policy_options(["ahead"])
