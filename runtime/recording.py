"""What a run can tell a trace about its routing. The file format lives in ``daop.training``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from daop.core import Phase


class Recorder(Protocol):
    """Receives the routing of every forward pass, layer by layer."""

    def begin_forward(
        self, phase: Phase, sequences: Sequence[int], positions: NDArray[np.int32], real: NDArray[np.bool_]
    ) -> None:
        """A forward pass starts.

        ``sequences`` [B]: a number for each row of the batch, unique in the trace;
        ``positions`` [B, S]: position of every token in its sequence;
        ``real`` [B, S]: False for padding, which is not recorded. T = B * S rows follow per layer.
        """

    def record(self, layer: int, ids: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        """ids [T, K], weights [T, K] of one MoE layer."""

    def end_forward(self) -> None:
        """All layers of the forward pass were recorded."""

    def close(self) -> None:
        """Finish the file."""
