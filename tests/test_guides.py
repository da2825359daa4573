"""Every command of the how-to pages, run in the order of its page, as a reader would.

A block of ``bash`` is either daop commands, which run in this process to save their start, or something
else, which a shell runs. The folder is empty but for ``daop``, as a clone's root has it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daop.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted(page.name for page in (ROOT / "docs").glob("*.md") if "```bash" in page.read_text())
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_pages_that_were_promised_are_there() -> None:
    promised = {"first-run", "training", "comparing", "choosing", "report", "extending", "privacy"}
    assert promised == {name.removesuffix(".md") for name in GUIDES}
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_commands_of(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "daop").symlink_to(ROOT / "daop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # the pages tell the reader to set PYTHONPATH
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text())
    assert blocks
    try:
        for language, text in blocks:
            if language == "python":
                exec(compile(text, page, "exec"), {"__name__": "guide"})
            elif all(line.startswith("daop ") for line in text.splitlines()):
                for line in text.splitlines():
                    ran = CliRunner().invoke(app, shlex.split(line)[1:])
                    assert ran.exit_code == 0, f"{line}\n{ran.output}"
            else:
                subprocess.run(["bash", "-euc", text], check=True, cwd=tmp_path, timeout=60)
    finally:
        for name in ("mine", "same"):  # modules that a page has written
            sys.modules.pop(name, None)
