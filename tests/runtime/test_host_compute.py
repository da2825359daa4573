"""HostExperts against the plain arithmetic in float64, and its promise that order changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.runtime.activations import ACTIVATIONS, gpt_oss
from daop.runtime.host_compute import Batch, HostExperts
from daop.runtime.layout import DTYPES, ExpertForm, ExpertLayout
from daop.runtime.reference import compute_expert

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(eq=False)
class Layer:
    """Random experts of one form, in slots, and a random routing."""

    layout: ExpertLayout
    form: ExpertForm
    slab: torch.Tensor  # uint8 [count, nbytes]
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def count(self) -> int:
        return self.slab.shape[0]

    def plain(self) -> torch.Tensor:
        """[T, H] float64: every (token, rank) by itself, from the definition."""
        out = torch.zeros(self.hidden.shape, dtype=torch.float64)
        for token, rank in np.ndindex(*self.ids.shape):
            expert, weight = int(self.ids[token, rank]), self.weights[token, rank].double()
            if not 0 <= expert < self.count:
                continue
            x, parts = self.hidden[token, None].double(), self.layout.views(self.slab[expert])
            if self.form.scales_input:
                out[token] += compute_expert(self.form, parts, x * weight)[0]
            else:
                out[token] += compute_expert(self.form, parts, x)[0] * weight
        return out

    def run(self, experts: HostExperts, order: list[int] | None = None, together: int = 0) -> torch.Tensor:
        """Run the chosen experts in an order (of positions), ``together`` at a time (0: all)."""
        batch = experts.begin(self.hidden, self.ids, self.weights)
        chosen = [int(batch.experts[i]) for i in (order or range(len(batch.experts)))]
        step = together or max(1, len(chosen))
        for i in range(0, len(chosen), step):
            group = chosen[i : i + step]
            experts.run(batch, group, [self.slab[e] for e in group])
        return experts.finish(batch)


def make_form(
    hidden: int, inner: int, activation: str = "silu", gated: bool = True, **changes: object
) -> ExpertForm:
    def gate(fused: torch.Tensor) -> torch.Tensor:
        if not gated:
            return ACTIVATIONS[activation](fused)
        if form.interleaved:
            left, right = fused[..., ::2], fused[..., 1::2]
        else:
            left, right = fused.chunk(2, dim=-1)
        if activation == "gpt_oss":
            return gpt_oss(left, right, *form.activation_arguments)
        return ACTIVATIONS[activation](left) * right

    form = ExpertForm(
        hidden=hidden,
        intermediate=inner,
        has_gate=gated,
        has_bias=False,
        transposed=False,
        interleaved=False,
        activation=activation,
        apply_gate=gate,
        activation_arguments=(1.702, 7.0) if activation == "gpt_oss" else (),
    )
    form = replace(form, **changes)  # type: ignore[arg-type]
    return form


def make_layer(
    form: ExpertForm,
    *,
    tokens: int,
    top_k: int = 2,
    count: int = 4,
    weights: torch.dtype = torch.bfloat16,
    hidden: torch.dtype | None = None,
    fused: bool = True,
    padding: bool = False,
    seed: int = 0,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if not form.has_gate:
        roles = {"up": form.intermediate}
    elif fused or form.interleaved:
        roles = {"gate_up": 2 * form.intermediate}
    else:
        roles = {"gate": form.intermediate, "up": form.intermediate}
    parts: list[tuple[str, tuple[int, ...], str]] = []
    for role, height in [*roles.items(), ("down", form.hidden)]:
        width = form.intermediate if role == "down" else form.hidden
        flip = form.down_is_transposed if role == "down" else form.transposed
        parts.append((role, (width, height) if flip else (height, width), NAMES[weights]))
        if form.has_bias:
            parts.append((f"{role}_bias", (height,), NAMES[weights]))
    layout = ExpertLayout.pack(parts)
    slab = torch.zeros(count, layout.nbytes, dtype=torch.uint8)
    for slot in slab:
        for role, view in layout.views(slot).items():
            scale = 1.0 if role.endswith("bias") else view.shape[-1] ** -0.5
            view.copy_(random(*view.shape) * scale)
    ids = torch.rand(tokens, count, generator=generator).argsort(dim=1)[:, :top_k]
    if padding:
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, count, ids)
    return Layer(
        layout=layout,
        form=form,
        slab=slab,
        hidden=random(tokens, form.hidden).to(hidden or weights),
        ids=ids,
        weights=torch.rand(tokens, top_k, generator=generator),
    )


def check(layer: Layer, experts: HostExperts, wanted: torch.Tensor | None = None) -> None:
    """Within the rounding of the dtype in which the products are formed and the sum is stored."""
    got, wanted = layer.run(experts), layer.plain() if wanted is None else wanted
    assert got.dtype == layer.hidden.dtype
    unit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[layer.hidden.dtype]
    scale = float(wanted.abs().max()) + 1e-30
    assert float((got.double() - wanted).abs().max()) <= 3 * unit * scale


def host(layer: Layer, native: bool = True) -> HostExperts:
    return HostExperts(layer.layout, layer.form, layer.count, kernels="auto" if native else None)


FORMS = {
    "plain": make_form(48, 40),
    "transposed": make_form(48, 40, transposed=True),
    "down_transposed": make_form(48, 40, down_transposed=True),
    "bias": make_form(48, 40, has_bias=True),
    "no_gate": make_form(48, 40, "relu2", gated=False),
    "no_gate_bias": make_form(48, 40, "gelu", gated=False, has_bias=True),
    "gpt_oss": make_form(48, 40, "gpt_oss", interleaved=True, transposed=True, has_bias=True),
    "interleaved_rows": make_form(48, 40, "gelu_pytorch_tanh", interleaved=True),
    "relu": make_form(48, 40, "relu"),
    "llama4": make_form(48, 40, transposed=True, scales_input=True),
    "scaled_bias": make_form(48, 40, has_bias=True, scales_input=True),
    "odd": make_form(37, 29),
    "odd_transposed": make_form(37, 29, transposed=True, has_bias=True),
    "tiny": make_form(1, 1),
    "post_norm": make_form(
        48, 40, post_norm=lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
    "custom": replace(make_form(48, 40), activation="custom"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_equals_the_definition(name: str, tokens: int, dtype: torch.dtype) -> None:
    for fused in (True, False):
        layer = make_layer(FORMS[name], tokens=tokens, weights=dtype, fused=fused)
        wanted = layer.plain()
        for native in (True, False):
            check(layer, host(layer, native), wanted)


def test_weights_and_hidden_states_may_differ_in_dtype() -> None:
    layer = make_layer(FORMS["bias"], tokens=5, weights=torch.bfloat16, hidden=torch.float32)
    check(layer, host(layer))


def test_padding_is_skipped_and_may_be_all_there_is() -> None:
    layer = make_layer(FORMS["plain"], tokens=30, padding=True)
    check(layer, host(layer))
    layer.ids.fill_(layer.count)
    assert torch.equal(layer.run(host(layer)), torch.zeros_like(layer.hidden))


def test_one_expert_chosen_twice_by_a_token_counts_twice() -> None:
    layer = make_layer(FORMS["plain"], tokens=3, weights=torch.float32)
    layer.ids[1] = 2
    check(layer, host(layer))


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 70),
    tokens=st.integers(1, 24),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    transposed=st.booleans(),
    native=st.booleans(),
)
def test_order_and_grouping_change_no_bit(
    data: st.DataObject,
    hidden: int,
    inner: int,
    tokens: int,
    dtype: torch.dtype,
    transposed: bool,
    native: bool,
) -> None:
    form = make_form(hidden, inner, transposed=transposed)
    layer = make_layer(form, tokens=tokens, top_k=3, count=6, weights=dtype, padding=True)
    experts = host(layer, native)
    wanted = layer.run(experts)
    check(layer, experts)
    chosen = len(experts.begin(layer.hidden, layer.ids, layer.weights).experts)
    order = data.draw(st.permutations(range(chosen)))
    together = data.draw(st.integers(1, 6))
    assert torch.equal(layer.run(experts, order, together), wanted)


def test_weights_converted_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daop.runtime.torch_compute.BLOCK_VALUES", 1000)
    for name in ("bias", "gpt_oss", "odd"):
        layer = make_layer(FORMS[name], tokens=20)
        check(layer, host(layer, native=False))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, 4])
def test_what_is_not_finite_stays_visible(value: float, tokens: int) -> None:
    layer = make_layer(FORMS["plain"], tokens=tokens)
    layer.hidden[0, 5] = value
    out = layer.run(host(layer))
    assert not out[0].isfinite().any()
    assert out[1:].isfinite().all()


def test_grouping() -> None:
    layer = make_layer(FORMS["plain"], tokens=3, count=5)
    layer.ids = torch.tensor([[4, 1], [1, 5], [-1, 4]])
    layer.weights = torch.tensor([[0.25, 0.5], [1.0, 9.0], [9.0, 2.0]])
    batch = host(layer).begin(layer.hidden, layer.ids, layer.weights)
    assert batch.experts == [1, 4]
    assert batch.tokens == [2, 2]
    assert batch.weight_sums() == [1.5, 2.25]
    assert [batch.pairs_of(i).tolist() for i in (0, 1)] == [[1, 2], [0, 5]]


def test_misuse_is_refused() -> None:
    layer = make_layer(FORMS["plain"], tokens=1, count=5)
    layer.ids = torch.tensor([[1, 3]])
    experts = host(layer)

    def begin() -> Batch:
        return experts.begin(layer.hidden, layer.ids, layer.weights)

    batch = begin()
    with pytest.raises(ValueError, match="expert 2 was not chosen"):
        experts.run(batch, [2], [layer.slab[2]])
    experts.run(batch, [3], [layer.slab[3]])
    with pytest.raises(ValueError, match="expert 3 has already been run"):
        experts.run(batch, [3], [layer.slab[3]])
    with pytest.raises(ValueError, match="expert 1 was chosen but not run"):
        experts.finish(batch)
    with pytest.raises(ValueError, match="shorter"):
        experts.run(begin(), [1, 3], [layer.slab[1]])
