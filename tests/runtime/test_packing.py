"""Packed folders: the same experts in one range each, and every way in which such a folder can be broken."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from quantised_models import save_fp8, save_mxfp4
from safetensors import safe_open

import daop
from daop.core import DaopError
from daop.runtime import pack_files, packed, packing
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.codecs.integers import Integers
from daop.runtime.files import FileReader
from daop.runtime.reference import read_expert

PROMPT = list(range(3, 20))


def say_nothing(_: str, __: float) -> None:
    pass


def pack(source: Path, folder: Path, **options: Any) -> Checkpoint:
    packing.pack(open_checkpoint(source), folder, told=say_nothing, **options)
    return open_checkpoint(folder)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad(), daop.load(folder, ecr=0.5, dtype="float32") as runtime:
        out: torch.Tensor = runtime.model(torch.tensor([PROMPT])).logits
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_tiny("qwen3_moe", tmp_path_factory.mktemp("plain") / "m", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "int8"
    pack(source, folder, dtype="int8")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "packed"))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "dbrx", "nemotron_h", "llama4_text", "fp8", "mxfp4"]
)
def test_keeping_changes_nothing_but_the_place(family: str, tmp_path: Path) -> None:
    if family == "fp8":
        sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
        model = save_fp8("qwen3_moe", tmp_path / "m", **sizes)
    elif family == "mxfp4":
        model = save_mxfp4(tmp_path / "m", hidden_size=64, intermediate_size=96)
    else:
        model = tiny_models.save_tiny(family, tmp_path / "m", dtype=torch.bfloat16)
    before, after = open_checkpoint(model), pack(model, tmp_path / "p")
    assert after.fingerprint == before.fingerprint
    for flat in range(after.geometry.total):
        layer, _ = after.geometry.pair(flat)
        old = before.layouts[layer].views(read_expert(before, flat))
        new = after.layouts[layer].views(read_expert(after, flat))
        for role, part in old.items():
            assert torch.equal(part.view(torch.uint8), new[role].view(torch.uint8))
    assert torch.equal(logits(model), logits(tmp_path / "p"))


def test_one_aligned_range_of_a_valid_file(whole: Path) -> None:
    checkpoint = open_checkpoint(whole)
    for flat, size in enumerate(checkpoint.geometry.bytes_of.tolist()):
        (place,) = checkpoint.ranges(flat)
        assert place.offset % 4096 == 0
        assert place.nbytes == size == checkpoint.layouts[0].nbytes
        assert size % 4096 == 0
    path = checkpoint.files[checkpoint.ranges(0)[0].file]
    with safe_open(path, "pt") as file:
        name = f"{checkpoint.skeleton.experts[0].path}.1"
        assert torch.equal(file.get_tensor(name), read_expert(checkpoint, 1))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "dbrx", "nemotron_h"])
def test_integers_are_the_codec_of_the_source(family: str, dtype: str, tmp_path: Path) -> None:
    model = tiny_models.save_tiny(family, tmp_path / "m", dtype=torch.bfloat16)
    before, after = open_checkpoint(model), pack(model, tmp_path / "p", dtype=dtype, group=32)
    codec = after.layouts[0].codec
    assert codec == Integers(int(dtype[3:]), 32)
    assert isinstance(codec, Integers)
    assert after.fingerprint == f"{before.fingerprint}+{dtype}-g32"
    old, new = (c.layouts[0].views(read_expert(c, 1)) for c in (before, after))
    flip = family in ("gpt_oss", "dbrx")
    weight = old["down"].T if flip else old["down"]
    for suffix, piece in codec.encode(weight).items():
        assert torch.equal(new["down" + suffix], piece)
    a, b = logits(model), logits(tmp_path / "p")
    change = float((a - b).norm() / a.norm())
    assert 0 < change < (0.05 if dtype == "int8" else 0.4)


def test_bytes_as_stored_are_what_is_budgeted(source: Path, whole: Path) -> None:
    checkpoint = open_checkpoint(whole)
    with daop.load(whole, ecr=0.5) as runtime:
        runtime.generate([PROMPT], 2)
        figures = runtime.statistics()
        slots = figures["slots"]
        assert figures["memory_bytes"]["experts"] == slots * checkpoint.layouts[0].nbytes


def test_direct_reads_go_straight_into_the_slot(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(whole)
    try:
        reader = FileReader(checkpoint.files, direct_io=True, largest=1 << 20)
    except DaopError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(reader, "_bounce_bytes", 0)  # a buffer of no bytes: a read through it would fail
    import mmap

    import numpy as np

    (place,) = checkpoint.ranges(3)
    out = np.frombuffer(mmap.mmap(-1, place.nbytes), dtype=np.uint8)
    reader.read(place.file, place.offset, out)
    assert torch.equal(torch.from_numpy(out.copy()), read_expert(checkpoint, 3))
    reader.close()


# What can be broken


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / packed.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_file_that_is_missing_or_short(folder: Path) -> None:
    file = folder / "experts-00001.safetensors"
    os.truncate(file, file.stat().st_size - 4096)
    with pytest.raises(DaopError, match=r"experts-00001\.safetensors is missing, or not of the"):
        open_checkpoint(folder)
    file.unlink()
    with pytest.raises(DaopError, match=r"experts-00001\.safetensors is missing"):
        open_checkpoint(folder)


def test_altered_bytes_are_found_by_a_run_and_by_verify(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    place = checkpoint.ranges(0)[0]
    path = checkpoint.files[place.file]
    assert [share for _, share in packed.verify(folder, packed.parse_manifest(folder / packed.MANIFEST))][
        -1
    ] == 1
    with path.open("r+b") as file:
        file.seek(place.offset + 100)
        byte = file.read(1)
        file.seek(place.offset + 100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DaopError, match=r"expert 0 of .* is not what was packed: its checksum differs"):
        list(packed.verify(folder, packed.parse_manifest(folder / packed.MANIFEST)))
    with pytest.raises(DaopError, match="checksum differs"), daop.load(folder, ecr=0.0) as runtime:
        runtime.generate([list(range(3, 60))], 2)


def test_an_altered_rest_is_found_by_verify(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(DaopError, match=r"model\.safetensors is not what was packed"):
        list(packed.verify(folder, packed.parse_manifest(folder / packed.MANIFEST)))


def test_manifests_that_are_not_believed(folder: Path) -> None:
    good = json.loads((folder / packed.MANIFEST).read_text())
    layers = good["layers"]
    first = layers[0]
    moved = {**first, "parts": [{**part, "offset": part["offset"] + 64} for part in first["parts"]]}
    moved["parts"][-1]["offset"] = first["slot"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, "format version 2, this daop reads version 1"),
        ({"layers": layers[:-1]}, "MoE layers"),
        ({"layers": [moved, *layers[1:]]}, "does not describe experts"),
        ({"layers": [{**first, "file": "../x.safetensors"}, *layers[1:]]}, "damaged"),
        ({"layers": [{**first, "codec": {"name": "int8", "group": 32}}, *layers[1:]]}, "does not describe"),
        ({"layers": [{**first, "codec": {"name": "zip"}}, *layers[1:]]}, "damaged"),
        ({"layers": [{**first, "crc32": []}, *layers[1:]]}, "does not describe"),
        ({"layers": 3}, "damaged"),
    ]
    for change, message in cases:
        rewrite(folder, **{**good, **change})
        with pytest.raises(DaopError, match=message):
            open_checkpoint(folder)
    (folder / packed.MANIFEST).unlink()
    with pytest.raises(DaopError, match="its manifest is missing"):
        open_checkpoint(folder)


# Packing that is interrupted


def test_a_full_disk_and_going_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = tmp_path / "p", pack_files.write
    left = [30_000]

    def full(descriptor: int, data: Any) -> None:
        left[0] -= len(memoryview(data))
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(descriptor, data)

    before = {path.name: path.read_bytes() for path in source.iterdir()}
    monkeypatch.setattr(packing, "write", full)
    monkeypatch.setattr(pack_files, "write", full)
    for _ in range(2):
        with pytest.raises(DaopError, match=r"disk of .* is full: .* give the same command again"):
            pack(source, folder, dtype="int8")
        left[0] = 70_000
    monkeypatch.setattr(packing, "write", written)
    monkeypatch.setattr(pack_files, "write", written)
    with pytest.raises(DaopError, match="packing was interrupted"):
        open_checkpoint(folder)
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("experts-*.safetensors")}
    assert done, "a layer was finished"
    with pytest.raises(DaopError, match="holds an unfinished packing"):
        pack(source, folder, dtype="int4")
    resumed = pack(source, folder, dtype="int8")
    for name, time in done.items():
        assert (folder / name).stat().st_mtime_ns == time, "what was finished is not written again"
    assert not list(folder.glob("*.part"))
    assert torch.equal(logits(folder), logits(folder))
    assert resumed.geometry.total == open_checkpoint(source).geometry.total
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}


def test_what_is_not_packed(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DaopError, match=r"packed already, from 'm' in int8-g64"):
        pack(source, whole, dtype="int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(DaopError, match="is not empty"):
        pack(source, tmp_path / "full")
    with pytest.raises(DaopError, match="packed in integers already"):
        pack(whole, tmp_path / "again", dtype="int4")
    with pytest.raises(DaopError, match="groups one of"):
        pack(source, tmp_path / "odd", dtype="int8", group=48)
    with pytest.raises(DaopError, match="--dtype fp8 is not known"):
        pack(source, tmp_path / "odd", dtype="fp8")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DaopError, match="packing needs"):
        pack(source, tmp_path / "small")


def test_weights_that_are_not_finite(source: Path, tmp_path: Path) -> None:
    def spoil(model: Any) -> None:
        model.model.layers[1].mlp.experts.down_proj.data[2, 9, 9] = torch.nan

    model = tiny_models.save_tiny("qwen3_moe", tmp_path / "m", dtype=torch.bfloat16, adjust=spoil)
    with pytest.raises(DaopError, match=r"down weights of expert 2 of .*layers\.1.* are not all finite"):
        pack(model, tmp_path / "p", dtype="int8")


def test_a_kept_pack_can_be_packed_again(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "keep")
    made = pack(tmp_path / "keep", tmp_path / "int8", dtype="int8")
    assert made.fingerprint == pack(source, tmp_path / "straight", dtype="int8").fingerprint
    assert torch.equal(logits(tmp_path / "int8"), logits(tmp_path / "straight"))
