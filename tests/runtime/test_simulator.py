"""The simulator against times worked out by hand, and against a plain cache on a real trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daop.core import DaopError, Forecast, Geometry, Phase, Step
from daop.runtime.costs import Hardware, HardwareCosts, stretched
from daop.runtime.policies.base import POLICIES, Plan, Policy, Prefetch, View
from daop.runtime.residency import share_by_class
from daop.runtime.sim_engine import VirtualEngine
from daop.runtime.sim_run import Run
from daop.runtime.sim_traffic import Traffic, forwards
from daop.runtime.simulator import Simulator

EXCERPT = Path(__file__).parents[1] / "data" / "gpt-oss-20b-excerpt.npz"
SMALL = Geometry.uniform(2, 4, 2, 1_000_000)
# An expert takes 1 ms over the link, 0.5 ms on the host, 0.1 ms on the device.
MACHINE = Hardware(
    name="test",
    link_gbs=1.0,
    host_gbs=2.0,
    host_gflops=1e6,
    device_gbs=10.0,
    device_gflops=1e6,
    layer_us=200.0,
    link_chunk_mib=0.1,
)


def excerpt() -> Traffic:
    with np.load(EXCERPT, allow_pickle=False) as data:
        return Traffic(
            geometry=Geometry.uniform(24, 32, 4, 13_200_000), ids=data["ids"], sequence=data["sequence"]
        )


def simulate(
    policy: Policy, traffic: Traffic, slots: int, hardware: Hardware = MACHINE, batch: int = 1
) -> Run:
    costs = HardwareCosts(hardware, traffic.geometry)
    return Simulator(policy, traffic.geometry, costs, slots).run(traffic, batch)


def small(tokens: Sequence[Sequence[Sequence[int]]], sequence: Sequence[int] | None = None) -> Traffic:
    ids = np.asarray(tokens, dtype=np.uint8)
    return Traffic(geometry=SMALL, ids=ids, sequence=np.asarray(sequence or [0] * len(ids), dtype=np.int32))


class Free(Policy):
    """Costs nothing to decide, so that times can be worked out by hand."""

    plan_us = 0.0


class FreeHost(Free):
    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        return Plan(host=missing)


def test_streamed_experts_come_one_after_the_other() -> None:
    run = simulate(Free(), small([[[0, 1], [2, 3]]]), slots=0)
    # layer 0.2, first copy 1.0, second copy 1.0 while the first is computed, second computed 0.1
    assert run.seconds == pytest.approx(2 * 2.3e-3)
    assert run.statistics.stall_seconds["demand"] == pytest.approx(2 * 1.9e-3)
    assert run.statistics.bytes.demand == 4_000_000


def test_the_host_computes_beside_the_device() -> None:
    run = simulate(FreeHost(), small([[[0, 1], [2, 3]]]), slots=0)
    assert run.seconds == pytest.approx(2 * 1.2e-3)
    assert run.statistics.stall_seconds["host"] == pytest.approx(2 * 1.0e-3)


def test_on_the_tier_host_a_miss_is_read_and_then_computed() -> None:
    run = simulate(FreeHost(), small([[[0, 1], [2, 3]]]), slots=0, hardware=replace(MACHINE, tier="host"))
    assert run.seconds == pytest.approx(2 * 2.3e-3)


def test_latencies_of_parallel_reads_overlap() -> None:
    disk = replace(MACHINE, tier="host", link_latency_us=500.0)
    one_by_one = simulate(Free(), small([[[0, 1], [2, 3]]]), slots=0, hardware=disk)
    assert one_by_one.seconds == pytest.approx(2 * (0.2e-3 + 2 * 1.5e-3 + 0.1e-3))
    together = simulate(Free(), small([[[0, 1], [2, 3]]]), slots=0, hardware=replace(disk, link_parallel=8))
    assert together.seconds == pytest.approx(2 * (0.2e-3 + 2 * 1.0e-3 + 0.5e-3 + 0.1e-3))
    # where latency outweighs, it is the number of transfers under way at once that bounds
    slow = replace(disk, link_latency_us=20_000.0, link_parallel=4)
    costs = HardwareCosts(slow, SMALL)
    assert costs.link_seconds[0] == pytest.approx(21e-3 / 4)
    assert costs.copy(0) == pytest.approx(21e-3)


def test_computing_beside_a_busy_link_is_slower() -> None:
    assert stretched(1.0, 2.0, 0.0) == 1.0
    assert stretched(1.0, 2.0, 5.0) == 2.0
    assert stretched(1.0, 2.0, 1.0) == 1.5  # half of it in the first second, the rest at full speed
    shared = replace(MACHINE, tier="host", link_slows=1.5)
    run = simulate(Free(), small([[[0, 1], [2, 3]]]), slots=0, hardware=shared)
    # the first is computed while the second is read; the second with nothing beside it
    assert run.statistics.compute_seconds == pytest.approx(2 * 0.25e-3)
    host = simulate(FreeHost(), small([[[0, 1], [2, 3]]]), slots=0, hardware=replace(MACHINE, link_slows=1.5))
    assert host.seconds == pytest.approx(2 * 1.2e-3), "an idle link slows nothing"


class OneEach(Free):
    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        return Plan(stream=missing[:1], host=missing[1:])


def test_the_host_shares_its_memory_with_the_link() -> None:
    shared = replace(MACHINE, link_slows=1.5)
    run = simulate(OneEach(), small([[[0, 1], [2, 3]]]), slots=0, hardware=shared)
    assert run.host_seconds == pytest.approx(2 * 1.5 * 0.5e-3)


def test_context_and_the_pass_around_the_layers_take_time() -> None:
    slow = replace(MACHINE, layer_us_per_context=10.0, forward_us=300.0, forward_us_per_row=50.0)
    base = simulate(Free(), small([[[0, 1], [2, 3]]] * 3), slots=8)
    run = simulate(Free(), small([[[0, 1], [2, 3]]] * 3), slots=8, hardware=slow)
    seen = 2 * (1 + 2 + 3) * 10e-6  # two layers; the tokens see 1, 2 and 3 tokens
    assert run.seconds - base.seconds == pytest.approx(seen + 3 * 300e-6)
    two = small([[[0, 1], [2, 3]]] * 2, sequence=[0, 1])
    both = simulate(Free(), two, slots=8, hardware=slow, batch=2)
    assert both.forward_seconds == pytest.approx(350e-6)


def test_the_decision_is_charged() -> None:
    run = simulate(POLICIES.get("on_demand")(), small([[[0, 1], [2, 3]]]), slots=0)
    assert run.seconds == pytest.approx(2 * (2.3e-3 + POLICIES.get("on_demand").plan_us * 1e-6))


class OneAhead(Free):
    """In layer 0 brings expert 2 of layer 1; evicts nothing."""

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        return [Prefetch(self.geometry.flat(1, 2), 1.0)] if step.layer == 0 else []


def test_speculation_fills_the_links_idle_time_and_a_demand_overtakes_it() -> None:
    # layer 0: copies of 0 and 1 end at 2.2, computed at 2.3; speculation runs from 2.2 on.
    # layer 1 asks at 2.5: three chunks of 0.1048576 have begun, to 2.5145728; the joined rest of the
    # prefetch is a demand like the other, and was asked for first.
    run = simulate(OneAhead(), small([[[0, 1], [2, 3]]]), slots=1)
    arrived = 2.2e-3 + 1e-3
    assert run.seconds == pytest.approx(arrived + 1.0e-3 + 0.1e-3)
    assert run.statistics.prefetches["late"] == 1
    other = simulate(OneAhead(), small([[[0, 1], [1, 3]]]), slots=1)
    assert other.seconds == pytest.approx(2.2e-3 + 3 * 0.1048576e-3 + 2.0e-3 + 0.1e-3)


def test_the_link_serves_speculation_only_as_far_as_the_clock() -> None:
    engine = VirtualEngine([1.0] * 8, 0.25)
    engine.fetch(0, 0, demand=False)
    engine.fetch(1, 1, demand=False)
    engine.now = 0.3
    assert engine.demand(5, 1.0) == pytest.approx(1.5)  # after the second chunk of expert 0
    assert not engine.cancel(0)
    assert engine.cancel(1)
    engine.now = 1.9
    assert list(engine.poll()) == []
    engine.now = 2.0
    assert list(engine.poll()) == [0]
    assert engine.link_free_at == pytest.approx(2.0)


@pytest.mark.parametrize("slots", [0, 1, 4, 100, 192, 768])
def test_lru_hits_equal_those_of_a_plain_cache(slots: int) -> None:
    traffic = excerpt()
    hits, cache = 0, OrderedDict[int, None]()
    for token in traffic.ids.astype(int):
        for layer, chosen in enumerate(token):
            needed = sorted(layer * 32 + int(expert) for expert in chosen)
            hits += sum(flat in cache for flat in needed)
            for flat in needed:
                cache.pop(flat, None)
            for flat in needed:
                cache[flat] = None
            while len(cache) > slots:
                cache.popitem(last=False)
    run = simulate(POLICIES.get("lru")(), traffic, slots)
    if slots >= 4:  # below, which of a step's experts keeps a slot is a matter of taste
        assert int(run.statistics.hits.sum()) == hits
    assert int(run.statistics.hits.sum() + run.statistics.misses.sum()) == traffic.ids.size


def test_a_batch_merges_the_tokens_of_the_running_sequences() -> None:
    traffic = small(
        [[[0, 1], [0, 1]], [[1, 2], [2, 3]], [[0, 3], [0, 3]], [[2, 3], [1, 2]]], sequence=[0, 0, 1, 2]
    )
    passes = list(forwards(traffic, batch=2))
    assert [list(p.token_ids) for p in passes] == [[0, 2], [1, 3]]
    assert passes[0].experts[0] == [0, 1, 3]
    assert passes[0].tokens[0] == [2, 1, 1]
    assert passes[0].first == [0, 1]
    assert passes[1].experts[1] == [4 + 1, 4 + 2, 4 + 3]
    assert passes[1].tokens[1] == [1, 2, 1]
    assert passes[1].first == [2]


def test_prefill_runs_in_chunks_of_its_own() -> None:
    traffic = replace(
        small([[[0, 1], [0, 1]]] * 5, sequence=[0] * 5), prefill=np.asarray([True, True, True, False, False])
    )
    passes = list(forwards(traffic, batch=1, prefill_chunk=2))
    assert [(p.phase, p.rows, list(p.first)) for p in passes] == [
        (Phase.PREFILL, 2, []),
        (Phase.PREFILL, 1, [0]),
        (Phase.DECODE, 1, []),
        (Phase.DECODE, 1, []),
    ]


@pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if not getattr(p, "needs", ())])
@pytest.mark.parametrize("batch", [1, 3])
def test_runs_repeat_to_the_last_digit(name: str, batch: int) -> None:
    first = simulate(POLICIES.get(name)(), excerpt(), 192, batch=batch)
    again = simulate(POLICIES.get(name)(), excerpt(), 192, batch=batch)
    assert first.as_dict() == again.as_dict()
    assert first.tokens == len(excerpt().ids)


def test_slots_are_shared_out_by_size() -> None:
    geometry = Geometry(experts=(4, 4, 8), top_k=2, expert_bytes=(10, 20, 10), layer_to_model_layer=(0, 1, 2))
    assert share_by_class(geometry, 8) == [6, 2]
    assert share_by_class(geometry, 16) == [12, 4]
    assert share_by_class(geometry, 1) == [1, 0]


def test_bad_input_is_named() -> None:
    traffic = small([[[0, 1], [2, 3]]])
    with pytest.raises(DaopError, match="no tokens"):
        small(np.empty((0, 2, 2), dtype=np.uint8).tolist())
    with pytest.raises(DaopError, match="MoE layers"):
        replace(traffic, geometry=Geometry.uniform(3, 4, 2, 10))
    with pytest.raises(DaopError, match="does not have"):
        replace(traffic, geometry=Geometry.uniform(2, 3, 2, 10))
    with pytest.raises(DaopError, match="impossible"):
        simulate(Free(), traffic, slots=9)
    with pytest.raises(DaopError, match="--expert-bytes"):
        HardwareCosts(MACHINE, Geometry.uniform(2, 4, 2))
    with pytest.raises(DaopError, match="link_gbs"):
        replace(MACHINE, link_gbs=0.0)
    with pytest.raises(DaopError, match="link_slows is"):
        replace(MACHINE, link_slows=0.5)
    with pytest.raises(DaopError, match="layer_us"):
        replace(MACHINE, layer_us=float("nan"))
