"""What stands between a model and its executor: nothing, an approximate policy, or a tap on forecasts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .announcing import Announcer, ForecastTap
from .early import EarlyResults
from .executor import Executor
from .experts import ExpertsFn
from .input_correction import InputCorrection
from .model import BuiltModel
from .policies.approximate import Approximate
from .policies.base import Policy
from .recording import ForecastRecorder


class ApproximateExperts:
    """What the model calls in the place of ``executor``: the same experts, run as ``early`` decides."""

    def __init__(self, executor: Executor, early: EarlyResults) -> None:
        executor.records_routing = False  # it sees more rows than there are tokens
        self._executor = executor
        self._early = early

    @torch.inference_mode()
    def __call__(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H] in hidden's dtype."""
        executor, early = self._executor, self._early
        decided = early.enter(layer, hidden, ids, weights, executor.conductor.statistics)
        if executor.recorder is not None:
            executor.record_routing(executor.recorder, layer, *decided.routing)
        executor.expect(layer, decided, early.look_ahead(layer, hidden))
        total = executor(layer, decided.hidden, decided.ids, decided.weights)
        return early.leave(decided, total)


@dataclass(frozen=True, eq=False)
class Around:
    """``run``: what the model calls; who else is to be told of its forward passes."""

    run: ExpertsFn
    early: EarlyResults | None = None
    tap: ForecastTap | None = None


def around(
    executor: Executor, policy: Policy, built: BuiltModel, forecasts: ForecastRecorder | None
) -> Around:
    """``forecasts``: record what was announced, and how far off it was (None: do not)."""
    geometry, forms = executor.checkpoint.geometry, built.forms
    if not isinstance(policy, Approximate) and forecasts is None:
        return Around(executor)
    correction = InputCorrection.of(policy.profile, forms[0].hidden)
    if not isinstance(policy, Approximate):
        assert forecasts is not None
        tap = ForecastTap(executor, Announcer(built, correction, "--distances"), geometry.layers, forecasts)
        return Around(tap, tap=tap)
    early = EarlyResults(
        policy,
        built,
        geometry,
        correction=correction,
        scales_input=any(form.scales_input for form in forms),
    )
    return Around(ApproximateExperts(executor, early), early)
