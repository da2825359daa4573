"""The timeline says what the statistics say, from simulator and executor alike, and is bounded."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_runs import open_standin, standin
from test_sim_early import one_token
from test_simulator import MACHINE as SMALL_MACHINE
from tiny_models import save_tiny

import daop
from daop.core import Geometry
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.chrome_trace import TRANSFERS, write_chrome_trace
from daop.runtime.costs import Hardware, HardwareCosts
from daop.runtime.policies.base import make_policy
from daop.runtime.sim_forecasts import OnlineForecaster
from daop.runtime.sim_run import Run
from daop.runtime.sim_traffic import Traffic
from daop.runtime.simulator import Simulator
from daop.runtime.timeline import Timeline

EXCERPT = Path(__file__).parents[1] / "data" / "gpt-oss-20b-excerpt.npz"
DEMO = Path(daop.__file__).parent / "assets" / "demo"
MACHINE = Hardware(
    name="test",
    link_gbs=20.0,
    host_gbs=40.0,
    host_gflops=1e6,
    device_gbs=400.0,
    device_gflops=1e6,
    layer_us=200.0,
    link_chunk_mib=0.1,
)


def simulated(policy: str, timeline: Timeline | None, tokens: int = 60, ecr: float = 0.3) -> Run:
    geometry = Geometry.uniform(24, 32, 4, 13_200_000)
    with np.load(EXCERPT, allow_pickle=False) as data:
        traffic = Traffic(geometry=geometry, ids=data["ids"][:tokens], sequence=data["sequence"][:tokens])
    chosen = make_policy(policy)
    forecaster = OnlineForecaster(geometry, None) if chosen.horizon else None
    watchers = [] if timeline is None else [timeline]
    slots = int(geometry.total * ecr)
    return Simulator(chosen, geometry, HardwareCosts(MACHINE, geometry), slots, forecaster, watchers).run(
        traffic
    )


def written(timeline: Timeline) -> dict[str, Any]:
    text = io.StringIO()
    write_chrome_trace(timeline, text, {"source": "test"})
    document: dict[str, Any] = json.loads(text.getvalue())
    return document


def check(document: dict[str, Any], figures: dict[str, Any], apart: str = "") -> None:
    """What every timeline of a whole run must hold."""
    assert document["otherData"] == {"complete": True, "source": "test"}
    events = document["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    places = {(event["tid"], event["ts"]) for event in slices}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    busy: dict[int, float] = defaultdict(float)
    for event in sorted(slices, key=lambda event: float(event["ts"])):
        assert event["dur"] >= 0
        assert event["ts"] >= busy[event["tid"]] - 0.01, f"two things at once on {names[event['tid']]}"
        busy[event["tid"]] = event["ts"] + event["dur"]
    computed = Counter(
        event["args"]["outcome"]
        for event in slices
        if "expert" in event["args"] and not names[event["tid"]].startswith(TRANSFERS)
    )
    requests = figures["requests"]
    assert computed["hit"] + computed["useful"] == requests["hits"]
    assert computed["late"] == requests["late"]
    assert computed["miss"] == requests["misses"]
    assert computed["useful"] == figures["prefetches"]["useful"] > 0

    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    ended = sum(arrow[-1]["ph"] == "f" for arrow in arrows.values())
    assert ended >= figures["prefetches"]["useful"]
    for arrow in arrows.values():
        assert [event["ph"] for event in arrow] in (["s", "f"], ["s", "t", "f"], ["s", "t"])
        assert [event["ts"] for event in arrow] == sorted(event["ts"] for event in arrow)
        assert names[arrow[0]["tid"]] == "predictor"
        assert names[arrow[1]["tid"]].startswith(TRANSFERS)
        for event in arrow[1:]:  # an arrow that meets no slice is not drawn
            assert (event["tid"], event["ts"]) in places
    counters = Counter(event["name"] for event in events if event["ph"] == "C")
    assert set(counters) == {"slots in use", "transfers under way", "stall of the layer (ms)"}
    under_way = [
        event["args"]["value"]
        for event in events
        if event["ph"] == "C" and event["name"] == "transfers under way"
    ]
    assert min(under_way) >= 0
    stalls = sum(
        event["args"]["value"] for event in events if event["ph"] == "C" and event["name"].startswith("stall")
    )
    causes = {cause: ms for cause, ms in figures["stall_ms"].items() if cause != apart}
    assert stalls == pytest.approx(sum(causes.values()), rel=1e-3)


@pytest.mark.parametrize("policy", ["hybrid_score", "speculative"])
def test_simulated(policy: str) -> None:
    timeline = Timeline()
    figures = simulated(policy, timeline).as_dict()
    check(written(timeline), figures)


def test_watching_changes_nothing() -> None:
    assert simulated("adaptive", Timeline()).as_dict() == simulated("adaptive", None).as_dict()


def test_executed() -> None:
    timeline = Timeline()
    with daop.load(DEMO, policy="speculative", ecr=0.3, watchers=[timeline]) as runtime:
        runtime.generate(["Once upon a time"], 12)
        figures = runtime.statistics()
    document = written(timeline)
    check(document, figures, apart="forecast")  # which comes before the layer's own wait
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert {"policy", "predictor", "device"} <= names
    assert any(name.startswith("disk") for name in names)
    read = [event for event in document["traceEvents"] if event["name"].startswith(("read", "stream"))]
    assert len(read) * runtime.geometry.expert_bytes[0] >= figures["bytes"]["read"] > 0


def test_a_long_run_keeps_its_end() -> None:
    whole, bounded = Timeline(), Timeline(events=1000)
    simulated("hybrid_score", whole)
    simulated("hybrid_score", bounded)
    assert len(bounded) <= 1000
    document = written(bounded)
    assert not document["otherData"]["complete"]
    assert "earliest" in document["otherData"]["note"]
    last = max(event["ts"] for event in written(whole)["traceEvents"] if event["ph"] == "X")
    kept = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] for event in kept) == last
    assert all(event["args"].get("layer", 0) < 24 for event in kept)


def test_pre_calculations_are_slices_of_the_host() -> None:
    """Both of layer 1's experts are computed early, from 1.2 ms on, half a millisecond each."""
    traffic, timeline = one_token(), Timeline()
    policy = make_policy("daop", options={"first": 0})
    policy.plan_us = policy.look_ahead_us = 0.0
    costs = HardwareCosts(SMALL_MACHINE, traffic.geometry)
    Simulator(policy, traffic.geometry, costs, 0, watchers=[timeline]).run(traffic)
    early = [event for event in written(timeline)["traceEvents"] if event.get("cat") == "pre-calculation"]
    assert [event["name"] for event in early] == ["pre-calculation 1.2", "pre-calculation 1.3"]
    assert [event["ts"] for event in early] == pytest.approx([1200.0, 1700.0])
    assert [event["dur"] for event in early] == pytest.approx([500.0, 500.0])
    assert {event["args"]["outcome"] for event in early} == {"useful"}


def test_the_device_cuda_tells_its_decisions_and_what_the_host_computes(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    timeline = Timeline()
    with open_standin(tmp_path, standin(), "static", 3, watchers=[timeline]) as runtime:
        runtime.generate([[5, 6, 7]], 4)
        figures = runtime.statistics()
    document = written(timeline)
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert {"policy", "predictor", "host"} <= set(names.values())
    beside = [event for event in document["traceEvents"] if names.get(event.get("tid")) == "host"]
    slices = [event for event in beside if event["ph"] == "X"]
    assert len(slices) == figures["experts_computed_in_place"] > 0
    assert {event["args"]["outcome"] for event in slices} == {"miss"}


@pytest.mark.parametrize("policy", ["speculative", "fiddler"])
@pytest.mark.parametrize("ram", [1 << 40, 8 * 27648])
def test_the_device_cuda_tells_when_it_was_busy(policy: str, ram: int, tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    timeline, gpu = Timeline(), standin(1)
    with open_standin(tmp_path, gpu, policy, 7, ram=ram, watchers=[timeline]) as runtime:
        runtime.generate([[5, 6, 7]], 12)
        figures = runtime.statistics()
        moved = runtime._machinery.bytes_read
    document = written(timeline)
    stalls = [e["args"]["value"] for e in document["traceEvents"] if e["name"].startswith("stall")]
    if policy == "speculative":  # the last layer's wait is read off when nothing comes behind it
        check(document, figures | {"stall_ms": {"all": sum(stalls)}})
    assert sum(stalls) <= sum(figures["stall_ms"].values()) * 1.001
    links = [span for span in timeline.busy if span.track == "link in"]
    size = open_checkpoint(tmp_path).layouts[0].nbytes
    assert len(links) * size == moved > 0
    assert gpu.faults == []


def test_the_device_cuda_is_watched_where_all_experts_are_resident(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, dtype=torch.bfloat16, moe_intermediate_size=24)
    timeline = Timeline()
    with open_standin(tmp_path, standin(2), "static", None, watchers=[timeline]) as runtime:
        runtime.generate([[5, 6, 7]], 4)
        hits = runtime.statistics()["requests"]["hits"]
    computed = [flat for span in timeline.busy if span.track == "device" for flat in span.flats]
    assert len(computed) == hits > 0
