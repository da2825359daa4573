"""Tables fit a terminal of 80 columns without a cut, and options offer only what can run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from daop import comparison
from daop.cli.main import load_command
from daop.cli.options import runnable_policies
from daop.cli.train import leaderboard
from daop.report.ranking import quality_table, ranking
from daop.runtime.policies.base import POLICIES


def drawn(*tables: Table, width: int = 80) -> str:
    text = io.StringIO()
    for table in tables:
        Console(file=text, width=width).print(table)
    return text.getvalue()


def row(policy: str, machine: str) -> dict[str, Any]:
    return {
        **{"policy": policy, "hardware": machine, "ecr": 0.125, "tokens": 10, "tokens_per_second": 12345.67},
        **{"ratio_to_best_static": 1.25, "ratio_to_optimum": None, "hit_rate": 0.5},
        "stall_ms": {"demand": 123456.0},
        "bytes": {"demand": 10**13, "useful": 0, "late": 0, "wasted": 0},
    }


def test_a_comparison_is_drawn_whole() -> None:
    names = [*POLICIES.names(), "my_company.placement.policies:OurOwnBetterPolicy"]
    rows = [row(name, machine) for machine in ("rtx4090", "rtx5090-threadripper") for name in names]
    text = drawn(*ranking(rows))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("12345.7") == len(rows)
    for name in names[:-1]:
        assert text.count(f"\n{name} ") == 2
    assert "rtx5090-threadripper, ECR 0.125" in text


def test_a_leaderboard_is_drawn_whole() -> None:
    following = {
        **{"kind": "next", "recall_at_k": 0.807, "recall_at_k_interval": [0.8, 0.815], "whole_set": 0.377},
        **{"brier": 0.034, "by_horizon": {"4": {"recall_at_k": 0.788}}, "microseconds_per_forecast": 311},
        "model_bytes": 6_300_000,
    }
    pool = {"hit_rate": 0.519, "gap_closed": 0.49, "lru": 0.4, "lfu": 0.3, "optimum": 0.6}
    waiting = {
        **{"kind": "reuse", "hit_rate": 0.5, "wait_error": 0.84, "microseconds_per_forecast": 3113.0},
        **{"model_bytes": 4_300_000, "pools": {"0.125": pool, "0.25": pool, "0.5": pool}},
    }
    document = {
        "geometry": {"top_k": 4},
        "predictors": {"gate_lookahead": following, "my_package:MyPredictor": following, "lgb": waiting},
    }
    text = drawn(*leaderboard(document))
    assert "…" not in text
    assert "0.800-0.815" in text
    assert "0.519 (49%)" in text


def test_a_run_is_offered_only_policies_that_can_run() -> None:
    policy = next(option for option in load_command("run").params if option.name == "policy")
    offered = str(policy.help)
    assert "optimum" not in offered
    assert all(name in offered for name in runnable_policies())
    assert "optimum" in comparison.policies_of("all")
    assert comparison.policies_of("all", real=True) == [
        n for n in runnable_policies() if POLICIES.get(n).exact
    ]


@pytest.mark.parametrize("command", ["run", "compare"])
def test_every_option_says_what_it_does(command: str) -> None:
    for parameter in load_command(command).params:
        assert getattr(parameter, "help", None), parameter.name


def test_quality_beside_speed() -> None:
    """Judged on a model: every column; simulated without one: only the share of calls."""
    named = ("perplexity", "perplexity_reference", "mean_kl", "p99_kl", "changed_tokens", "approximated")
    values = (21.0, 20.0, 0.012, 0.25, 0.03, 0.4)
    judged = {
        name: {"value": value, "low": 0.01, "high": 0.02} for name, value in zip(named, values, strict=True)
    }
    common = {"ecr": 0.25, "tokens_per_second": 10.0}
    rows: list[dict[str, Any]] = [
        {"policy": "lru", "exact": True, **common},
        {"policy": "daop", "exact": False, "quality": judged, **common},
        {"policy": "deferral", "exact": False, "approximate": {"approximated": 3, "calls": 8}, **common},
    ]
    table = quality_table(rows)
    assert table is not None
    text = drawn(table)
    assert "lru" not in text
    for cell in ("daop ~", "1.2e-02 [1.0e-02, 2.0e-02]", "0.250", "3.0%", "40.0%", "x1.050", "37.5%"):
        assert cell in text, cell
    assert quality_table(rows[:1]) is None
