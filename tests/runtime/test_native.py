"""The native kernels against torch's path, in every variant that can run here, and their absence."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_host_compute import FORMS, check, make_form, make_layer

from daop.core import DaopError
from daop.runtime import native, native_library
from daop.runtime.host_compute import HostExperts
from daop.runtime.native import Kernels


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    native._load.cache_clear()
    yield
    native._load.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("custom", "post_norm")])
def test_every_variant_computes_every_form(name: str, dtype: torch.dtype, kernels: Kernels) -> None:
    for tokens in (1, 2, 3, 5, 37):
        layer = make_layer(FORMS[name], tokens=tokens, weights=dtype, hidden=torch.float32, fused=tokens != 2)
        plain = HostExperts(layer.layout, layer.form, layer.count, kernels=None)
        got, wanted = (
            layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)),
            layer.run(plain),
        )
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("shape", [(31, 33), (64, 16), (65, 130), (260, 7), (128, 300)])
@pytest.mark.parametrize("transposed", [False, True])
def test_odd_shapes(shape: tuple[int, int], transposed: bool, kernels: Kernels) -> None:
    for tokens in (1, 6):
        layer = make_layer(make_form(*shape, transposed=transposed), tokens=tokens, hidden=torch.float32)
        check(layer, HostExperts(layer.layout, layer.form, layer.count, kernels=kernels))


@pytest.mark.parametrize("name", ["plain", "no_gate_bias", "interleaved_rows", "scaled_bias", "transposed"])
def test_hidden_states_in_bf16_lose_nothing(
    name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiplied as they are or converted before: what float64 gives, up to the rounding of float32 sums."""
    from_17_rows_torch = "daop.runtime.host_compute.has_bf16_arithmetic"
    monkeypatch.setattr(from_17_rows_torch, lambda: False)
    for tokens in range(1, 20):
        width = (1, 2, 15, 31, 32, 33, 64, 97, 130, 513, 1060)[tokens % 11]
        form = replace(FORMS[name], hidden=width, intermediate=36 + tokens)
        layer = make_layer(form, tokens=tokens, top_k=1, count=1, seed=tokens)
        experts = HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)
        batch = experts.begin(layer.hidden, layer.ids, layer.weights)
        experts.run(batch, [0], [layer.slab[0]])
        got, wanted = experts.total(batch).double(), layer.plain()
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_states_in_bf16_that_are_not_finite(value: float, kernels: Kernels) -> None:
    layer = make_layer(FORMS["odd"], tokens=6)
    for at in (0, 31, 36):  # the first, the last of a whole step, the last
        layer.hidden[at % 6, at] = value
        out = layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=kernels))
        spoilt = ~layer.hidden.isfinite().all(dim=1)
        assert not out[spoilt].isfinite().any()
        assert out[~spoilt].isfinite().all()


def test_slots_at_any_address(kernels: Kernels) -> None:
    layer = make_layer(FORMS["bias"], tokens=4)
    experts = HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)
    wanted = layer.run(experts)
    for shift in (2, 6, 62):
        store = torch.zeros(layer.slab.numel() + shift, dtype=torch.uint8)
        slab = store[shift:].view(layer.slab.shape)
        layer.slab = slab.copy_(layer.slab)
        assert torch.equal(layer.run(experts), wanted)


def test_threads_change_no_bit(kernels: Kernels) -> None:
    layer = make_layer(make_form(160, 500), tokens=9, count=8)
    experts = HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(layer.run(experts))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["plain", "transposed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_stay_visible(value: float, name: str, kernels: Kernels) -> None:
    layer = make_layer(FORMS[name], tokens=2, top_k=1)
    layer.ids = torch.tensor([[0], [1]])
    parts = layer.layout.views(layer.slab[0])
    parts["gate_up"][7, 9] = value
    out = layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=kernels))
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()


def test_activations_of_extreme_values(kernels: Kernels) -> None:
    for name in ("plain", "gpt_oss", "relu", "no_gate", "interleaved_rows"):
        layer = make_layer(FORMS[name], tokens=4, hidden=torch.float32)
        layer.hidden *= 300
        plain = HostExperts(layer.layout, layer.form, layer.count, kernels=None)
        got, wanted = (
            layer.run(HostExperts(layer.layout, layer.form, layer.count, kernels=kernels)),
            layer.run(plain),
        )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_forms_that_only_torch_knows() -> None:
    for name in ("custom", "post_norm"):
        layer = make_layer(FORMS[name], tokens=1)
        assert native.describe_form(layer.layout, layer.form) is None


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAOP_NATIVE", "0")
    assert native.native_status() == (False, "", "switched off by DAOP_NATIVE=0")
    assert native.load_kernels() is None


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DAOP_NATIVE", raising=False)
    monkeypatch.setattr(native_library, "HERE", tmp_path)
    available, variant, reason = native.native_status()
    assert (available, variant) == (False, "")
    assert "python -m daop.runtime.native" in reason
    layer = make_layer(FORMS["plain"], tokens=3)
    check(layer, HostExperts(layer.layout, layer.form, layer.count))


def test_found_and_forced(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "HERE", library.parent)
    last = Kernels(library).variants[-1]
    monkeypatch.setenv("DAOP_NATIVE", last)
    assert native.native_status()[:2] == (True, last)
    monkeypatch.setenv("DAOP_NATIVE", "sse9")
    with pytest.raises(DaopError, match="DAOP_NATIVE=sse9 .* can run .*" + last):
        native.native_status()


def test_damaged_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_experts.so").write_bytes(b"not a library")
    monkeypatch.delenv("DAOP_NATIVE", raising=False)
    monkeypatch.setattr(native_library, "HERE", tmp_path)
    available, _, reason = native.native_status()
    assert not available
    assert "cannot be loaded" in reason
    assert reason in caplog.text


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DaopError, match=r"install g\+\+"):
        native_library.compile_command(Path("x.so"), ())


@pytest.mark.slow
def test_under_sanitizers(tmp_path: Path) -> None:
    """A driver of its own runs every variant, dtype and layout on buffers without a byte to spare."""
    driver = tmp_path / "driver"
    checks = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    source = Path(__file__).with_name("kernels_driver.cpp")
    try:
        command = native_library.compile_command(driver, (*checks, "-DDAOP_EMULATE_AVX512"), source)
    except DaopError as error:
        pytest.skip(str(error))
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([driver], capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("runs\n")


@pytest.mark.parametrize(("processor", "variants"), [("max", "neon_dots, neon"), ("cortex-a53", "neon")])
def test_on_aarch64_in_emulation(
    processor: str, variants: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same driver, built for ARM and run by qemu where both are installed."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    monkeypatch.setenv("CXX", compiler)
    driver = tmp_path / "driver"
    source = Path(__file__).with_name("kernels_driver.cpp")
    command = native_library.compile_command(driver, ("-O1", "-static"), source)
    subprocess.run(command, capture_output=True, text=True, check=True)
    ran = subprocess.run(
        [emulator, "-cpu", processor, driver], capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith(f"{variants}, ")
    assert ran.stdout.endswith("runs\n")
