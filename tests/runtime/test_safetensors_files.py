"""Shards, indices and headers that are cut off, lie, or are of another kind: ``DaopError`` names the file,
and nothing else comes out."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from written_checkpoints import GATE, Tensors, write, write_index

from daop.core import DaopError
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.safetensors_index import INDEX, read_header


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_models.save_tiny("qwen3_moe", tmp_path, shard="40KB")
    shard = sorted(folder.glob("*-of-*"))[2]
    shard.unlink()
    with pytest.raises(DaopError, match=f"{shard.name}.*not in the folder: fetch it"):
        open_checkpoint(folder)
    (folder / INDEX).unlink()
    with pytest.raises(DaopError, match="number 3 is missing: fetch it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "weights.bin", 3]
)
def test_an_index_leads_nowhere_else(folder: Path, tensors: Tensors, name: object) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    write_index(folder, dict.fromkeys(tensors, "other.safetensors") | {GATE: name})
    with pytest.raises(DaopError, match="only a safetensors file of the same folder"):
        open_checkpoint(folder)


def test_an_index_that_names_the_wrong_file(folder: Path, tensors: Tensors) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write(folder / "b.safetensors", [("spare", torch.ones(2))])
    write_index(folder, dict.fromkeys(tensors, "a.safetensors") | {GATE: "b.safetensors"})
    with pytest.raises(DaopError, match=f"{GATE}.*b.safetensors.*does not hold it"):
        open_checkpoint(folder)


def test_two_files_with_the_same_tensor(folder: Path, tensors: Tensors) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write(folder / "b.safetensors", [(GATE, tensors[GATE])])
    with pytest.raises(DaopError, match=f"{GATE}.*a.safetensors.*b.safetensors.*remove the file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 500, -1, -4000])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DaopError, match=r"model\.safetensors.*fetch the file again"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(200), "pickle"),
        (b"<!DOCTYPE html><html>Not found</html>", "not a safetensors file"),
        (struct.pack("<Q", 10) + b"not json!!", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 40) + b'{"a":{},"a":{}}'.ljust(40), "given twice"),
    ],
)
def test_a_file_of_another_kind(folder: Path, content: bytes, hint: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DaopError, match=f"model.safetensors.*{hint}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}, "gap"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "wrongly"),
        ({"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}, "truncated"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}, "needs 12"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "after its last tensor"),
        ({"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}, "F31"),
        ({"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}, "wrongly"),
        ({"dtype": "F32", "shape": [9] * 10**6, "data_offsets": [0, 16]}, "wrongly"),
        ({"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}, "wrongly"),
        ({"dtype": "F32", "shape": [4]}, "wrongly"),
        ([], "wrongly"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: object, says: str) -> None:
    write(tmp_path / "x.safetensors", [("a", torch.zeros(4))], a=entry)
    with pytest.raises(DaopError, match=rf"(?s)x.safetensors.*{says}|{says}.*x.safetensors"):
        read_header(tmp_path / "x.safetensors", 0)


def test_tensors_that_overlap(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    write(tmp_path / "x.safetensors", [("a", torch.zeros(4)), ("b", torch.zeros(4))], b=entry)
    with pytest.raises(DaopError, match=r"'b'.*overlaps"):
        read_header(tmp_path / "x.safetensors", 0)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_bytes_make_anything_but_our_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A valid file with some header bytes replaced reads as it is or raises ``DaopError``."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    write(path, [("a", torch.zeros(4)), ("b", torch.zeros(2, 3, dtype=torch.bfloat16))])
    raw = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.sampled_from(b'0123456789,:[]{}"-.eE \\\xff') | st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(DaopError):
        infos = read_header(path, 0)
        assert sum(info.nbytes for info in infos.values()) <= len(raw)
        assert all(0 < info.offset <= info.offset + info.nbytes <= len(raw) for info in infos.values())
