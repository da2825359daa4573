"""Approximate policies on the virtual clock: times worked out by hand, and the executor's own decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from early_runs import LAYERS, profile, rows
from test_simulator import MACHINE, SMALL, small
from tiny_models import save_tiny

from daop.api import load
from daop.comparison import traffic_of
from daop.core import DaopError, FloatArray, Geometry
from daop.runtime.costs import HardwareCosts
from daop.runtime.policies.approximate import Approximate, Routing, Settled
from daop.runtime.policies.base import Costs, Policy, View, make_policy
from daop.runtime.policies.bounded import Bounded
from daop.runtime.policies.daop import Daop
from daop.runtime.policies.deferral import Deferral
from daop.runtime.sequence_placement import RecentPlacement, SequencePlacement
from daop.runtime.sim_run import Run
from daop.runtime.sim_traffic import Traffic
from daop.runtime.simulator import Simulator
from daop.training.parquet import read_trace


def simulate(policy: Policy, traffic: Traffic, slots: int = 0, batch: int = 1) -> Run:
    """Decisions cost nothing but where ``adaptive`` charges them itself."""
    policy.plan_us = policy.look_ahead_us = 0.0
    return Simulator(policy, traffic.geometry, HardwareCosts(MACHINE, traffic.geometry), slots).run(
        traffic, batch
    )


def one_token(**columns: Any) -> Traffic:
    """Layer 0 chooses 0 and 1, layer 1 chooses 2 and 3; everything is 0.5 ms on the host."""
    traffic = small([[[0, 1], [2, 3]]])
    weights = np.asarray([[[0.6, 0.4], [0.6, 0.4]]], dtype=np.float16)
    return replace(traffic, weights=weights, **columns)


def foretold(distance: float, ids: tuple[int, int] = (2, 0)) -> Traffic:
    return one_token(
        distances=np.asarray([[np.nan, distance]], dtype=np.float32),
        forecast_ids=np.asarray([[[-1, -1], ids]], dtype=np.int32),
        forecast_weights=np.asarray([[[0, 0], [0.6, 0.4]]], dtype=np.float16),
    )


def test_daop_computes_the_next_layers_experts_while_this_layer_ends() -> None:
    """Exact: 0.2 + 1.0, twice. Early work begins at 1.2, when the host is free, not at 1.4."""
    run = simulate(make_policy("daop", options={"first": 0}), one_token())
    assert run.seconds == pytest.approx(2.2e-3)
    assert simulate(make_policy("daop", options={"first": 1}), one_token()).seconds == pytest.approx(2.4e-3)
    assert run.statistics.approximate["early"] == 2
    assert run.host_seconds == pytest.approx(2e-3)


class OneResident(Daop):
    """Only expert 0 of layer 1 is in fast memory."""

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> list[int]:
        super().start(geometry, slots, costs, view)
        self.placement = self.book = SequencePlacement(geometry, [4], 1.05)
        return [4]


def test_daop_replaces_what_would_all_be_on_the_host() -> None:
    """The second of layer 1's two experts gives way to the resident one: the host has one to compute."""
    run = simulate(OneResident(first=0), one_token(), slots=1)
    assert run.statistics.approximate == {"calls": 4, "early": 1, "late": 0, "replaced": 1, "approximated": 2}
    # 1.2 for layer 0, early work until 1.7, and expert 0 on the device from 1.4 to 1.5
    assert run.seconds == pytest.approx(1.7e-3)


def test_a_deferred_expert_is_waited_for_one_layer_later() -> None:
    run = simulate(make_policy("deferral", options={"deferred": 1, "immediate": 1}), one_token())
    # layer 0 ends at 0.7; its late expert is there at 1.2; then layer 1's two, until 2.2
    assert run.seconds == pytest.approx(2.2e-3)
    assert run.statistics.approximate["late"] == 1
    assert run.host_seconds == pytest.approx(2e-3)


def test_bounded_uses_an_early_result_and_drops_what_has_not_begun() -> None:
    run = simulate(make_policy("bounded", options={"tolerance": 0.2, "calls": 2}), foretold(0.1))
    # early: expert 2 from 1.2 to 1.7, expert 0 is taken off; then expert 3 until 2.2
    assert run.seconds == pytest.approx(2.2e-3, abs=5e-5)
    assert run.statistics.approximate["early"] == 1
    assert run.host_seconds == pytest.approx(2e-3)


def test_bounded_runs_again_what_was_too_far_off() -> None:
    run = simulate(make_policy("bounded", options={"tolerance": 0.2, "calls": 1}), foretold(0.2))
    # the begun one ends at 1.7 for nothing; then one on the host until 2.2, one over the link until 2.5
    assert run.seconds == pytest.approx(2.5e-3, abs=5e-5)
    assert run.statistics.approximate["early"] == 0


def test_tolerance_zero_costs_nothing() -> None:
    exact = simulate(make_policy("adaptive"), foretold(0.0))
    run = simulate(make_policy("bounded", options={"tolerance": 0}), foretold(0.0))
    assert run.seconds == exact.seconds
    assert run.statistics.approximate["approximated"] == 0


def test_without_a_processor_beside_the_device_nothing_is_gained() -> None:
    traffic, tier = foretold(0.1), replace(MACHINE, tier="host")
    seconds = []
    for tolerance in (0.0, 0.2):
        policy = make_policy("bounded", options={"tolerance": tolerance})
        run = Simulator(policy, SMALL, HardwareCosts(tier, SMALL), 0).run(traffic)
        seconds.append(run.seconds)
    assert seconds[1] == pytest.approx(seconds[0], abs=1e-4)


def test_what_the_simulator_needs_is_named() -> None:
    with pytest.raises(DaopError, match="bounded cannot be simulated from this trace: it has no distances"):
        simulate(make_policy("bounded"), one_token())
    with pytest.raises(DaopError, match="deferral cannot be simulated from this trace: it has no weights"):
        simulate(make_policy("deferral"), small([[[0, 1], [2, 3]]]))
    with pytest.raises(DaopError, match="distances are not one for each token"):
        one_token(distances=np.zeros((1, 3), dtype=np.float32))


class Watching(Bounded):
    """Decides as ``bounded`` and notes it, but leaves the run exact."""

    def settle(self, layer: int, sequences: Any, routing: Routing, distances: FloatArray | None) -> Settled:
        settled = super().settle(layer, sequences, routing, distances)
        self.seen.append((layer, settled.early.tolist() if settled.early is not None else None))
        self._served = {}
        return Settled(routing)

    seen: list[tuple[int, Any]]


class WatchingDeferral(Deferral):
    seen: list[tuple[int, Any]]

    def settle(self, layer: int, sequences: Any, routing: Routing, distances: FloatArray | None) -> Settled:
        settled = super().settle(layer, sequences, routing, distances)
        self.seen.append((layer, settled.late.tolist() if settled.late is not None else None))
        return Settled(routing)


@pytest.mark.parametrize("kind", [Watching, WatchingDeferral])
def test_the_simulator_decides_as_the_executor_did(kind: Any, tmp_path: Path) -> None:
    """The same calls of the same tokens, from the trace alone."""
    save_tiny("mixtral", tmp_path / "model")
    known = profile(tmp_path / "model")
    known.save(tmp_path / "profile")
    prompts = [list(row) for row in rows(3, length=9)]
    trace = tmp_path / "t.parquet"
    with load(
        tmp_path / "model",
        policy="static",
        ecr=0.5,
        profile=tmp_path / "profile",
        trace=trace,
        trace_distances=True,
    ) as runtime:
        for prompt in prompts:
            runtime.generate([prompt], 8)

    def policy() -> Any:
        made = kind(tolerance=1.3, calls=2) if kind is Watching else kind(deferred=1, immediate=1)
        made.seen, made.profile = [], known
        return made

    real = policy()
    with load(tmp_path / "model", policy=real, ecr=0.5) as runtime:
        for prompt in prompts:
            runtime.generate([prompt], 8)
    recorded = read_trace(trace)
    geometry = replace(recorded.geometry, expert_bytes=(1_000_000,) * LAYERS)
    virtual: Approximate = policy()
    simulate(virtual, traffic_of(recorded, geometry), slots=9)
    assert len(real.seen) == 3 * 7 * LAYERS
    assert virtual.seen == real.seen  # type: ignore[attr-defined]
    assert any(True in row for _, mask in real.seen if mask for row in mask)
    assert any(False in row for _, mask in real.seen if mask for row in mask)


def test_a_sequence_keeps_what_it_used_of_late() -> None:
    geometry = Geometry.uniform(1, 6, 2)
    book = RecentPlacement(geometry, 2, np.asarray([0.9, 0.8, 0.1, 0.1, 0.05, 0.05], dtype=np.float32))
    everything = np.arange(6)[None].repeat(2, axis=0)
    assert book.calls_behind(0, [0, 1], everything)[0].tolist() == [False, False, True, True, True, True]
    for _ in range(12):
        book.prompt(0, np.asarray([[4, 5]]), np.asarray([1]))
    found = book.calls_behind(0, [0, 1], everything)
    assert found[0].tolist() == [False, False, True, True, True, True]
    assert found[1].tolist() == [True, True, True, True, False, False]
    book.open([1])
    assert book.calls_behind(0, [1], everything[:1])[0].tolist() == [False, False, True, True, True, True]
    whole = RecentPlacement(geometry, 2, None)
    whole.prompt(0, np.asarray([[1, 2], [3, 4], [1, 3]]), np.asarray([7, 7, 7]))
    steps = RecentPlacement(geometry, 2, None)
    for pair in ([1, 2], [3, 4], [1, 3]):
        steps.prompt(0, np.asarray([pair]), np.asarray([7]))
    assert np.allclose(whole._of(0, 7), steps._of(0, 7)), "a prompt at once or token by token"


@pytest.mark.parametrize("name", ["bounded", "daop", "deferral"])
def test_nothing_is_kept_of_a_sequence_that_is_over(name: str) -> None:
    """A book for each sequence of a long trace would be a leak."""
    sequences, length = 40, 4
    traffic = small([[[0, 1], [2, 3]]] * sequences * length)
    n = sequences * length
    traffic = replace(
        traffic,
        sequence=np.repeat(np.arange(sequences, dtype=np.int32), length),
        prefill=np.tile(np.asarray([True, False, False, False]), sequences),
        weights=np.full((n, 2, 2), 0.5, dtype=np.float16),
        distances=np.full((n, 2), 0.1, dtype=np.float32),
        forecast_ids=traffic.ids,
        forecast_weights=np.full((n, 2, 2), 0.5, dtype=np.float16),
    )
    policy = make_policy(name)
    assert isinstance(policy, Approximate)
    simulate(policy, traffic, slots=2, batch=3)
    book = vars(policy.placement)
    kept = [*(book.get(key, ()) for key in ("_counts", "_behind", "_scores")), vars(policy).get("_usual", ())]
    assert 0 < sum(map(len, kept)) <= 3 * 2 * LAYERS
