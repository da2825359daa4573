"""Random experts in every codec, and what they should compute, for tests of codecs and kernels."""

from __future__ import annotations

import torch
from test_host_compute import Layer, make_form

from daop.runtime.codecs.base import SCALE, Codec
from daop.runtime.codecs.fp8 import BLOCK, Fp8
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.layout import ExpertForm, ExpertLayout

CODECS: dict[str, Codec] = {
    **{f"int{bits}-{group}": Integers(bits, group) for bits in (8, 4) for group in (32, 64, 128)},
    "fp8": Fp8(),
    "mxfp4": Mxfp4(),
}
FORMS: dict[str, tuple[ExpertForm, bool]] = {  # form, and whether gate and up are one part
    "fused": (make_form(96, 64), True),
    "separate": (make_form(96, 64, has_bias=True), False),
    "gpt_oss": (make_form(160, 96, "gpt_oss", interleaved=True, has_bias=True), True),
    "no_gate": (make_form(64, 96, "relu2", gated=False), False),
    "scaled": (make_form(64, 32, has_bias=True, scales_input=True), True),
    "wide": (make_form(544, 288), True),
}


def encode(codec: Codec, rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A random weight of that size in the codec, pieces by suffix."""
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    if isinstance(codec, Integers):
        return codec.encode(weight)
    if isinstance(codec, Fp8):
        scale = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), generator=generator) * 0.01 + 0.001
        by_value = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        return {"": (weight / by_value).clamp_(-448, 448).to(torch.float8_e4m3fn), SCALE: scale}
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(116, 124, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return {"": blocks, SCALE: scales}


def make_coded_layer(
    codec: Codec,
    form: ExpertForm,
    *,
    tokens: int,
    fused: bool = True,
    count: int = 3,
    top_k: int = 2,
    bias: torch.dtype = torch.bfloat16,
    hidden: torch.dtype = torch.float32,
    seed: int = 0,
) -> Layer:
    """As ``test_host_compute.make_layer``, with weights in a codec."""
    generator = torch.Generator().manual_seed(seed)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    if not form.has_gate:
        roles = {"up": form.intermediate}
    elif fused:
        roles = {"gate_up": 2 * form.intermediate}
    else:
        roles = {"gate": form.intermediate, "up": form.intermediate}
    shapes: list[tuple[str, int, int]] = [(role, rows, form.hidden) for role, rows in roles.items()]
    shapes.append(("down", form.hidden, form.intermediate))
    parts: list[tuple[str, tuple[int, ...], str]] = []
    for role, rows, columns in shapes:
        pieces = codec.pieces(rows, columns)
        parts += [(role + suffix, piece.shape, piece.dtypes[0]) for suffix, piece in pieces.items()]
        if form.has_bias:
            parts.append((f"{role}_bias", (rows,), names[bias]))
    layout = ExpertLayout.pack(parts, codec)
    slab = torch.zeros(count, layout.nbytes, dtype=torch.uint8)
    for slot in slab:
        views = layout.views(slot)
        for role, rows, columns in shapes:
            for suffix, piece in encode(codec, rows, columns, generator).items():
                views[role + suffix].copy_(piece)
            if form.has_bias:
                views[f"{role}_bias"].copy_(torch.randn(rows, generator=generator))
    return Layer(
        layout=layout,
        form=form,
        slab=slab,
        hidden=torch.randn(tokens, form.hidden, generator=generator).to(hidden),
        ids=torch.rand(tokens, count, generator=generator).argsort(dim=1)[:, :top_k],
        weights=torch.rand(tokens, top_k, generator=generator),
    )


def definition(layer: Layer) -> torch.Tensor:
    """[T, H] float64 from decoded weights and activations as the codec rounds them."""
    codec, form = layer.layout.codec, layer.form
    out = torch.zeros(layer.hidden.shape, dtype=torch.float64)
    for expert in range(layer.count):
        rows, ranks = torch.where(layer.ids == expert)
        if not len(rows):
            continue
        weight = layer.weights[rows, ranks, None].double()
        parts = layer.layout.weights(layer.layout.views(layer.slab[expert]), form)
        x = codec.inputs(layer.hidden[rows]).double()
        inner = [
            x @ parts[role].double().T * (weight if form.scales_input else 1.0)
            + (parts[f"{role}_bias"].double() if form.has_bias else 0)
            for role in ("gate_up", "gate", "up")
            if role in parts
        ]
        act = form.apply_gate(torch.cat(inner, dim=-1))
        y = codec.inputs(act.float()).double() @ parts["down"].double().T
        if form.has_bias:
            y += parts["down_bias"].double()
        out.index_add_(0, rows, y if form.scales_input else y * weight)
    return out
