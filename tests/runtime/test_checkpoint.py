"""Reading checkpoints: however the files are arranged, an expert's bytes are the same."""

from __future__ import annotations

import json
import re
import resource
import shutil
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import family_parity
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from written_checkpoints import GATE, ROUTER, Tensors, write, write_index

from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.layout import ExpertLayout
from daop.runtime.model import build_model
from daop.runtime.reference import read_expert
from daop.runtime.safetensors_index import read_index


def experts_of(checkpoint: Checkpoint) -> list[Tensors]:
    return [
        checkpoint.layouts[layer].views(read_expert(checkpoint, flat))
        for flat, layer in enumerate(checkpoint.geometry.layer_of.tolist())
    ]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_arrangement_gives_the_same_experts(
    original: Path, tensors: Tensors, data: st.DataObject
) -> None:
    wanted = open_checkpoint(original)
    names = data.draw(st.permutations(sorted(tensors)))
    shards = data.draw(st.integers(1, 4))
    with_index = data.draw(st.booleans())
    shard_of = {name: data.draw(st.integers(0, shards - 1)) for name in names}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(original / "config.json", folder)
        files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
        for number, file in enumerate(files):
            write(folder / file, [(name, tensors[name]) for name in names if shard_of[name] == number])
        if with_index:
            write_index(folder, {name: files[shard] for name, shard in shard_of.items()})
        checkpoint = open_checkpoint(folder)
        got = experts_of(checkpoint)
    assert checkpoint.fingerprint == wanted.fingerprint
    assert checkpoint.non_expert_bytes == wanted.non_expert_bytes
    assert checkpoint.geometry == wanted.geometry
    assert len(set(checkpoint.layouts)) == 1, "layers of one shape share a layout"
    for flat, (mine, theirs) in enumerate(zip(got, experts_of(wanted), strict=True)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[role], theirs[role]) for role in mine)
        ranges = checkpoint.ranges(flat)
        assert sum(part.nbytes for part in ranges) == wanted.geometry.expert_bytes[0]
        for a, b in pairwise(ranges):
            joined = (a.file, a.offset + a.nbytes, a.slot_offset + a.nbytes)
            assert joined != (b.file, b.offset, b.slot_offset), "neighbours are one range"


def test_neighbours_are_one_read(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    assert {len(checkpoint.ranges(flat)) for flat in range(checkpoint.geometry.total)} == {1}


def test_neighbours_in_the_file_that_are_none_in_the_slot(tmp_path: Path) -> None:
    """Parts of 480 bytes start at multiples of 64 in the slot, so there are gaps that the file has not."""
    checkpoint = open_checkpoint(
        tiny_models.save_tiny("qwen3_moe", tmp_path, dtype=torch.bfloat16, moe_intermediate_size=5)
    )
    stored = load_file(tmp_path / "model.safetensors")
    assert {len(checkpoint.ranges(flat)) for flat in range(checkpoint.geometry.total)} == {3}
    for role, view in experts_of(checkpoint)[checkpoint.geometry.flat(1, 2)].items():
        assert torch.equal(view, stored[GATE.replace("gate", role)])


def test_neighbours_by_offset_in_two_files_are_two_reads(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    (first, second, third), *others = checkpoint._places[0]
    moved = (((first, (1, second[1]), third), *others), *checkpoint._places[1:])
    assert [part.file for part in replace(checkpoint, _places=moved).ranges(0)] == [0, 1, 0]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "dbrx"])
@torch.no_grad()
def test_save_pretrained_shards(family: str, tmp_path: Path) -> None:
    tiny_models.save_tiny(family, tmp_path / "one")
    tiny_models.save_tiny(family, tmp_path / "many", shard="40KB")
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert len(many.files) > 3
    for a, b in zip(experts_of(one), experts_of(many), strict=True):
        assert all(torch.equal(a[role], b[role]) for role in a)
    inputs = family_parity.prompts(1)
    built = family_parity.load(tmp_path / "many")
    assert torch.equal(
        built.model(**inputs).logits, family_parity.load(tmp_path / "one").model(**inputs).logits
    )


def test_building_reads_and_holds_nothing_of_the_experts(
    original: Path, tensors: Tensors, tmp_path: Path
) -> None:
    """Experts of 324 MiB, as holes in a sparse file, behind the small rest of a model."""
    wide = 65536
    config = json.loads((original / "config.json").read_text()) | {"moe_intermediate_size": wide}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    small = sum(tensor.numel() * tensor.itemsize for tensor in rest.values())
    entries, at = {}, small
    for name in tensors:
        if ".experts." in name:
            shape = [48, wide] if "down" in name else [wide, 48]
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 96 * wide]}
            at += 96 * wide
    assert at > 300 * 2**20
    write(tmp_path / "model.safetensors", list(rest.items()), **entries)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + at - small)
    peak, read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, _bytes_read()
    built = build_model(open_checkpoint(tmp_path), lambda *_: torch.zeros(()))
    assert built.checkpoint.geometry.expert_bytes[0] == 3 * 96 * wide
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 * 2**10  # KiB
    assert _bytes_read() - read < 8 * 2**20


def _bytes_read() -> int:
    """What this process asked of read calls so far."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def test_the_fingerprint_tells_models_apart(original: Path, folder: Path, tensors: Tensors) -> None:
    changed = dict(tensors) | {ROUTER: tensors[ROUTER] + 1}
    write(folder / "model.safetensors", list(changed.items()))
    assert open_checkpoint(folder).fingerprint != open_checkpoint(original).fingerprint


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gate", "up", "down"]),
            st.tuples(st.integers(1, 9), st.integers(1, 9)),
            st.sampled_from(["BF16", "F16", "F32"]),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda part: part[0],
    )
)
def test_a_layout_keeps_its_parts_apart(parts: list[tuple[str, tuple[int, int], str]]) -> None:
    layout = ExpertLayout.pack(parts)
    slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, view in enumerate(layout.views(slot).values()):
        view.fill_(number + 1)
    for number, (role, shape, _) in enumerate(parts):
        assert torch.equal(layout.views(slot)[role].float(), torch.full(shape, number + 1.0))
        assert layout.part(role) is layout.parts[number]
    assert layout.nbytes % 64 == 0
    assert all(part.offset % 64 == 0 for part in layout.parts)


def test_the_index_lists_every_tensor_once(original: Path, tensors: Tensors) -> None:
    index = read_index(original)
    assert index.tensors.keys() == tensors.keys()
    assert all(info.shape == tuple(tensors[name].shape) for name, info in index.tensors.items())
