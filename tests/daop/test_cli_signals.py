"""``daop`` ended from outside, or by the machine: an exit code, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daop.cli.main import app

SCRIPT = """
import os, signal
from daop.cli import main, run

def busy(*_, **__):
    try:
        os.kill(os.getpid(), getattr(signal, os.environ["ENDED_BY"]))
        signal.pause()
    finally:
        print("cleared up", flush=True)

run.gather = busy
for name in ("SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)  # whatever runs the tests
signal.signal(signal.SIGINT, signal.default_int_handler)
main.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_a_command_as_an_exception_does(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, "run", "nowhere", "--prompt", "x"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ENDED_BY": name},
    )
    assert ended.returncode == 128 + getattr(signal, name)
    assert ended.stdout == "cleared up\n"
    assert "Traceback" not in ended.stderr


def test_what_the_machine_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))

    monkeypatch.setattr("daop.cli.run.gather", full)
    ended = CliRunner().invoke(app, ["run", "nowhere", "--prompt", "x"])
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: [Errno 28] No space left on device")
