"""Golden counts on a recorded trace: a change of behaviour does not pass unseen.

(hits, misses, late) at 96, 192 and 384 slots of 768, on the machine ``rtx4090``.
"""

from __future__ import annotations

import pytest
from excerpt import excerpt, replayed

from daop.runtime.policies.base import POLICIES

GOLDEN = {
    "activation_matrix": ((8274, 17471, 79), (13740, 12031, 53), (20958, 4768, 98)),
    "adaptive": ((9934, 15673, 217), (15793, 9909, 122), (22459, 3360, 5)),
    "balanced": ((8203, 17621, 0), (12744, 13080, 0), (17194, 8630, 0)),
    "fiddler": ((9093, 16731, 0), (15185, 10639, 0), (22291, 3533, 0)),
    "hybrid_score": ((9655, 15817, 352), (14434, 11305, 85), (17963, 7849, 12)),
    "lfu": ((8753, 17071, 0), (14666, 11158, 0), (21911, 3913, 0)),
    "lru": ((10301, 15523, 0), (15082, 10742, 0), (22220, 3604, 0)),
    "lru_idle": ((8041, 17781, 2), (13258, 12562, 4), (20807, 5010, 7)),
    "lru_per_layer": ((10301, 15523, 0), (16254, 9570, 0), (22112, 3712, 0)),
    "on_demand": ((0, 25824, 0), (0, 25824, 0), (0, 25824, 0)),
    "optimum": ((14698, 9148, 1978), (20607, 4315, 902), (25794, 27, 3)),
    "prefill_swap": ((8848, 16976, 0), (15026, 10798, 0), (22202, 3622, 0)),
    "speculative": ((1255, 19916, 4653), (14933, 8814, 2077), (22218, 3292, 314)),
    "static": ((3081, 22743, 0), (6483, 19341, 0), (12936, 12888, 0)),
    "static_frequency": ((9093, 16731, 0), (15185, 10639, 0), (22291, 3533, 0)),
    "static_front": ((3228, 22596, 0), (6456, 19368, 0), (12912, 12912, 0)),
}
FORECASTING = {"adaptive", "speculative", "hybrid_score", "activation_matrix"}
"""Their float32 sums may round otherwise on another machine, and then a choice falls otherwise."""


def test_every_policy_has_golden_counts() -> None:
    assert set(GOLDEN) == {name for name, policy in POLICIES.items() if policy.exact}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_counts_on_the_recorded_trace(name: str) -> None:
    for slots, golden in zip((96, 192, 384), GOLDEN[name], strict=True):
        found = replayed(name, slots).statistics
        counts = tuple(int(kind.sum()) for kind in (found.hits, found.misses, found.lates))
        assert sum(counts) == excerpt().ids.size
        if name in FORECASTING:
            assert counts == pytest.approx(golden, rel=0.03, abs=60)
        else:
            assert counts == golden


def test_the_bound_is_a_bound() -> None:
    """No policy that could exist is faster than the one that knows the future."""
    bound = replayed("optimum", 192).tokens_per_second
    for name in ("adaptive", "hybrid_score", "lru_idle", "balanced", "static_frequency"):
        assert replayed(name, 192).tokens_per_second < bound, name
