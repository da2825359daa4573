"""What the executors of all devices do alike: they run the routed experts of every MoE layer.

``HostExecutor`` (host_executor.py) computes from RAM with files behind it, ``CudaExecutor``
(cuda/executor.py) from HBM with host memory behind it.

Shape legend: T tokens, K experts per token, H hidden size, E experts of the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from daop.core import Phase, Step

from .checkpoint import Checkpoint
from .conductor import Conductor
from .host_compute import Batch
from .recording import Recorder

if TYPE_CHECKING:
    from .early import Decided, Started


class Gates(Protocol):
    """The model's routers, for the gate look-ahead (``model.BuiltModel``)."""

    def router_logits(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        """[T, H] -> scores [T, E] as that layer's own router ranks them; None if it is not known."""

    def router_input(self, layer: int) -> torch.Tensor | None:
        """What the layer's router saw last, [T, H]."""


class Executor(ABC):
    """What every device's executor does alike. One forward pass at a time, from one thread."""

    def __init__(
        self, checkpoint: Checkpoint, conductor: Conductor, gates: Gates, recorder: Recorder | None
    ) -> None:
        self.checkpoint = checkpoint
        self.conductor = conductor
        self.recorder = recorder
        self.records_routing = True  # False: whoever calls the executor records what the tokens chose
        self._gates = gates
        self._offsets = checkpoint.geometry.offsets
        self._layers = checkpoint.geometry.layers
        self._checked = bytearray(checkpoint.geometry.total)  # experts whose bytes were looked at once
        self._phase = Phase.PREFILL
        self._forward = -1
        self._real: NDArray[np.intp] | None = None

    @abstractmethod
    def start(self) -> None:
        """Load what the policy wants in fast memory before the first token."""

    @abstractmethod
    def __call__(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H] in hidden's dtype."""

    def begin_forward(
        self, phase: Phase, rows: int, new_sequences: int = 0, real: NDArray[np.intp] | None = None
    ) -> None:
        """The model is about to run ``rows`` tokens through all its layers.

        ``new_sequences``: for how many sequences it is the first pass; ``real``: which of the rows are
        recorded (None: all), for padding is computed but is nobody's traffic.
        """
        self._phase = phase
        self._forward += 1
        self._real = real
        self.conductor.begin(phase, rows, new_sequences)

    def expect(self, layer: int, decided: Decided, started: Started | None) -> None:
        """An approximate policy has ``decided`` what runs next, as layer ``layer``. What it ``started`` of
        the one behind may be computed ahead, beside the device; an executor that cannot does nothing."""
        return

    def settle(self) -> None:
        """Bring the statistics up to date with what is still under way."""
        return

    def _step(self, layer: int, batch: Batch) -> Step:
        base = self._offsets[layer]
        return Step(
            layer,
            self._phase,
            self._forward,
            batch.hidden.shape[0],
            [base + expert for expert in batch.experts],
            batch.tokens,
            batch.weight_sums(),
        )

    def _check(self, layer: int, flat: int, slot: torch.Tensor) -> None:
        """Look once at every expert's bytes for the marks of an unfilled placeholder."""
        if not self._checked[flat]:
            self.checkpoint.layouts[layer].check_finite(slot, self.checkpoint.describe(flat))
            self._checked[flat] = 1

    def _record(self, recorder: Recorder, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if self.records_routing:
            self.record_routing(recorder, layer, ids, weights)

    def record_routing(
        self, recorder: Recorder, layer: int, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Tell a trace what the tokens of this pass chose, padding left out."""
        chosen, shares = ids.cpu().numpy(), weights.float().cpu().numpy()
        if self._real is not None:
            chosen, shares = chosen[self._real], shares[self._real]
        recorder.record(layer, chosen, shares)

    # -- forecasts -------------------------------------------------------------------------------

    def _look_ahead(self, layer: int, hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Gate look-ahead: the next layers' routers on this layer's router input. Gives the layers and, on
        hidden's device, the chance that any of the rows chooses each expert, float32 [E]."""
        last = min(layer + self.conductor.policy.horizon, self._layers - 1)
        if last == layer:
            return []
        seen = self._gates.router_input(layer)
        found = []
        for ahead in range(layer + 1, last + 1):
            scores = self._gates.router_logits(ahead, hidden if seen is None else seen)
            if scores is not None:
                found.append((ahead, self._chance(scores)))
        return found

    def _chance(self, scores: torch.Tensor) -> torch.Tensor:
        """Router scores [T, E] -> chance that any of the rows chooses each expert, float32 [E].

        Scores are as ``routers.Router`` gives them: the router's own choice stands 1 above the rest. The
        chance is a plain surrogate, ordered as the scores are; a calibrated one is a predictor's work.
        """
        picked = (scores >= 1).float()
        share = ((scores - picked) * self.checkpoint.geometry.top_k).clamp_(max=1.0)
        chance = (picked + share) * 0.5  # [T, E]
        return chance[0] if len(chance) == 1 else 1.0 - (1.0 - chance).prod(dim=0)
