"""Hardware profiles: complete, sourced, and refused when absurd."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from daop.core import DaopError, Geometry
from daop.hardware import load, names, parse, render
from daop.runtime.costs import HardwareCosts

GOOD = render(load("rtx4090"))


def test_the_promised_profiles_are_there() -> None:
    promised = [
        "rtx4090",
        "rtx5090",
        "rtx5090-threadripper",
        "rtx5060ti",
        "rtx-pro-6000",
        "a6000",
        "a100",
        "h200",
    ]
    assert set(promised) <= set(names())


@pytest.mark.parametrize("name", names())
def test_every_figure_has_a_source(name: str) -> None:
    profile = load(name)
    assert profile.hardware.name == name
    assert profile.about
    assert parse(render(profile), name) == profile
    assert not set(profile.sources) & set(profile.derived)


def test_the_consumer_profiles_are_as_agreed() -> None:
    expected = {
        "rtx4090": (23.2, 4, 65, 566.4, 60),
        "rtx5090": (56, 3, 75, 858, 50),
        "rtx5090-threadripper": (56, 3, 140, 858, 50),
        "rtx5060ti": (14.3, 4, 50, 268.8, 90),
    }
    for name, figures in expected.items():
        h = load(name).hardware
        assert (h.link_gbs, h.link_latency_us, h.host_gbs, h.device_gbs, h.layer_us) == figures


@pytest.mark.parametrize(
    ("pattern", "becomes", "message"),
    [
        (r"link_gbs = 23.2", "link_gbs = 0", "link_gbs is 0"),
        (r"link_gbs = 23.2", "link_gbs = -1.0", "link_gbs is -1.0"),
        (r"link_gbs = 23.2", 'link_gbs = "fast"', "link_gbs is 'fast'"),
        (r"link_gbs = 23.2", "link_gbs = nan", "link_gbs is nan"),
        (r"link_gbs = 23.2", "link_gbs = 1e12", "link_gbs"),
        (r"host_gbs = .*\n", "", "lacks figures.*host_gbs"),
        (r"layer_us = 60.0", "layer_us = -0.5", "layer_us"),
        (r'tier = "device"', 'tier = "moon"', "moon"),
        (r"\[figures\]\n", "[figures]\nwarp_gbs = 9\n", "warp_gbs"),
        (r'\nhost_gbs = "[^\n]*', "", "no source for.*host_gbs"),
        (r"name = ", "name ", "not TOML"),
        (r"\[sources\]", "[expert]\nbytes = -1\n[sources]", "bytes in .expert. is -1"),
        (r"\[sources\]", "[expert]\nsize = 1\n[sources]", "unknown entry 'size'"),
    ],
)
def test_absurd_profiles_are_refused(pattern: str, becomes: str, message: str) -> None:
    text, changed = re.subn(pattern, becomes, GOOD, count=1)
    assert changed
    with pytest.raises(DaopError, match=message):
        parse(text, "mine.toml")


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(DaopError, match="rtx4090"):
        load("rtx9999")
    with pytest.raises(DaopError, match="cannot read"):
        load(str(tmp_path / "none.toml"))
    (tmp_path / "mine.toml").write_text(GOOD)
    assert load(str(tmp_path / "mine.toml")).hardware == load("rtx4090").hardware


def test_costs_follow_from_the_figures() -> None:
    hardware = load("rtx4090").hardware
    costs = HardwareCosts(hardware, Geometry.uniform(2, 4, 2, 13_200_000), weight_bits=4.25)
    assert costs.copy(0) == pytest.approx(4e-6 + 13.2e6 / 23.2e9)
    assert costs.host(0, 1) == pytest.approx(8e-6 + 13.2e6 / 65e9)
    assert costs.device(0, 1) == pytest.approx(13.2e6 / 566.4e9)
    flops = 2 * 13.2e6 * 8 / 4.25
    assert costs.host(0, 1000) == pytest.approx(8e-6 + 1000 * flops / 975e9)
    assert costs.layer(11) == pytest.approx(60e-6 + 10 * 0.79e-6)
    disk = HardwareCosts(replace(hardware, tier="host"), costs.geometry)
    assert disk.host(0, 1) == pytest.approx(disk.copy(0) + disk.device(0, 1))
