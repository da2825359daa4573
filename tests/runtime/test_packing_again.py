"""Packing that is interrupted, gone on with, or asked for again; and folders that hold something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from quantised_models import save_fp8, save_mxfp4
from safetensors.torch import load_file, save_file

import daop
from daop.core import DaopError
from daop.runtime import pack_files, packed, packing
from daop.runtime.checkpoint import Checkpoint, open_checkpoint

PROMPT = list(range(3, 20))


def pack(
    source: Path, folder: Path, told: Callable[[str, float], None] | None = None, **options: Any
) -> Checkpoint:
    packing.pack(open_checkpoint(source), folder, told=told or (lambda *_: None), **options)
    return open_checkpoint(folder)


def stop_at(layer: int) -> Callable[[str, float], None]:
    def told(step: str, _: float) -> None:
        if step.startswith(f"layer {layer} "):
            raise KeyboardInterrupt

    return told


def save(folder: Path, **options: Any) -> Path:
    return tiny_models.save_tiny("qwen3_moe", folder, dtype=torch.bfloat16, **options)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad(), daop.load(folder, ecr=0.5, dtype="float32") as runtime:
        out: torch.Tensor = runtime.model(torch.tensor([PROMPT])).logits
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain") / "m")


@pytest.fixture
def begun(source: Path, tmp_path: Path) -> Path:
    """A folder in which one layer is done and the next was being written."""
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "p", stop_at(2), dtype="int8")
    assert [path.name for path in sorted((tmp_path / "p").iterdir())] == [
        "daop-pack.unfinished.json",
        "experts-00000.safetensors",
        "experts-00001.part",
    ]
    return tmp_path / "p"


def test_an_interrupted_packing_is_gone_on_with(source: Path, begun: Path, tmp_path: Path) -> None:
    with pytest.raises(DaopError, match="packing was interrupted; give the same"):
        open_checkpoint(begun)
    time = (begun / "experts-00000.safetensors").stat().st_mtime_ns
    steps: list[str] = []
    pack(source, begun, lambda step, _: steps.append(step), dtype="int8")
    assert (begun / "experts-00000.safetensors").stat().st_mtime_ns == time
    assert not any(step.startswith("layer 1 ") for step in steps)
    straight = tmp_path / "straight"
    pack(source, straight, dtype="int8")
    assert sorted(path.name for path in begun.iterdir()) == sorted(path.name for path in straight.iterdir())
    for path in straight.iterdir():
        assert path.read_bytes() == (begun / path.name).read_bytes(), path.name


def test_a_source_that_changed_meanwhile_is_noticed(source: Path, begun: Path, tmp_path: Path) -> None:
    """Configuration, names and shapes are the same; only numbers of experts differ."""
    changed = Path(shutil.copytree(source, tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    (name,) = [n for n in tensors if "layers.0." in n and "experts.0.down" in n]
    tensors[name] += 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(changed).fingerprint == open_checkpoint(source).fingerprint
    with pytest.raises(
        DaopError, match=r"is not what .*changed holds now: it is another model, or was changed"
    ):
        pack(changed, begun, dtype="int8")
    with pytest.raises(DaopError, match="is not what"):
        pack(save(tmp_path / "other", seed=5), begun, dtype="int8")
    pack(source, begun, dtype="int8")
    with pytest.raises(DaopError, match="packed already"):
        pack(changed, begun, dtype="int8")


def test_another_format_is_not_mixed_in(source: Path, begun: Path) -> None:
    for options in ({"dtype": "int4"}, {"dtype": "int8", "group": 32}, {}):
        with pytest.raises(DaopError, match="an unfinished packing in int8-g64, but"):
            pack(source, begun, **options)


def test_a_folder_in_which_nothing_is_done_yet_takes_another_format(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is too small for one format may hold another."""
    folder = tmp_path / "p"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DaopError, match="packing needs"):
        pack(source, folder)
    monkeypatch.undo()
    assert pack(source, folder, dtype="int4").layouts[0].codec.name == "int4"


def test_two_at_once(source: Path, begun: Path) -> None:
    with (
        pack_files.locked(begun),
        pytest.raises(DaopError, match="another daop pack is writing to"),
    ):
        pack(source, begun, dtype="int8")
    pack(source, begun, dtype="int8")


def test_a_file_that_was_lost_is_made_again(source: Path, begun: Path) -> None:
    (begun / "experts-00000.safetensors").unlink()
    made = pack(source, begun, dtype="int8")
    assert made.pack is not None
    assert [share for _, share in packed.verify(begun, made.pack)][-1] == 1


def test_asked_for_again_nothing_is_written(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    pack(source, folder, dtype="int8")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    steps: list[str] = []
    pack(source, folder, lambda step, _: steps.append(step), dtype="int8")
    assert steps == []
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_places_that_are_no_folder_to_write(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaopError, match="is a file: name a new folder"):
        pack(source, tmp_path / "file")
    with pytest.raises(DaopError, match=r"cannot make .*file/p: Not a directory"):
        pack(source, tmp_path / "file" / "p")
    with pytest.raises(DaopError, match="is not empty, and not an unfinished packing"):
        pack(source, source)
    with pytest.raises(DaopError, match="--group is for int8 and int4"):
        pack(source, tmp_path / "p", group=64)
    assert not (tmp_path / "p").exists()


def test_a_disk_that_reads_back_otherwise(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "file_checksum", lambda _: 1)
    with pytest.raises(DaopError, match=r"model\.safetensors reads back otherwise than it was written"):
        pack(source, tmp_path / "p")
    monkeypatch.undo()
    assert torch.equal(logits(source), logits(pack(source, tmp_path / "p").path))


def test_what_belongs_to_the_model_comes_along(source: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(source, tmp_path / "m"))
    (model / "additional_chat_templates").mkdir()
    wanted = ("LICENSE", "vocab.txt", "x.tiktoken", "additional_chat_templates/tool.jinja", "tokenizer.model")
    for name in (*wanted, "notes.md", "other.safetensors.index.json", "weights.bin"):
        (model / name).write_text(name)
    pack(model, tmp_path / "p")
    assert all((tmp_path / "p" / name).read_text() == name for name in wanted)
    for name in ("notes.md", "other.safetensors.index.json", "weights.bin"):
        assert not (tmp_path / "p" / name).exists()


def test_shards_with_odd_names(tmp_path: Path) -> None:
    model = save(tmp_path / "m", shard=20_000)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    new = {name: f"täil {number} of it.safetensors" for number, name in enumerate(files)}
    for old, name in new.items():
        (model / old).rename(model / name)
    index["weight_map"] = {tensor: new[file] for tensor, file in index["weight_map"].items()}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(model), logits(pack(model, tmp_path / "p").path))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("stored", ["fp8", "mxfp4"])
def test_quantised_sources_become_integers(stored: str, dtype: str, tmp_path: Path) -> None:
    if stored == "fp8":
        sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
        model = save_fp8("qwen3_moe", tmp_path / "m", **sizes)
    else:
        model = save_mxfp4(tmp_path / "m", hidden_size=64, intermediate_size=96)
    made = pack(model, tmp_path / "p", dtype=dtype)
    assert made.layouts[0].codec.name == dtype
    a, b = logits(model), logits(tmp_path / "p")
    assert 0 < float((a - b).norm() / a.norm()) < (0.05 if dtype == "int8" else 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_every_family(family: str, tmp_path: Path) -> None:
    """Nearly the same logits; a router that wavers may choose another expert for one token."""
    model = tiny_models.save_tiny(family, tmp_path / "m", dtype=torch.bfloat16)
    a, b = logits(model), logits(pack(model, tmp_path / "p", dtype="int8").path)
    assert 0 < float((a - b).norm() / a.norm()) < 0.25
