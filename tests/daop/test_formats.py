"""Formats side by side: bytes, shares, bits and costs change together; nothing else does."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_packing_cli import trace_of_demo

from daop import comparison
from daop.core import DaopError, Geometry
from daop.formats import InFormat, formats_of, in_format, in_formats, machine_for, share_that_fits
from daop.hardware import HardwareProfile, load, parse, render
from daop.report.ranking import best_by_format, beyond_optimum, footnotes
from daop.runtime.costs import HardwareCosts
from daop.runtime.format_costs import Curve
from daop.runtime.format_names import BITS, PAGE, format_of_bits


def curve(name: str, nbytes: int, *microseconds: float) -> Curve:
    return Curve(
        format=name,
        nbytes=nbytes,
        tokens=(1, 4, 16, 17, 64, 256)[: len(microseconds)],
        microseconds=microseconds,
        source="a test",
    )


def calibrated(*curves: Curve, tier: str = "host") -> HardwareProfile:
    plain = dataclasses.replace(load("rtx4090"), shares={}, weight_bits=16.0)
    return dataclasses.replace(
        plain, hardware=dataclasses.replace(plain.hardware, tier=tier, curves=tuple(curves))
    )


def speed(part: InFormat) -> float:
    row = comparison.simulate_one(part.recorded.traffic, None, part.settings[0], "lru")
    return float(row["tokens_per_second"])


def test_half_the_bits_give_twice_the_share() -> None:
    recorded = trace_of_demo()
    settings = comparison.settings("rtx4090", [0.25, 0.9], 1, 16.0)
    keep, int8 = in_formats(["keep", "int8"], recorded, settings)
    assert (keep.name, keep.recorded) == ("keep", recorded)
    assert [setting.ecr for setting in keep.settings] == [0.25, 0.9]
    before, after = recorded.traffic.geometry, int8.recorded.traffic.geometry
    assert after.expert_bytes[0] == -(-round(before.expert_bytes[0] * 8.25 / 16) // PAGE) * PAGE
    assert [round(setting.ecr * 64) for setting in int8.settings] == [31, 64], "whole experts that fit"
    assert {setting.weight_bits for setting in int8.settings} == {BITS["int8"]}
    assert {setting.memory_ecr for setting in int8.settings} == {0.25, 0.9}


@given(
    name=st.sampled_from(sorted(BITS)),
    sizes=st.lists(st.integers(100_000, 10**8), min_size=1, max_size=4),
    ecr=st.floats(0, 1),
    bits=st.sampled_from([16.0, 4.25]),
)
def test_what_fits_is_what_is_stored(name: str, sizes: list[int], ecr: float, bits: float) -> None:
    before = Geometry(
        experts=(8,) * len(sizes),
        top_k=2,
        expert_bytes=tuple(sizes),
        layer_to_model_layer=tuple(range(len(sizes))),
    )
    after = in_format(before, bits, name)
    slots = comparison.budget_of(after, share_that_fits(before, after, ecr))
    memory = comparison.budget_of(before, ecr) * np.mean(before.bytes_of)
    one = float(np.mean(after.bytes_of))
    assert slots * one <= memory * (1 + 1e-9), "never more than the memory holds"
    assert slots == after.total or (slots + 1) * one > memory * (1 - 1e-9), "and never less than fits"


def test_measured_costs_are_the_simulators_clock() -> None:
    """Without transfers in the way, a token takes its layers and its experts in the file's microseconds."""
    recorded = trace_of_demo()
    geometry = recorded.traffic.geometry
    nbytes = in_format(geometry, 16.0, "int4").expert_bytes[0]
    profile = calibrated(curve("int4", nbytes, 700.0, 2800.0))
    profile = parse(render(profile), "machine.toml")
    settings = [comparison.Setting(hardware=profile, ecr=1.0, format="bf16")]
    (part,) = in_formats(["int4"], recorded, settings)
    run = comparison.simulate_one(part.recorded.traffic, None, part.settings[0], "static")
    tokens, layers = len(recorded.traffic.ids), geometry.layers
    expected = tokens * layers * (geometry.top_k * 700e-6 + 60e-6)
    assert tokens / run["tokens_per_second"] == pytest.approx(expected, rel=0.02)
    assert part.bases[0].kind == "measured"


def test_costs_of_one_format_do_not_leak_into_another() -> None:
    recorded = trace_of_demo()
    before = calibrated(curve("bf16", 10_000_000, 100.0, 110.0), curve("int8", 5_160_960, 90.0, 120.0))
    after = calibrated(curve("bf16", 10_000_000, 100.0, 110.0), curve("int8", 5_160_960, 9000.0, 12000.0))
    runs = []
    for profile in (before, after):
        settings = [comparison.Setting(hardware=profile, ecr=0.25, format="bf16")]
        runs.append(
            [speed(part) for part in in_formats(["keep", "bf16", "int8", "int4"], recorded, settings)]
        )
    assert runs[0][0] == runs[0][1] == runs[1][0] == runs[1][1]
    assert runs[0][2] > 2 * runs[1][2]
    assert runs[0][3] == runs[1][3]
    with_assumed = [load("rtx4090")] * 2
    with_assumed[1] = dataclasses.replace(
        with_assumed[0],
        shares={
            **with_assumed[0].shares,
            "int8": dataclasses.replace(with_assumed[0].shares["int8"], host=0.01, device=0.001),
        },
    )
    for name in sorted(BITS):
        one, other = (machine_for(profile, name, name)[0].hardware for profile in with_assumed)
        assert (one == other) == (name != "int8")


def test_what_computing_rests_on_is_always_said() -> None:
    profile = load("rtx4090")
    kinds = {name: machine_for(profile, name, name)[1] for name in BITS}
    assert {name for name, basis in kinds.items() if basis.kind == "assumed"} == set(profile.shares)
    assert kinds["f32"].kind == "unknown"
    assert "host_gbs x 0.7" in kinds["int8"].text
    assert "expert_kernels" in kinds["int8"].why
    assert machine_for(profile, None, "keep")[1].kind == "unknown"
    lines = list(footnotes([basis.as_dict() for basis in kinds.values()]))
    assert len(lines) == 2, "one for each reason"
    assert lines[0].startswith("* computing on rtx4090 is assumed: ")
    assert any("? computing on rtx4090 is unknown: f16" in line for line in lines)
    measured = machine_for(calibrated(curve("int8", 100, 1.0, 2.0)), "int8", "int8")[1]
    assert list(footnotes([measured.as_dict()])) == []


def test_a_host_beside_a_gpu_pays_the_way_there_too() -> None:
    profile = calibrated(curve("int8", 1000, 10.0, 40.0), tier="device")
    costs = HardwareCosts(profile.hardware, Geometry.uniform(1, 4, 2, 2000), 8.25, "int8")
    assert costs.host(0, 1) == pytest.approx(8e-6 + 20e-6), "an expert twice as large takes twice as long"
    assert costs.host(0, 2) == pytest.approx(8e-6 + 40e-6), "between two measured counts, on a line"
    assert costs.host(0, 7) == pytest.approx(8e-6 + 140e-6), "beyond, as the last two rise"
    assert costs.device(0, 1) == pytest.approx(2000 / 566.4e9), "the card was not measured"
    assert HardwareCosts(profile.hardware, costs.geometry, 16.0, "bf16").host(0, 1) == pytest.approx(
        8e-6 + 2000 / 65e9
    )


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("version = 2", "version = 3", "is of version 3, this daop reads up to 2"),
        ("[formats.int8]", "[formats.int7]", "costs of 'int7', which is no format"),
        ("bytes = 100", "bytes = 0", "formats.int8.: the costs of format 'int8': bytes and tokens"),
        ("tokens = [1, 4]", "tokens = [4, 1]", "bytes and tokens must be"),
        ("tokens = [1, 4]", "tokens = [1, 4, 16]", "one time for each"),
        ("tokens = [1, 4]", "tokens = 3", "formats.int8"),
        ("[1.0, 2.0]", "[1.0, nan]", "positive microseconds"),
        ("[1.0, 2.0]", '[1.0, "2"]', "positive microseconds"),
        ('source = "a test"', "", "needs exactly bytes, microseconds, source, tokens"),
    ],
)
def test_damaged_costs_are_refused(good: str, bad: str, message: str) -> None:
    text = render(calibrated(curve("int8", 100, 1.0, 2.0)))
    assert good in text
    with pytest.raises(DaopError, match=message):
        parse(text.replace(good, bad), "mine.toml")


def test_shares_need_a_reason_and_sense() -> None:
    text = render(load("rtx4090"))
    with pytest.raises(DaopError, match=r"no source for .'formats'"):
        parse(text.replace("\nformats = ", "\nbecause = "), "mine.toml")
    with pytest.raises(DaopError, match=r"formats\.int8.: host of a format's shares is -1"):
        parse(text.replace("host = 0.7", "host = -1"), "mine.toml")


def test_a_file_of_the_first_version_is_read() -> None:
    text = render(calibrated())
    assert text.startswith("version = 2\n")
    assert parse(text.removeprefix("version = 2\n"), "old.toml") == calibrated()


def test_the_fastest_of_each_format() -> None:
    def row(name: str, policy: str, rate: float, machine: str = "a") -> dict[str, Any]:
        return {
            "hardware": machine,
            "memory_ecr": 0.5,
            "format": name,
            "policy": policy,
            "tokens_per_second": rate,
        }

    rows = [
        *(row("keep", "static", 5), row("keep", "lru", 7), row("keep", "optimum", 9)),
        *(row("keep", "lru", 1, "b"), row("int8", "lru", 6), row("int8", "lru", 2, "b")),
    ]
    found = [(r["hardware"], r["format"], r["policy"]) for r in best_by_format(rows)]
    assert found == [("a", "keep", "lru"), ("a", "int8", "lru"), ("b", "keep", "lru"), ("b", "int8", "lru")]


def test_a_trace_of_a_packed_model_is_known_by_its_name() -> None:
    plain = Geometry.uniform(2, 4, 2, 4096, fingerprint="ab")
    packed = dataclasses.replace(plain, fingerprint="ab+int8-g64")
    shipped = load("rtx4090")
    small = dataclasses.replace(
        calibrated(curve("int8", 4096, 1.0, 2.0)), weight_bits=10.5, expert_bytes=4096
    )
    own = comparison.own_format
    assert own(shipped, plain, None) == (16.0, "bf16")
    assert own(shipped, packed, None) == (8.25, "int8")
    assert own(shipped, packed, 8.5) == (8.5, "int8")
    assert own(small, packed, None) == (10.5, "int8"), "small experts fill their pages badly"
    assert own(small, plain, None) == (10.5, "int8"), "measured with experts of this very size"
    assert own(small, Geometry.uniform(2, 4, 2, 9000), None) == (10.5, None)
    assert own(shipped, None, 4.25) == (4.25, "mxfp4")


def test_an_optimum_that_is_no_bound_is_explained() -> None:
    def row(name: str | None, ratio: float | None) -> dict[str, Any]:
        return {"hardware": "a", "format": name, "ratio_to_optimum": ratio}

    rows = [row("keep", 0.9), row("int8", 1.4), row("int8", 1.6), row(None, None), row("int4", 1.01)]
    (line,) = beyond_optimum(rows)
    assert line.startswith("x opt. above 1 on a in int8: ")


def test_what_is_no_format() -> None:
    assert formats_of("keep, int8,int8") == ["keep", "int8"]
    with pytest.raises(DaopError, match="--format zip is not known; known: keep, bf16"):
        formats_of("zip")
    with pytest.raises(DaopError, match="--format keep is not known"):
        formats_of("keep", keep=False)
    with pytest.raises(DaopError, match="names no format"):
        formats_of(" ")
    two: Any = [SimpleNamespace(weight_bits=bits, format=None) for bits in (16.0, 4.25)]
    recorded: Any = None
    with pytest.raises(DaopError, match="one --weight-bits"):
        list(in_formats(["int8"], recorded, two))
    assert [format_of_bits(bits) for bits in (16, 8.25, 8.0005, 4.5, 4.25, 5)] == [
        *("bf16", "int8", "fp8", "int4", "mxfp4", None)
    ]
