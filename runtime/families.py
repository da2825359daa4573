"""How each family of transformers keeps its routed experts, and how daop takes their place.

Most families decorate their experts module with transformers' ``use_experts_implementation``: one contract
(``Decorated``) covers them all. The others get an adapter each (``ADAPTERS``), so that what calls the experts
is the same for all: ``experts.ExpertsFn``. An adapter says which parameters are an expert's and what is
computed with them; its ``install`` removes those parameters (so that nothing is allocated or read for them)
and routes the calls. Only the model instance at hand is changed, never a class of transformers.

Shape legend: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from daop.core import DaopError
from daop.runtime.activations import name_activation
from daop.runtime.experts import Experts, PartSource, Route, required_attribute
from daop.runtime.layout import ExpertForm

IMPLEMENTATION = "daop"  # the name under which transformers knows us
TESTED = (
    "afmoe",
    "cohere2_moe",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "jamba",
    "laguna",
    "lfm2_moe",
    "llama4_text",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
)
"""The model types whose logits are compared with transformers' own in the tests (docs/families.md)."""


class Decorated(Experts):
    """Modules under transformers' ``use_experts_implementation``: fused 3-D parameters."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return all(
            hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated")
        )

    def find_sources(self) -> dict[str, PartSource]:
        up = "gate_up" if self.module.has_gate else "up"
        roles = [up, "down"] + ([f"{up}_bias", "down_bias"] if self.module.has_bias else [])
        sources = {}
        for role in roles:
            name = role.replace("_bias", "") + "_proj" + ("_bias" if role.endswith("_bias") else "")
            parameter = required_attribute(self.module, name)
            sources[f"{self.path}.{name}"] = PartSource(
                role=role, shape=tuple(parameter.shape[1:]), transposed=bool(self.module.is_transposed)
            )
        return sources

    def install(self, model: nn.Module, route: Route) -> None:
        for name in self.sources:
            delattr(self.module, name.rpartition(".")[2])
        self.module.daop_route = route
        # There is nothing left to initialise, and the family's initialiser would look for the parameters.
        self.module._is_hf_initialized = True

    def form(self) -> ExpertForm:
        module = self.module
        transposed = bool(module.is_transposed)
        down = next(source.shape for source in self.sources.values() if source.role == "down")
        intermediate, hidden = down if transposed else reversed(down)
        apply_gate = module._apply_gate if module.has_gate else module.act_fn
        activation, arguments = name_activation(
            apply_gate,
            gated=bool(module.has_gate),
            interleaved=not module.is_concatenated,
            arguments=tuple(
                float(getattr(module, name)) for name in ("alpha", "limit") if hasattr(module, name)
            ),
        )
        return ExpertForm(
            hidden=hidden,
            intermediate=intermediate,
            has_gate=bool(module.has_gate),
            has_bias=bool(module.has_bias),
            transposed=transposed,
            interleaved=not module.is_concatenated,
            activation=activation,
            activation_arguments=arguments,
            apply_gate=apply_gate,
            post_norm=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
        )


class Dbrx(Experts):
    """dbrx: gate (w1) and up (v1) [E*I, H] as [out, in], down (w2) [E*I, H] as [in, out]."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return type(module).__name__ == "DbrxExperts"

    def find_sources(self) -> dict[str, PartSource]:
        shape = (self.module.ffn_hidden_size, self.module.hidden_size)
        roles = {"w1": "gate", "v1": "up", "w2": "down"}
        return {
            f"{self.path}.mlp.{name}": PartSource(
                role=role, shape=shape, rows=shape[0], transposed=role == "down"
            )
            for name, role in roles.items()
        }

    def install(self, model: nn.Module, route: Route) -> None:
        self.block.experts = _BatchedExperts(route)

    def form(self) -> ExpertForm:
        act = self.module.mlp.activation_fn
        apply_gate = _gated(act)
        activation, arguments = name_activation(apply_gate, gated=True, interleaved=False)
        return ExpertForm(
            hidden=self.module.hidden_size,
            intermediate=self.module.ffn_hidden_size,
            has_gate=True,
            has_bias=False,
            transposed=False,
            down_transposed=True,
            interleaved=False,
            activation=activation,
            activation_arguments=arguments,
            apply_gate=apply_gate,
        )


class Llama4(Experts):
    """llama4: every expert is run on every token, scaled by a router score that is 0 for the experts not
    chosen. We run the chosen ones only, on the input scaled the same way; the others would give 0."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return type(module).__name__ == "Llama4TextExperts"

    def find_sources(self) -> dict[str, PartSource]:
        return {
            f"{self.path}.{name}_proj": PartSource(
                role=name,
                shape=tuple(required_attribute(self.module, f"{name}_proj").shape[1:]),
                transposed=True,
            )
            for name in ("gate_up", "down")
        }

    def install(self, model: nn.Module, route: Route) -> None:
        model.set_submodule(self.block_path, _Llama4Block(self.block, route))

    def form(self) -> ExpertForm:
        apply_gate = _gated(self.module.act_fn)
        activation, arguments = name_activation(apply_gate, gated=True, interleaved=False)
        return ExpertForm(
            hidden=self.module.hidden_size,
            intermediate=self.module.expert_dim,
            has_gate=True,
            has_bias=False,
            transposed=True,
            interleaved=False,
            activation=activation,
            activation_arguments=arguments,
            apply_gate=apply_gate,
            scales_input=True,
        )


class _BatchedExperts(nn.Module):
    """Stands for an experts module that is called with [B, S, H]."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.daop_route = route

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.daop_route(hidden.reshape(-1, hidden.shape[-1]), ids, weights).view(hidden.shape)


class _Llama4Block(nn.Module):
    """Stands for Llama4TextMoe; router and shared expert stay transformers' own, under their names."""

    def __init__(self, block: Any, route: Route) -> None:
        super().__init__()
        self.router: nn.Module = block.router
        self.shared_expert: nn.Module = block.shared_expert
        self.top_k: int = block.top_k
        self.daop_route = route

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])  # [T, H]
        scores, logits = self.router(hidden)  # [T, E] both
        ids = torch.topk(logits, self.top_k, dim=1).indices  # [T, K]
        out: torch.Tensor = self.shared_expert(hidden)
        return out.add_(self.daop_route(hidden, ids, scores.gather(1, ids))), logits


ADAPTERS: tuple[type[Experts], ...] = (Decorated, Dbrx, Llama4)


def find_experts(model: nn.Module) -> tuple[Experts, ...]:
    """The routed experts of a model, layer by layer; empty if it has none that an adapter knows."""
    found = [
        adapter(model, path)
        for path, module in model.named_modules()
        for adapter in ADAPTERS
        if adapter.fits(module)
    ]
    return tuple(sorted(found, key=lambda experts: experts.model_layer))


def run_route(
    module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls in the place of a decorated module's forward."""
    route = getattr(module, "daop_route", None)
    if route is None:
        raise DaopError(
            f"experts_implementation={IMPLEMENTATION!r} works only for a model that daop itself loaded: "
            "use daop.load instead of from_pretrained"
        )
    out: torch.Tensor = route(hidden, ids, weights)
    return out


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:  # [n, 2I] -> [n, I]
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    return apply_gate
