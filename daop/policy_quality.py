"""What the approximate policies of a comparison change in a model's output, fed its own answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from daop.core import DaopError
from daop.runtime.policies.base import POLICIES

REFERENCE = "static"  # any exact policy gives the same logits


def refuse_approximate(names: Sequence[str]) -> None:
    """``--exact``: raise if a policy may change the output."""
    found = [name for name in names if not POLICIES.get(name).exact]
    if found:
        raise DaopError(
            f"--exact forbids {', '.join(found)}, whose output is approximate: leave out --exact, or choose "
            "an exact policy"
        )


def measure_policies(
    model: str | Path,
    prompts: Path,
    shares: Sequence[float],
    names: Sequence[str],
    *,
    max_new_tokens: int,
    options: Mapping[str, Any],
    told: Callable[[str], object],
) -> dict[tuple[str, float], dict[str, Any]]:
    """(policy, ECR) -> ``daop.quality.Quality`` as a dict, of the policies that are not exact.

    ``options`` go to ``daop.load``. The exact run answers the prompts once; every policy is fed its answers.
    """
    import daop
    from daop.quality import Batch, Spool, answered, measure, teacher

    found: dict[tuple[str, float], dict[str, Any]] = {}

    def refer() -> list[Batch]:
        told("the exact run, for the quality of the others")
        with daop.load(model, policy=REFERENCE, ecr=max(shares), **options) as runtime:
            batches = answered(runtime, prompts, max_new_tokens)
            score = teacher(runtime)
            for batch in batches:
                spool.keep(batch, score(batch))
        return batches

    def judge(name: str, share: float) -> dict[str, Any]:
        told(f"ECR {share:g}, quality: {name}")
        with daop.load(model, policy=name, ecr=share, **options) as runtime:
            return measure(spool, teacher(runtime), batches).as_dict()

    # A function for each run: a model that nothing names any more leaves room for the next.
    with tempfile.TemporaryDirectory(prefix="daop-quality-") as folder:
        spool = Spool(Path(folder))
        batches = refer()
        for share in shares:
            for name in names:
                if not POLICIES.get(name).exact:
                    found[name, share] = judge(name, share)
    return found


def add_quality(rows: list[dict[str, Any]], found: Mapping[tuple[str, float], dict[str, Any]]) -> None:
    """Put each row's quality beside its speed."""
    for row in rows:
        quality = found.get((row["policy"], row["ecr"]))
        if quality is not None:
            row["quality"] = quality
