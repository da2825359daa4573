"""What ``gpu_check.py`` found: a table, what of the wanted figures was reached, one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpu_sections import best_static


def goals(found: dict[str, Any]) -> list[tuple[str, float | None, float, bool]]:
    """(what, reached, wanted, whether more is better)."""

    def at(*path: Any) -> float | None:
        value: Any = found
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, (int, float)) else None

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a is not None and b else None

    rows = found.get("policies", {}).get("decode", {})
    whole = max(
        (at("rivals", "whole", name, "decode") or 0.0 for name in found.get("rivals", {}).get("whole", {})),
        default=0.0,
    )
    adaptive, quarter = at("policies", "decode", "0.25", "adaptive"), rows.get("0.25", {})
    best_full = max(rows.get("1.0", {}).values(), default=None)
    return [
        ("ECR 1: times transformers' fastest, everything on the GPU", ratio(best_full, whole), 0.95, True),
        (
            "ECR 0.25: times accelerate's offload",
            ratio(adaptive, at("rivals", "offload", "decode")),
            5.0,
            True,
        ),
        ("ECR 0.25: adaptive, times the best static", ratio(adaptive, best_static(quarter)), 1.35, True),
        (
            "copies, share of the pinned bandwidth when they are the bottleneck",
            at("policies", "link_share"),
            0.9,
            True,
        ),
        ("overlap of host and device, share of the shorter", at("overlap", "overlap"), 0.8, True),
        (
            "simulated against measured tokens/s, largest difference",
            at("simulated", "largest_difference"),
            0.15,
            False,
        ),
        ("pinned memory over the weights", at("model", "pinned_over_weights"), 1.02, False),
    ]


def report(
    found: dict[str, Any], shares: Sequence[float], failed: Sequence[str], dry: bool, seed: int
) -> None:
    """A table for people, and last one line of JSON."""
    heads = "".join(f"{f'ECR {share:g}':>16}" for share in shares)
    print(f"\n{'policy':18}{heads}   decode tokens/s (prefill)")
    decode = found.get("policies", {}).get("decode", {})
    prefill = found.get("policies", {}).get("prefill", {})
    for name in sorted({name for row in decode.values() for name in row}):
        cells = []
        for share in shares:
            value = decode.get(str(share), {}).get(name)
            filled = prefill.get(str(share), {}).get(name)
            cells.append(f"{'-':>16}" if value is None else f"{f'{value:.1f} ({filled:.0f})':>16}")
        print(f"{name:18}" + "".join(cells))
    for name, figures in found.get("rivals", {}).get("whole", {}).items():
        print(f"transformers, all on the GPU, {name}: {figures['decode']:.1f} ({figures['prefill']:.0f})")
    print()
    for what, reached, wanted, more in [] if dry else goals(found):
        met = reached is not None and (reached >= wanted if more else reached <= wanted)
        verdict = "reached" if met else "NOT REACHED" if reached is not None else "not measured"
        figure = "" if reached is None else f"{reached:.3f}, "
        print(f"{verdict:13} {what}: {figure}wanted {'at least' if more else 'at most'} {wanted}")
    if failed:
        print(f"failed sections: {', '.join(failed)}")
    if dry:
        print("a dry run on the CPU: these figures say nothing about a GPU")
    found |= {"dry_run": dry, "seed": seed, "failed": list(failed)}
    found["goals"] = {what: reached for what, reached, *_ in goals(found)}
    print(json.dumps(found, default=str))
