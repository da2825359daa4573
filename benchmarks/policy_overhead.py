"""What a policy's decisions cost per decode layer, in microseconds of this machine's time.

    python benchmarks/policy_overhead.py [--experts 128] [--top-k 8] [--layers 48] [--ecr 0.25]

Made-up traffic (labelled as such): each layer keeps its previous choice with probability 0.6 per expert
and else draws by a Zipf law, so that policies hit and miss as on real traces. Bookkeeping is not counted.
``plan`` holds everything waits for (plan and the victims of demand); ``look_ahead`` runs beside the
compute. Medians over all decode layers. ``--visits`` adds ``adaptive`` on that predictor, with weights by
chance, which cost what others cost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from daop.core import Forecast, Geometry, Phase, Step
from daop.hardware import load
from daop.predictors.base import State
from daop.predictors.network import shapes
from daop.predictors.visit_task import FORECASTS
from daop.predictors.visits import Visits
from daop.runtime.costs import HardwareCosts
from daop.runtime.policies.base import POLICIES, Costs, Outcome, Plan, Policy, Prefetch, View, make_policy
from daop.runtime.profile import Profile
from daop.runtime.sim_forecasts import OnlineForecaster
from daop.runtime.sim_traffic import Traffic
from daop.runtime.simulator import Simulator


class Timed(Policy):
    """Passes everything on, and notes how long each layer's two parts took."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.plans: list[float] = []
        self.looks: list[float] = []
        self._looking = False

    def start(self, geometry: Geometry, slots: int, costs: Costs, view: View) -> Sequence[int]:
        return self.inner.start(geometry, slots, costs, view)

    def begin(self, phase: Phase, rows: int) -> None:
        began = time.perf_counter()
        self.inner.begin(phase, rows)
        self._carried = time.perf_counter() - began

    def plan(self, step: Step, missing: Sequence[int], view: View) -> Plan:
        self._looking = False
        began = time.perf_counter()
        plan = self.inner.plan(step, missing, view)
        self.plans.append(time.perf_counter() - began + self._carried)
        self._carried = 0.0
        return plan

    def victims(self, incoming: int, count: int, view: View, prefetch: Prefetch | None) -> Sequence[int]:
        began = time.perf_counter()
        chosen = self.inner.victims(incoming, count, view, prefetch)
        (self.looks if self._looking else self.plans)[-1] += time.perf_counter() - began
        return chosen

    def look_ahead(self, step: Step, forecasts: Sequence[Forecast], view: View) -> Sequence[Prefetch]:
        self._looking = True
        began = time.perf_counter()
        asked = self.inner.look_ahead(step, forecasts, view)
        self.looks.append(time.perf_counter() - began)
        return asked

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)


def made_up(geometry: Geometry, tokens: int, seed: int = 0) -> Traffic:
    """Sticky Zipf traffic: nobody's, only shaped like somebody's."""
    rng = np.random.default_rng(seed)
    experts, k = geometry.experts[0], geometry.top_k
    weights = 1.0 / np.arange(1, experts + 1)
    popular = np.stack([rng.permutation(experts) for _ in range(geometry.layers)])
    ids = np.empty((tokens, geometry.layers, k), dtype=np.uint16)
    for layer in range(geometry.layers):
        last = popular[layer, :k]
        p = np.empty(experts)
        p[popular[layer]] = weights / weights.sum()
        for token in range(tokens):
            kept = last[rng.random(k) < 0.6]
            p_left = p.copy()
            p_left[kept] = 0.0
            drawn = rng.choice(experts, k - len(kept), replace=False, p=p_left / p_left.sum())
            last = np.concatenate([kept, drawn])
            ids[token, layer] = last
    return Traffic(geometry=geometry, ids=ids, sequence=np.zeros(tokens, dtype=np.int32))


def measure(name: str, traffic: Traffic, profile: Profile, ecr: float) -> dict[str, float]:
    geometry = traffic.geometry
    timed = Timed(make_policy(name, profile))
    timed.inner.profile = profile
    timed_kind = type(timed)
    timed_kind.horizon = timed.inner.horizon  # the simulator asks the class
    forecaster = OnlineForecaster(geometry, profile) if timed.inner.horizon else None
    costs = HardwareCosts(load("rtx4090").hardware, geometry)
    Simulator(timed, geometry, costs, round(geometry.total * ecr), forecaster).run(traffic)
    skip = len(timed.plans) // 4  # the cache fills first
    both = [a + b for a, b in zip(timed.plans, timed.looks, strict=True)][skip:]
    return {
        "plan_us": statistics.median(timed.plans[skip:]) * 1e6,
        "look_ahead_us": statistics.median(timed.looks[skip:]) * 1e6,
        "both_us": statistics.median(both) * 1e6,
        "both_p95_us": float(np.percentile(both, 95)) * 1e6,
    }


def with_visits(profile: Profile) -> Profile:
    """With a predictor that knows nothing."""
    geometry, rng = profile.geometry, np.random.default_rng(0)
    arrays = {
        name: rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes(geometry, Visits().width, FORECASTS, Visits.sight).items()
    }
    return replace(profile, predictor=Visits().restore(State(arrays=arrays), geometry))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--ecr", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--policies", default="all")
    parser.add_argument("--visits", action="store_true")
    options = parser.parse_args()
    geometry = Geometry.uniform(options.layers, options.experts, options.top_k, 9_400_000)
    traffic = made_up(geometry, options.tokens)
    profile = Profile.from_routing(geometry, traffic.ids, traffic.sequence)
    chosen = options.policies.split(",")
    names = [n for n, p in POLICIES.items() if not p.needs_future] if chosen == ["all"] else chosen
    print(f"made-up traffic, {options.layers} x {options.experts} experts, top-{options.top_k}")
    print(f"{'policy':22}{'plan us':>10}{'look-ahead us':>15}{'both, median':>14}{'both, p95':>12}")
    rows = {}
    asked = [(name, name, profile) for name in names]
    if options.visits:
        asked.append(("adaptive on visits", "adaptive", with_visits(profile)))
    for name, policy, known in asked:
        rows[name] = row = measure(policy, traffic, known, options.ecr)
        print(
            f"{name:22}{row['plan_us']:10.1f}{row['look_ahead_us']:15.1f}"
            f"{row['both_us']:14.1f}{row['both_p95_us']:12.1f}"
        )
    print(json.dumps({"benchmark": "policy_overhead", "experts": options.experts, "rows": rows}))


if __name__ == "__main__":
    main()
