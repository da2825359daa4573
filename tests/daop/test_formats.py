"""Formats side by side: bytes, shares and bits change together; nothing else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_packing_cli import trace_of_demo

from daop import comparison
from daop.core import DaopError
from daop.formats import BITS, formats_of, in_formats


def test_half_the_bits_give_twice_the_share() -> None:
    recorded = trace_of_demo()
    settings = comparison.settings("rtx4090", [0.25, 0.9], 1, 16.0)
    keep, int8 = in_formats(["keep", "int8"], recorded, settings)
    assert keep == ("keep", recorded, settings)
    name, traffic, fitting = int8
    share = BITS["int8"] / 16
    before, after = recorded.traffic.geometry, traffic.traffic.geometry
    assert name == "int8"
    assert after.expert_bytes[0] == round(before.expert_bytes[0] * share)
    assert [setting.ecr for setting in fitting] == [0.25 / share, 1.0]
    assert {setting.weight_bits for setting in fitting} == {BITS["int8"]}
    slow, fast = (
        comparison.simulate(one.traffic, None, chosen[0], ["lru"], lambda *_: None)
        for one, chosen in ((recorded, settings), (traffic, fitting))
    )
    rate: Any = {True: slow, False: fast}
    assert rate[False][0]["tokens_per_second"] > rate[True][0]["tokens_per_second"]


def test_what_is_no_format() -> None:
    assert formats_of("keep, int8,int8") == ["keep", "int8"]
    with pytest.raises(DaopError, match="--format zip is not known; known: keep, int8"):
        formats_of("zip")
    with pytest.raises(DaopError, match="names no format"):
        formats_of(" ")
    two: Any = [SimpleNamespace(weight_bits=16.0), SimpleNamespace(weight_bits=4.25)]
    recorded: Any = None
    with pytest.raises(DaopError, match="one --weight-bits"):
        list(in_formats(["int8"], recorded, two))
