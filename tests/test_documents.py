"""What the documents say about files and commands is true of the files and commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/architecture.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_named_file_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:daop|runtime|predictors|training|benchmarks|docs|tests|\.ci)/[\w./-]*)`", text)
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_architecture_stays_on_one_screen() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 60


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = set(re.findall(r"make (\w+)  +#", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= used <= targets
    assert "make check test" in (ROOT / ".ci/run").read_text()


def test_every_command_line_of_the_readme_is_understood() -> None:
    from daop.cli.main import load_command

    blocks = "\n".join(
        re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    )
    lines = re.findall(r"^daop (\w+ .*?)(?:  +#|$)", blocks, re.MULTILINE)
    assert len(lines) > 4
    for line in lines:
        name, *arguments = line.split()
        command = load_command(name)
        command = getattr(command, "commands", {}).get(arguments[0], command)
        options = {flag for flag in arguments if flag.startswith("--")}
        known = {flag for parameter in command.params for flag in parameter.opts}
        assert options <= known, line


def test_the_readme_says_what_the_benchmarks_printed() -> None:
    ran = subprocess.run(
        [sys.executable, "benchmarks/readme_figures.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
