"""What is wrong with a checkpoint is said as a ``DaopError`` that names the tensor, file or folder."""

from __future__ import annotations

import json
from pathlib import Path

import family_parity
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from written_checkpoints import GATE, ROUTER, Tensors, write

from daop.core import DaopError
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.layout import ExpertLayout
from daop.runtime.model import build_model
from daop.runtime.reference import reference_experts


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
