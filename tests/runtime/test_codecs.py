"""Codecs: bytes mean what the formats say, and experts in them compute what the decoded weights would."""

from __future__ import annotations

import pytest
import torch
from coded_layers import CODECS, FORMS, definition, encode, make_coded_layer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from daop.core import DaopError
from daop.runtime.codecs.base import SCALE
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.integers import Integers, round_groups
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.host_compute import HostExperts


def decoded(codec: Integers, weight: torch.Tensor) -> torch.Tensor:
    parts = {"w" + suffix: piece for suffix, piece in codec.encode(weight).items()}
    for suffix, piece in codec.pieces(*weight.shape).items():
        assert tuple(parts["w" + suffix].shape) == piece.shape
    return codec.decode(parts, "w", weight.shape[1], 0, weight.shape[0])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128]),
    magnitude=st.sampled_from([1e-20, 1e-4, 1.0, 1e5]),
)
def test_int8_is_within_half_a_step(rows: int, columns: int, group: int, magnitude: float) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * magnitude
    got = decoded(Integers(8, group), weight)
    for at in range(0, columns, group):
        largest = weight[:, at : at + group].abs().amax(1, keepdim=True)
        step = largest / 127 * 1.01  # scales are rounded up to BF16
        assert bool(((got - weight)[:, at : at + group].abs() <= step / 2 + 1e-30).all())


def test_int4_uses_its_range_and_is_the_better_of_a_few_scales() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    codec = Integers(4, 32)
    error = (decoded(codec, weight) - weight).square().mean() / weight.square().mean()
    groups = weight.view(64, -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 7  # the plain way
    plain = ((groups / step).round() * step - groups).square().mean() / weight.square().mean()
    assert error < plain * 0.95
    stored = codec.encode(weight)[""]
    assert set(torch.cat((stored & 15, stored >> 4)).flatten().tolist()) == set(range(16))


def test_int4_by_hand() -> None:
    weight = torch.zeros(1, 64)
    weight[0, 0], weight[0, 1], weight[0, 33] = -8.0, 7.0, 3.0
    pieces = Integers(4, 64).encode(weight)
    assert pieces[SCALE].tolist() == [[1.0]]
    assert pieces[""][0, :3].tolist() == [0 | 8 << 4, 15 | 11 << 4, 8 | 8 << 4]


def test_zero_weights_stay_zero() -> None:
    for bits in (4, 8):
        assert not decoded(Integers(bits, 32), torch.zeros(3, 70)).any()


def test_activations_are_rounded_to_even_and_nan_shows() -> None:
    x = torch.tensor([[127.0, 2.5, 3.5, -0.5, *[0.0] * 28, float("inf")]])
    q, scale = round_groups(x, 32)
    assert q[0, 0, :4].tolist() == [127, 2, 4, 0]
    assert scale[0, 0] == 1
    assert bool(scale[0, 1].isnan())
    assert bool(Integers(8, 32).inputs(x)[0, 32:].isnan().all())


def test_rows_decode_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    for codec in CODECS.values():
        parts = {"w" + suffix: piece for suffix, piece in encode(codec, 300, 160, generator).items()}
        whole = codec.decode(parts, "w", 160, 0, 300)
        assert whole.shape == (300, 160)
        for first, last in ((0, 1), (100, 140), (299, 300)):
            assert torch.equal(codec.decode(parts, "w", 160, first, last), whole[first:last])


def test_mxfp4_as_transformers_reads_it() -> None:
    generator = torch.Generator().manual_seed(2)
    pieces = encode(Mxfp4(), 48, 96, generator)
    theirs = convert_moe_packed_tensors(pieces[""][None], pieces[SCALE][None], dtype=torch.float32)[0]
    ours = Mxfp4().decode({"w": pieces[""], "w_scale": pieces[SCALE]}, "w", 96, 0, 48)
    assert torch.equal(ours, theirs.T)


def test_fp8_by_hand() -> None:
    values = torch.ones(130, 129).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    got = Fp8().decode({"w": values, "w_scale": scale}, "w", 129, 0, 130)
    assert got[0, 127] == 1
    assert got[0, 128] == 2
    assert got[129, 0] == 4
    assert got[129, 128] == 8


def test_settings_that_are_no_format() -> None:
    with pytest.raises(DaopError, match="groups one of 32, 64, 128"):
        Integers(8, 48)
    with pytest.raises(DaopError, match="blocks of 32"):
        Mxfp4().pieces(8, 40)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_torch_computes_what_the_decoded_weights_would(form: str, name: str) -> None:
    shape, fused = FORMS[form]
    for tokens in (1, 20):
        layer = make_coded_layer(CODECS[name], shape, tokens=tokens, fused=fused)
        got = layer.run(HostExperts(layer.layout, shape, layer.count, kernels=None)).double()
        wanted = definition(layer)
        # An activation that falls between two whole numbers may go either way.
        loose = 3e-3 if name.startswith("int") else 1e-5
        close = (got - wanted).abs() <= 1e-5 * wanted.abs().max()
        assert float((got - wanted).abs().max()) <= loose * float(wanted.abs().max())
        assert float(close.double().mean()) > (0.5 if name.startswith("int") else 0.999)
