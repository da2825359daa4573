"""An expert's bytes in every format, and what computing it was measured to cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daop.core import DaopError
from daop.hardware import load
from daop.runtime import measure_formats
from daop.runtime.calibrate import calibrate_host
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.codecs.base import TYPES
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.experts import Experts, PartSource
from daop.runtime.format_names import BITS, GROUPS, PAGE
from daop.runtime.formats import codec_of, format_of, layout_in
from daop.runtime.host_compute import HostExperts
from daop.runtime.layout import ExpertLayout
from daop.runtime.measure_formats import TOKENS, random_experts
from daop.runtime.memory import divide, slot_classes_of
from daop.runtime.model import build_model
from daop.runtime.pack_convert import packed_layout


class Shapes(Experts):
    """The parts of an expert, without a model."""

    def __init__(self, hidden: int, inner: int) -> None:
        self.sources = {
            "gate_up_proj": PartSource(role="gate_up", shape=(2 * inner, hidden)),
            "down_proj": PartSource(role="down", shape=(hidden, inner)),
        }

    fits: Any = None
    find_sources: Any = None
    install: Any = None
    form: Any = None


Shapes.__abstractmethods__ = frozenset()


@given(
    name=st.sampled_from(sorted(BITS)),
    hidden=st.integers(1, 40).map(lambda n: 32 * n),
    inner=st.integers(1, 40).map(lambda n: 32 * n),
    budget=st.integers(0, 1 << 26),
)
def test_budget_and_slots_follow_stored_bytes(name: str, hidden: int, inner: int, budget: int) -> None:
    experts: Any = Shapes(hidden, inner)
    plain = ExpertLayout.pack(
        [("gate_up", (2 * inner, hidden), "BF16"), ("down", (hidden, inner), "BF16")], PLAIN
    )
    layout = layout_in(experts, plain, name)
    assert format_of(layout) == name
    weights = 3 * hidden * inner
    padded = PAGE if name in GROUPS else 64 * len(layout.parts)
    rows = 2 * inner + hidden  # of which each may be padded to a block, or share a scale with fewer
    assert layout.stored_bytes >= int(weights * BITS[name] / 8)
    assert layout.stored_bytes <= weights * BITS[name] / 8 + padded + rows * 136 + 4 * (rows + 128)
    if name in GROUPS:
        assert layout.stored_bytes == layout.nbytes == packed_layout(plain, experts, codec_of(name)).nbytes
    checkpoint: Any = type(
        "Checkpoint", (), {"layouts": [layout], "geometry": type("G", (), {"experts": (8,)})}
    )
    (kind,) = slot_classes_of(checkpoint)
    plan = divide(
        classes=[kind],
        non_experts=0,
        kv_cache=0,
        workspace=0,
        limit=1 << 40,
        limit_source="a test",
        fast_memory=budget,
        ecr=None,
    )
    assert sum(plan.slots) == min(8, budget // layout.nbytes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"hidden_size": 64}
    return {
        "qwen3_moe": open_checkpoint(
            tiny_models.save_tiny(
                "qwen3_moe", folder / "a", dtype=torch.bfloat16, moe_intermediate_size=32, **sizes
            )
        ),
        "gpt_oss": open_checkpoint(
            tiny_models.save_tiny(
                "gpt_oss", folder / "b", dtype=torch.bfloat16, intermediate_size=32, **sizes
            )
        ),
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("name", sorted(BITS))
def test_random_experts_of_every_format_are_computed(
    name: str, family: str, models: dict[str, Checkpoint]
) -> None:
    checkpoint = models[family]
    layout = layout_in(checkpoint.skeleton.experts[0], checkpoint.layouts[0], name)
    form = build_model(checkpoint, lambda *_: torch.empty(0)).forms[0]
    (slot,) = random_experts(layout, 1)
    for tokens in (1, 17):
        hidden = torch.randn(tokens, form.hidden).bfloat16()
        compute = HostExperts(layout, form, 1)
        batch = compute.begin(hidden, torch.zeros(tokens, 1, dtype=torch.long), torch.ones(tokens, 1))
        compute.run(batch, [0], [slot])
        out = compute.finish(batch).float()
        assert out.isfinite().all()
        assert out.abs().max() > 1e-6
        assert not ((out.abs() < 1e-30) & (out != 0)).any(), "denormals are slow"


def test_every_format_is_measured_over_prefill_too(models: dict[str, Checkpoint]) -> None:
    checkpoint = models["qwen3_moe"]
    form = build_model(checkpoint, lambda *_: torch.empty(0)).forms[0]
    names = ["int8", "mxfp4"]
    layouts = measure_formats.layouts_in(checkpoint, names)
    curves = measure_formats.measure_formats(checkpoint, form, layouts, 0.05, lambda *_: None)
    assert [curve.format for curve in curves] == names
    for curve in curves:
        assert curve.tokens == TOKENS
        assert "kernels" in curve.source, "those of torch are several times slower"
        assert curve.tokens[-1] > 16 < curve.tokens[3], "both sides of where native kernels end"
        assert curve.seconds(256) == pytest.approx(curve.microseconds[-1] * 1e-6)
    assert curves[0].nbytes % PAGE == 0


def test_what_has_no_blocks_of_32_is_no_mxfp4(tmp_path: Path) -> None:
    odd = open_checkpoint(tiny_models.save_tiny("qwen3_moe", tmp_path, dtype=torch.bfloat16))
    told: list[str] = []
    with pytest.raises(DaopError, match="--format mxfp4: MXFP4 goes by blocks of 32 inputs"):
        calibrate_host(odd, formats=["int8", "mxfp4"], told=lambda step, _: told.append(step))
    assert told == [], "before anything is measured"


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations read and write; views move none."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.nbytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp4"])
def test_shares_of_a_card_are_what_decoding_moves(name: str) -> None:
    codec, size = codec_of(name), 1024
    parts = {
        f"down{suffix}": torch.zeros(piece.shape).to(TYPES[piece.dtypes[0]])
        for suffix, piece in codec.pieces(size, size).items()
    }
    with Moved() as moved:  # type: ignore[no-untyped-call]
        codec.inputs(torch.zeros(1, size)) @ codec.decode(parts, "down", size, 0, size).T
    stored = sum(part.numel() * part.element_size() for part in parts.values())
    assert load("rtx4090").shares[name].device == pytest.approx(stored / moved.nbytes, rel=0.05)
