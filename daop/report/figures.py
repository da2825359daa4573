"""The figures of a run, computed in one place for every command that reports them.

Definitions:
    ttft_ms            prompt sent until its first token, median over answers
    tpot_ms            time of each later token: 50th, 95th and 99th percentile over all of them
    tokens_per_second  tokens after the first, of all answers, by the time that making them took
    hit_rate, bytes, stall_ms, memory_bytes    see ``daop.runtime.statistics``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from daop.generation import Generation


def run_figures(statistics: dict[str, Any], batches: Sequence[Sequence[Generation]]) -> dict[str, Any]:
    """One JSON object for a run. ``batches`` holds what each call of ``generate`` returned: answers that
    ran side by side, so that the longest of them says how long the batch took."""
    answers = [answer for batch in batches for answer in batch]
    later = sum(len(answer.tpot_s) for answer in answers)
    decode_s = sum(max((sum(answer.tpot_s) for answer in batch), default=0.0) for batch in batches)
    prefill_s = sum(max((answer.ttft_s for answer in batch), default=0.0) for batch in batches)
    prompt_tokens = sum(len(answer.prompt_ids) for answer in answers)
    times = np.asarray([t for answer in answers for t in answer.tpot_s], dtype=np.float64) * 1e3
    middle, slow, slowest = np.percentile(times, (50, 95, 99)).tolist() if times.size else (0.0,) * 3
    return {
        "policy": statistics["policy"],
        "ecr": statistics["ecr"],
        "tokens_per_second": later / decode_s if decode_s else 0.0,
        "ttft_ms": float(np.median([answer.ttft_s for answer in answers])) * 1e3 if answers else 0.0,
        "tpot_ms": {"p50": middle, "p95": slow, "p99": slowest},
        "prefill_tokens_per_second": prompt_tokens / prefill_s if prefill_s else 0.0,
        "seconds": {"prefill": prefill_s, "decode": decode_s},
        "tokens": {"prompt": prompt_tokens, "generated": sum(len(a.token_ids) for a in answers)},
        **statistics,
        "token_ids": [answer.token_ids for answer in answers],
    }
