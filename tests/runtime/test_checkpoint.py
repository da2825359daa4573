"""Reading checkpoints: however the files are arranged, an expert's bytes are the same; whatever is wrong
with them, ``DaopError`` names the file or tensor, and nothing else comes out."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import family_parity
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from daop.core import DaopError
from daop.runtime.checkpoint import Checkpoint, open_checkpoint
from daop.runtime.layout import ExpertLayout
from daop.runtime.model import build_model
from daop.runtime.reference import read_expert, reference_experts
from daop.runtime.safetensors_index import INDEX, read_header, read_index

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"

Tensors = dict[str, torch.Tensor]


def write(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], **changes: Any) -> None:
    """A safetensors file with the tensors in this order; ``changes`` replaces header entries by name."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    header.update(changes)
    raw = json.dumps(header).encode()
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in tensors)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_tiny("qwen3_moe", tmp_path_factory.mktemp("original"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tensors(original: Path) -> Tensors:
    stored: Tensors = load_file(original / "model.safetensors")
    return stored


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def experts_of(checkpoint: Checkpoint) -> list[Tensors]:
    return [
        checkpoint.layouts[layer].views(read_expert(checkpoint, flat))
        for flat, layer in enumerate(checkpoint.geometry.layer_of.tolist())
    ]


# Arrangements


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


# Faults in the files


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


# Faults in what the files say


def test_a_missing_expert_is_named(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", [item for item in tensors.items() if item[0] != GATE])
    with pytest.raises(
        DaopError, match=r"lacks the gate weights of 1 of 6 experts of 'model.layers.1.mlp.experts'"
    ):
        open_checkpoint(folder)


def test_a_missing_role_is_named(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", [item for item in tensors.items() if "up_proj" not in item[0]])
    with pytest.raises(DaopError, match=r"lacks the up weights of 6 of 6 experts"):
        open_checkpoint(folder)


def test_an_expert_too_many(folder: Path, tensors: Tensors) -> None:
    more = dict(tensors) | {GATE.replace("experts.2", "experts.6"): tensors[GATE]}
    write(folder / "model.safetensors", list(more.items()))
    with pytest.raises(
        DaopError, match=r"experts\.6\..*is for expert 6, but config.json says that there are 6"
    ):
        open_checkpoint(folder)


def test_experts_that_are_there_twice(folder: Path, tensors: Tensors) -> None:
    fused = torch.zeros(6, 40, 48, dtype=torch.bfloat16)
    more = dict(tensors) | {"model.layers.1.mlp.experts.gate_up_proj": fused}
    write(folder / "model.safetensors", list(more.items()))
    with pytest.raises(DaopError, match=r"experts of 'model.layers.1.mlp.experts' twice"):
        open_checkpoint(folder)


def test_a_wrong_shape_is_named(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", list((dict(tensors) | {GATE: tensors[GATE].T.contiguous()}).items()))
    with pytest.raises(DaopError, match=rf"{GATE}.*\[48, 20\], but the model wants \[20, 48\]"):
        open_checkpoint(folder)


@pytest.mark.parametrize("family", ["gpt_oss", "dbrx"])
def test_a_wrong_shape_of_fused_experts_is_named(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save_tiny(family, tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if "experts" in name)
    save_file(stored | {name: stored[name][:-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(DaopError, match=f"{name}.*has shape"):
        open_checkpoint(folder)


def test_mixed_and_unknown_dtypes_are_named(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", list((dict(tensors) | {GATE: tensors[GATE].float()}).items()))
    with pytest.raises(DaopError, match="must have the same"):
        open_checkpoint(folder)
    save_file(dict(tensors) | {GATE: tensors[GATE].double()}, folder / "model.safetensors")
    with pytest.raises(DaopError, match=f"{GATE}.*F64"):
        open_checkpoint(folder)


def test_a_missing_tensor_outside_the_experts_is_named(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", [item for item in tensors.items() if item[0] != ROUTER])
    with pytest.raises(DaopError, match=f"lacks 1 tensors of the model \\('{ROUTER}'"):
        build_model(open_checkpoint(folder), lambda *_: torch.zeros(()))


def test_a_wrong_shape_outside_the_experts_is_named(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", list((dict(tensors) | {ROUTER: tensors[ROUTER][1:]}).items()))
    with pytest.raises(DaopError, match=rf"{ROUTER}.*\[5, 48\], but the model wants \[6, 48\]"):
        build_model(open_checkpoint(folder), lambda *_: torch.zeros(()))


def test_a_placeholder_outside_the_experts_is_found(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", list((dict(tensors) | {ROUTER: tensors[ROUTER] * torch.nan}).items()))
    with pytest.raises(DaopError, match=f"{ROUTER}.*holds NaN"):
        build_model(open_checkpoint(folder), lambda *_: torch.zeros(()))


def test_a_placeholder_expert_is_found_when_it_is_read(folder: Path, tensors: Tensors) -> None:
    write(folder / "model.safetensors", list((dict(tensors) | {GATE: tensors[GATE] * torch.nan}).items()))
    built = family_parity.load(folder)
    run = reference_experts(built.checkpoint, built.forms)
    hidden, weights = torch.ones(1, 48, dtype=torch.bfloat16), torch.ones(1, 1)
    run(1, hidden, torch.tensor([[1]]), weights)
    with pytest.raises(
        DaopError, match=r"gate tensor of expert 2 of model.layers.1.mlp.experts.*model.safetensors"
    ):
        run(1, hidden, torch.tensor([[2]]), weights)


@pytest.mark.parametrize("at", [0, 63, -1, -64])
def test_what_the_sample_sees(at: int) -> None:
    layout = ExpertLayout.pack([("gate", (30, 30), "F32"), ("down", (30, 30), "BF16")])
    slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.check_finite(slot, "expert 0")
    layout.views(slot)["down"].view(-1)[450] = (
        torch.nan
    )  # the middle is not looked at, and that is documented
    layout.check_finite(slot, "expert 0")
    layout.views(slot)["down"].view(-1)[at] = torch.nan
    with pytest.raises(DaopError, match="down tensor of expert 0"):
        layout.check_finite(slot, "expert 0")


# Faults around the files


def test_a_config_that_is_missing_broken_or_quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(DaopError, match=r"config.json.*quantised \(awq\)"):
        open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "made_up"}))
    with pytest.raises(DaopError, match=r"cannot read .*config.json.*made_up"):
        open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(DaopError, match=r"cannot read .*config.json"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DaopError, match=r"config.json is not valid JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DaopError, match=r"holds no config.json: give a model's folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 100_000}, "100000 layers, but the files hold"),
        ({"hidden_act": "magic"}, "cannot build the 'qwen3_moe' model.*KeyError: 'magic'"),
        ({"rope_parameters": {"rope_type": "magic"}}, "cannot build the 'qwen3_moe' model"),
        ({"dtype": "magic"}, "cannot read .*magic"),
        ({"num_experts_per_tok": 1000}, "top_k is 1000"),
    ],
)
def test_a_config_of_no_model(folder: Path, changes: dict[str, object], says: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(DaopError, match=says):
        open_checkpoint(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DaopError, match="holds no safetensors files"):
        open_checkpoint(folder)


def test_paths_that_are_not_a_model(folder: Path) -> None:
    with pytest.raises(DaopError, match="is a file: give the folder"):
        open_checkpoint(folder / "config.json")
    with pytest.raises(DaopError, match="neither a folder nor a hub id"):
        open_checkpoint("./nowhere")


def test_the_hub_is_asked_for_what_the_index_names(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def fetch(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(original)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_checkpoint("owner/name").path == original
    assert asked[1:] == [["*.safetensors"]]


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DaopError, match=r"no folder 'owner/name'.*no connection.*download the model"):
        open_checkpoint("owner/name")


def test_a_file_that_shrinks_after_opening(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-30000])
    with pytest.raises(DaopError, match="ends early"):
        build_model(checkpoint, lambda *_: torch.zeros(()))


def test_the_index_lists_every_tensor_once(original: Path, tensors: Tensors) -> None:
    index = read_index(original)
    assert index.tensors.keys() == tensors.keys()
    assert all(info.shape == tuple(tensors[name].shape) for name, info in index.tensors.items())
