"""Native kernels for quantised weights against torch's path of the same codec, in every variant."""

from __future__ import annotations

import pytest
import torch
from coded_layers import CODECS, FORMS, definition, make_coded_layer
from test_host_compute import Layer, make_form

from daop.runtime import native
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.host_compute import HostExperts
from daop.runtime.native import Kernels


def check(layer: Layer, with_kernels: Kernels) -> None:
    """To the rounding of float32. An inner value of INT8 and INT4 may fall on the other side of a rounding
    boundary, which shows in all of its token's outputs, so few tokens may differ by a little."""
    assert native.describe_form(layer.layout, layer.form) is not None
    got = layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=with_kernels)).double()
    wanted = definition(layer)
    scale = float(wanted.abs().max())
    worst = (got - wanted).abs().amax(1) / scale  # by token
    assert worst.isfinite().all()
    if isinstance(layer.layout.codec, Integers):
        assert float(worst.max()) < 5e-3
        assert int((worst > 3e-6).sum()) <= 1 + len(worst) // 8
    else:
        assert float(worst.max()) < 5e-6


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_every_variant_computes_every_codec(form: str, name: str, kernels: Kernels) -> None:
    shape, fused = FORMS[form]
    for tokens in (1, 3, 22):
        check(make_coded_layer(CODECS[name], shape, tokens=tokens, fused=fused), kernels)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "mxfp4"])
def test_odd_shapes(name: str, kernels: Kernels) -> None:
    for hidden, inner in ((1, 1), (31, 33), (65, 130), (260, 7), (129, 300), (4230, 70)):
        for tokens in (1, 6):
            layer = make_coded_layer(CODECS[name], make_form(hidden, inner), tokens=tokens)
            check(layer, kernels)


@pytest.mark.parametrize("hidden", [torch.bfloat16, torch.float16])
def test_mxfp4_in_models_of_16_bits(hidden: torch.dtype, kernels: Kernels) -> None:
    """Activations are rounded to 16 bits of a block's largest: far below the dtype's own rounding."""
    layer = make_coded_layer(Mxfp4(), FORMS["gpt_oss"][0], tokens=22)
    layer.hidden = layer.hidden.to(hidden).float()
    wanted = definition(layer)
    layer.hidden = layer.hidden.to(hidden)
    host = HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)
    batch = host.begin(layer.hidden, layer.ids, layer.weights)
    host.run(batch, batch.experts, [layer.slab[expert] for expert in batch.experts])
    off = (host.total(batch).double() - wanted).abs()
    assert float(off.max() / wanted.abs().max()) < 2e-4


@pytest.mark.parametrize("bias", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [torch.bfloat16, torch.float16])
def test_dtypes_beside_the_weights(
    hidden: torch.dtype,
    bias: torch.dtype,
    kernels: Kernels,
) -> None:
    for codec in (Integers(8, 64), Mxfp4()):
        layer = make_coded_layer(codec, FORMS["gpt_oss"][0], tokens=4, bias=bias)
        layer.hidden = layer.hidden.to(hidden).float()
        check(layer, kernels)


@pytest.mark.parametrize("name", ["int8-32", "int4-64", "fp8", "mxfp4"])
def test_no_bit_depends_on_address_or_threads(name: str, kernels: Kernels) -> None:
    layer = make_coded_layer(CODECS[name], make_form(160, 480), tokens=5, count=8)
    experts = HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)
    wanted = layer.run(experts)
    threads, slab = torch.get_num_threads(), layer.slab
    try:
        for shift, count in ((1, 1), (2, 2), (62, 3)):
            torch.set_num_threads(count)
            store = torch.zeros(slab.numel() + shift, dtype=torch.uint8)
            layer.slab = store[shift:].view(slab.shape).copy_(slab)
            assert torch.equal(layer.run(experts), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["int8-32", "int4-128", "fp8", "mxfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_activations_that_are_not_finite_stay_visible(
    value: float,
    name: str,
    kernels: Kernels,
) -> None:
    layer = make_coded_layer(CODECS[name], make_form(160, 96), tokens=3)
    layer.hidden[1, 70] = value
    out = layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=kernels))
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_weights_that_are_not_finite_stay_visible(kernels: Kernels) -> None:
    for codec, at in ((Integers(8, 64), "gate_up_scale"), (Mxfp4(), "gate_up_scale"), (Fp8(), "gate_up")):
        layer = make_coded_layer(codec, make_form(192, 96), tokens=2, top_k=1)
        layer.ids = torch.tensor([[0], [1]])
        part = layer.layout.views(layer.slab[0])[at]
        if part.dtype == torch.bfloat16:
            part[5, 1] = torch.nan
        else:
            part.view(torch.uint8)[5, 3] = 255  # NaN in both formats
        out = layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=kernels))
        assert not out[0].isfinite().any()
        assert out[1].isfinite().all()


def test_extreme_values(kernels: Kernels) -> None:
    """The largest products that 16 and 32 bits must hold, and groups of zeros and of tiny numbers."""
    for bits in (4, 8):
        for group in (32, 64, 128):
            codec = Integers(bits, group)
            layer = make_coded_layer(codec, make_form(256, 128, "relu", gated=False), tokens=3, top_k=1)
            for slot in layer.slab:
                views = layer.layout.views(slot)
                views["up"].fill_(-127 if bits == 8 else 255)
                views["up_scale"].fill_(2.0**-8)
                if bits == 8:
                    views["up"][::2] = 127
            layer.hidden[:] = torch.tensor([[-1.0], [1.0], [0.0]])
            layer.hidden[2, :32] = 1e-38
            check(layer, kernels)


def test_every_byte_of_fp8_and_mxfp4(kernels: Kernels) -> None:
    """All values of both formats, one at a time, in every column of a block."""
    for codec, values in ((Fp8(), 256), (Mxfp4(), 256)):
        layer = make_coded_layer(codec, make_form(64, 256, "relu", gated=False), tokens=1, top_k=1)
        layer.ids = torch.zeros_like(layer.ids)
        views = layer.layout.views(layer.slab[0])
        every = torch.arange(values, dtype=torch.uint8)
        every[(every & 127) == 127] = 0 if codec == Fp8() else 127
        stored = views["up"].view(torch.uint8).view(256, -1)
        for column in range(stored.shape[1]):
            stored[:, column] = every.roll(column)
        check(layer, kernels)
