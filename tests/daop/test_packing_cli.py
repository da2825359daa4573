"""``daop pack`` and what runs its folders, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from daop import comparison
from daop.cli.main import app
from daop.core import Geometry
from daop.runtime.sim_traffic import Traffic

DEMO = Path(__file__).parents[2] / "daop" / "assets" / "demo"


def trace_of_demo() -> comparison.Recorded:
    """A little random traffic."""
    geometry = Geometry.uniform(4, 16, 2, 10_000_000)
    ids = np.random.default_rng(0).random((60, 4, 16)).argsort(-1)[..., :2].astype(np.int16)
    traffic = Traffic(geometry=geometry, ids=ids, sequence=np.zeros(60, dtype=np.int64))
    return comparison.Recorded(traffic=traffic, profile=None, learnt_from=None)


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_packed_verified_and_run(tmp_path: Path) -> None:
    folder, facts = tmp_path / "packed", tmp_path / "facts.json"
    code, text = invoke("pack", str(DEMO), "-o", str(folder), "--dtype", "int4", "--json", str(facts))
    assert code == 0, text
    found = json.loads(facts.read_text())
    assert found["settings"] == {"dtype": "int4", "group": 32}
    assert found["expert_bytes"] < found["expert_bytes_before"] / 2
    card = (folder / "README.md").read_text()
    assert found["source"]["fingerprint"] in card
    assert "INT4, groups of 32 inputs" in card
    assert "Not measured" in card
    sample = tmp_path / "text.txt"
    sample.write_text("Once upon a time there was a model whose experts did not fit. " * 40)
    code, text = invoke("pack", str(DEMO), "-o", str(folder), "--dtype", "int4", "--text", str(sample))
    assert code == 0, text
    assert "they were packed already" in " ".join(text.split())
    card = (folder / "README.md").read_text()
    assert "mean KL divergence" in card
    code, text = invoke("pack", str(DEMO), "-o", str(folder), "--dtype", "int4")
    assert code == 0, text
    assert (folder / "README.md").read_text() == card, "measured figures are not lost"
    code, text = invoke("pack", str(folder), "--verify")
    assert code == 0, text
    assert "every checksum is as it was packed" in " ".join(text.split())
    code, text = invoke("run", str(folder), "--prompt", "A", "--max-new-tokens", "2")
    assert code == 0, text


def test_what_is_refused(tmp_path: Path) -> None:
    for arguments, message in (
        (("pack", str(DEMO)), "name the folder to write with -o"),
        (("pack", str(DEMO), "--verify"), "is not a folder that `daop pack` wrote"),
        (("pack", str(DEMO), "-o", str(tmp_path / "x"), "--text", "/nowhere.txt"), "there is no such file"),
    ):
        code, text = invoke(*arguments)
        assert code == 2
        assert message in " ".join(text.split())
