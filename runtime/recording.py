"""What a run can tell a trace about its routing. The file format lives in ``daop.training``."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daop.core import Phase


class Recorder(Protocol):
    """Receives the routing of every forward pass, layer by layer; padding is left out."""

    def begin_forward(
        self,
        phase: Phase,
        sequences: NDArray[np.integer[Any]],
        positions: NDArray[np.integer[Any]],
        token_ids: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """A forward pass over T tokens starts; each argument has one entry per token.

        ``sequences``: a number for each sequence, unique in the trace; ``positions`` within it.
        """

    def record(self, layer: int, ids: NDArray[Any], weights: NDArray[Any] | None = None) -> None:
        """ids [T, K], weights [T, K] of one MoE layer."""

    def end_forward(self) -> None:
        """All layers of the forward pass were recorded."""

    def close(self) -> None:
        """Finish the file."""

    def keep_partial(self) -> None:
        """Stop after an error: what is complete is kept, marked as unfinished."""


class ForecastRecorder(Protocol):
    """Receives, beside the routing, how the next layer was announced."""

    def record_forecast(
        self, layer: int, distances: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any]
    ) -> None:
        """Of one MoE layer of a decode pass: relative distance [T] of the announced input from the true one;
        the experts [T, K] that the layer's router named for it, and their weights [T, K]."""
