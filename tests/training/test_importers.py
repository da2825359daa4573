"""Importers, each on a small source of the same structure as the real one, and on damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daop.core import DaopError
from daop.training.importers.base import IMPORTERS, ImportOptions
from daop.training.parquet import read_any
from daop.training.trace import ABSENT, DECODE, CountsTrace, Trace
from daop.training.writer import write_trace

EDGE = Path(__file__).parent / "data" / "big_moe_on_edge.csv"


def run(name: str, path: Path, **options: Any) -> Trace | CountsTrace:
    return IMPORTERS.get(name)(path, ImportOptions(**options)).validate(str(path))


def tokens_of(name: str, path: Path, **options: Any) -> Trace:
    trace = run(name, path, **options)
    assert isinstance(trace, Trace)
    return trace


def fingerprint_npz(path: Path, **change: Any) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "ids": np.argsort(rng.random((7, 24, 32)), axis=2)[:, :, :4].astype(np.uint8),
        "offsets": np.array([0, 3, 7], dtype=np.int32),
        "pos0": np.array([10, 20], dtype=np.int32),
    }
    arrays.update(change)
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_gpt_oss_npz(tmp_path: Path) -> None:
    path = fingerprint_npz(tmp_path / "t.npz", probs=np.full((7, 24, 4), 0.25, np.float16))
    trace = tokens_of("gpt-oss-npz", path)
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert trace.position.tolist() == [10, 11, 12, 20, 21, 22, 23]
    assert (trace.phase == DECODE).all()
    assert trace.geometry.experts == (32,) * 24
    assert trace.geometry.expert_bytes[0] == 13_236_480
    assert trace.weights is not None
    assert trace.token_ids is None


def test_gpt_oss_token_strings_become_ids(tmp_path: Path) -> None:
    path = fingerprint_npz(tmp_path / "t.npz")
    rows = [["a", "b", "a"], ["b", "c", "c", "a"]]
    (tmp_path / "t.samples.jsonl").write_text("\n".join(json.dumps({"tokens": r}) for r in rows))
    ids = tokens_of("gpt-oss-npz", path, token_ids=True).token_ids
    assert ids is not None
    assert ids[0] == ids[2] == ids[6] != ids[1]
    (tmp_path / "t.samples.jsonl").write_text(json.dumps({"tokens": ["a"]}))
    with pytest.raises(DaopError, match="other lengths"):
        run("gpt-oss-npz", path, token_ids=True)


def test_nobody_is_told_to_unpickle(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_text("no archive")
    with pytest.raises(DaopError) as raised:
        run("gpt-oss-npz", path)
    assert "pickle" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": np.zeros((7, 24), np.uint8)},
        {"ids": np.zeros((7, 5, 4), np.uint8)},
        {"ids": np.full((7, 24, 4), 40, np.uint8)},
        {"ids": np.zeros((7, 24, 4), np.uint8)},
        {"offsets": np.array([0, 3, 8])},
        {"offsets": np.array([0, 7, 7])},
        {"pos0": np.array([1])},
        {"pos0": None},
        {"ids": np.array([{"a": 1}], dtype=object)},
    ],
)
def test_damaged_npz(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DaopError, match=r"t\.npz"):
        run("gpt-oss-npz", fingerprint_npz(tmp_path / "t.npz", **change))


def test_not_npz(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DaopError, match="not a readable npz"):
        run("gpt-oss-npz", tmp_path / "t.npz")


def test_big_moe_on_edge() -> None:
    trace = tokens_of("big-moe-on-edge", EDGE)
    assert trace.geometry.experts == (128,) * 3
    assert trace.geometry.top_k == 2
    assert trace.geometry.expert_bytes == (13219200,) * 3
    assert trace.phase.tolist() == [0, 0, 0, 1, 1]
    assert trace.forward is not None
    assert trace.forward.tolist() == [0, 0, 0, 1, 2]
    assert trace.ids[0, 0].tolist() == [83, 30]
    assert trace.hits is not None
    assert not trace.hits[:3].any()


def test_big_moe_on_edge_keeps_absent_choices_absent(tmp_path: Path) -> None:
    lines = EDGE.read_text().splitlines()
    kept = [line for line in lines if not (line.startswith("0,0,0,2,") or line.startswith("0,0,1,2,"))]
    (tmp_path / "t.csv").write_text("\n".join(kept))
    trace = tokens_of("big-moe-on-edge", tmp_path / "t.csv")
    assert (trace.ids[:2, 2] == ABSENT).all()
    assert (trace.ids[2:, 2] != ABSENT).all()
    write_trace(trace, tmp_path / "t.parquet")
    back = read_any(tmp_path / "t.parquet")
    assert isinstance(back, Trace)
    np.testing.assert_array_equal(back.ids, trace.ids)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# route_trace v1", "# route_trace v2"),
        ("turn,phase", "turn,stage"),
        ("n_layer=3", "n_layer=4"),
        ("n_expert=128", "n_expert=9"),
        ("0,0,0,0,0,83", "0,0,0,0,0,x"),
        ("0,0,0,0,0,83", "0,0,0,7,0,83"),
        ("# model=", "# mode="),
    ],
)
def test_damaged_big_moe_on_edge(tmp_path: Path, old: str, new: str) -> None:
    text = EDGE.read_text()
    assert old in text
    (tmp_path / "t.csv").write_text(text.replace(old, new))
    with pytest.raises(DaopError, match=r"t\.csv"):
        run("big-moe-on-edge", tmp_path / "t.csv")


def test_sequence_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = np.array([5, 9])
    counts = np.stack([rng.multinomial(2 * t, np.full(4, 0.25), size=3) for t in tokens]).astype(np.uint16)
    np.savez(tmp_path / "c.npz", first=counts, second=counts[:, ::-1], n_tokens=tokens)
    trace = run("sequence-counts", tmp_path / "c.npz")
    assert isinstance(trace, CountsTrace)
    assert trace.geometry.top_k == 2
    np.testing.assert_array_equal(trace.counts.reshape(2, 3, 4), counts)
    other = run("sequence-counts", tmp_path / "c.npz", array="second")
    assert other.source["array"] == "second"
    with pytest.raises(DaopError, match="third"):
        run("sequence-counts", tmp_path / "c.npz", array="third")
    counts[1, 2, 0] += 1
    np.savez(tmp_path / "c.npz", first=counts, n_tokens=tokens)
    with pytest.raises(DaopError, match="sequence 1, layer 2"):
        run("sequence-counts", tmp_path / "c.npz")


def recorder_dump(path: Path, **change: Any) -> Path:
    """Two requests prefilled in one pass, then three decode passes, the second request ending early."""
    rng = np.random.default_rng(0)
    layers, physical = 3, 8

    def record(mode: int, positions: list[int], lengths: list[int] | None) -> dict[str, Any]:
        ids = np.full((layers, len(positions), 8), -1, dtype=np.int32)
        ids[1:, :, :2] = np.argsort(rng.random((2, len(positions), physical)), axis=2)[:, :, :2]
        return {
            "forward_pass_id": 1,
            "rank": 0,
            "gatherer_key": "primary",
            "input_ids": [7] * len(positions),
            "positions": positions,
            "extend_seq_lens": lengths,
            "forward_mode": mode,
            "topk_ids_of_layer": torch.from_numpy(ids),
            "misc_objects": [],
            "global_physical_count": torch.zeros(layers, physical),
        }

    dump: dict[str, Any] = {
        "records": [
            record(1, [0, 1, 2, 0, 1], [3, 2]),
            record(2, [3, 2], None),
            record(2, [4, 3], None),
            record(2, [5], None),
        ],
        "last_physical_to_logical_map": torch.arange(physical).flip(0).repeat(layers, 1),
    }
    dump.update(change)
    torch.save(dump, path)
    return path


def test_sglang_recorder(tmp_path: Path) -> None:
    path = recorder_dump(tmp_path / "d.pt")
    raw = torch.load(path, weights_only=True)["records"]
    trace = tokens_of("sglang-recorder", path)
    assert trace.geometry.experts == (8, 8)
    assert trace.geometry.top_k == 2
    assert trace.geometry.layer_to_model_layer == (1, 2)
    assert trace.token_ids is None
    assert trace.phase.tolist() == [0] * 5 + [1] * 5
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 1, 0]
    assert trace.ids[0, 0].tolist() == [7 - int(i) for i in raw[0]["topk_ids_of_layer"][1, 0, :2]]
    grouped = trace.grouped()
    assert grouped.offsets.tolist() == [0, 6, 10]
    assert grouped.position.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/daop-test-evil"),))


@pytest.mark.parametrize(
    "change",
    [
        {"records": []},
        {"last_physical_to_logical_map": torch.zeros(2, 2, dtype=torch.int64)},
        {"records": [{"input_ids": [1], "positions": [0]}]},
        {"extra": _Evil()},
    ],
)
def test_damaged_sglang_dumps(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DaopError, match=r"d\.pt"):
        run("sglang-recorder", recorder_dump(tmp_path / "d.pt", **change))
    assert not Path("/tmp/daop-test-evil").exists()


def test_not_a_torch_file_and_not_per_token(tmp_path: Path) -> None:
    (tmp_path / "d.pt").write_bytes(b"nothing")
    with pytest.raises(DaopError, match="without executing code"):
        run("sglang-recorder", tmp_path / "d.pt")
    torch.save({"rank": 0, "logical_count": torch.zeros(2)}, tmp_path / "d.pt")
    with pytest.raises(DaopError, match="mode stat"):
        run("sglang-recorder", tmp_path / "d.pt")
