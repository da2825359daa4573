"""What daop asks of a family's routed experts: where their weights are, what is computed, where calls go.

``Experts`` is the layer's side of it, ``ExpertsFn`` the runtime's. ``families`` has the families' own ways.

Shape legend: T tokens, K experts per token, H hidden size.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from daop.core import DaopError
from daop.runtime.layout import ExpertForm

ExpertsFn = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(MoE layer, hidden [T, H], ids int64 [T, K], weights [T, K]) -> [T, H] in hidden's dtype.

An id that is not below the number of experts is padding and contributes nothing."""


@dataclass(frozen=True)
class Route:
    """Where an experts module sends its calls. A plain attribute of the module, so that two models loaded at
    once do not meet."""

    layer: int
    experts: ExpertsFn

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(self.layer, hidden, ids, weights)


@dataclass(frozen=True, kw_only=True)
class PartSource:
    """One parameter of the experts module: the part's role, its shape for one expert, how many rows of the
    parameter's first axis are one expert's (0: the first axis counts experts), and whether the shape is
    [in, out]."""

    role: str
    shape: tuple[int, ...]
    rows: int = 0
    transposed: bool = False


class Experts(ABC):
    """The routed experts of one layer of a model; ``path`` is the experts module's name in it."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path = path
        self.module: Any = model.get_submodule(path)
        self.block_path = path.rpartition(".")[0]
        self.block: Any = model.get_submodule(self.block_path)
        self.count = int(required_attribute(self.module, "num_experts"))
        self.sources = self.find_sources()

    @staticmethod
    @abstractmethod
    def fits(module: nn.Module) -> bool:
        """Whether this adapter is the one for the module."""

    @abstractmethod
    def find_sources(self) -> dict[str, PartSource]:
        """The experts' parameters, by their name in the model."""

    @abstractmethod
    def install(self, model: nn.Module, route: Route) -> None:
        """Remove the experts' parameters from the model and send its calls to ``route``."""

    @abstractmethod
    def form(self) -> ExpertForm:
        """What to compute; called once the rest of the model has its weights."""

    @property
    def model_layer(self) -> int:
        """The model's own number of this layer."""
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", self.path)
        if not numbers:
            raise DaopError(f"cannot tell the layer of {self.path!r}: its name has no number")
        return int(numbers[0])

    @property
    def router(self) -> nn.Module | None:
        """The module that chooses the experts, where it is found."""
        for name in ("gate", "router"):
            module = getattr(self.block, name, None)
            if isinstance(module, nn.Module):
                return module
        return None

    @property
    def top_k(self) -> int:
        """Experts chosen per token."""
        for owner in (self.router, self.block, getattr(self.router, "config", None)):
            for name in ("top_k", "num_experts_per_tok", "top_k_experts"):
                value = getattr(owner, name, None)
                if isinstance(value, int):
                    return value
        raise DaopError(f"cannot tell how many experts {self.block_path!r} chooses per token")


def required_attribute(module: nn.Module, name: str) -> Any:
    value = getattr(module, name, None)
    if value is None:
        raise DaopError(
            f"{type(module).__name__} has no {name!r}: this version of transformers keeps the experts of "
            "this family in a way that daop does not know; install a version that pyproject.toml allows"
        )
    return value
