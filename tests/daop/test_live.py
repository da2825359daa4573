"""The live view: its figures, and what it does to a real terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from daop.cli.live import LiveView, tail
from daop.cli.main import app
from daop.cli.output import Output

DEMO = Path(__file__).parents[2] / "daop" / "assets" / "demo"
SHOW, HIDE = b"\x1b[?25h", b"\x1b[?25l"


def in_terminal(*arguments: object, interrupt_at: bytes = b"") -> tuple[int, bytes]:
    """Exit code and output of daop in a terminal of 80 x 30; Ctrl-C once the output holds something."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite that runs in the background ignores it
        os.environ["TERM"] = "xterm"
        os.environ["PYTHONPATH"] = str(DEMO.parents[2])
        os.execv(sys.executable, [sys.executable, "-m", "daop", *map(str, arguments)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    out = b""
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not read:
            break
        out += read
        if interrupt_at and interrupt_at in out:
            os.kill(child, signal.SIGINT)
            interrupt_at = b""
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out


@pytest.mark.slow
def test_shows_figures_and_leaves_the_terminal_as_it_was() -> None:
    ask = ("run", DEMO, "--live", "--ecr", 0.3, "--policy", "speculative", "--prompt", "Once upon a time")
    code, out = in_terminal(*ask, "--max-new-tokens", 120)
    assert code == 0, out.decode(errors="replace")
    text = out.decode(errors="replace")
    for figure in ("tokens/s", "hit rate", "stalled", "prefetching", "on; ", "slots in use", "by layer"):
        assert figure in text
    assert out.count(HIDE) == out.count(SHOW) > 0
    assert out.rindex(SHOW) > out.rindex(HIDE)
    assert out.rindex(b"by layer") < out.rindex(b"[1/1]"), "the panel goes, the answer stays"

    code, out = in_terminal(*ask, "--max-new-tokens", 1900, interrupt_at=b"hit rate")
    assert code == 130, out.decode(errors="replace")
    assert b"interrupted" in out
    assert b"Traceback" not in out
    assert out.rindex(SHOW) > out.rindex(HIDE)


def test_without_a_terminal_it_says_so() -> None:
    ran = CliRunner().invoke(app, ["run", str(DEMO), "--live", "--prompt", "x", "--max-new-tokens", "3"])
    assert ran.exit_code == 0, ran.output
    assert "--live needs a terminal" in ran.output
    assert "\x1b[" not in ran.output


def test_speed_is_that_of_the_last_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from daop.core import Phase

    view = LiveView(Output(None))
    clock = iter([0.0, 0.1, 0.2, 0.3])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for _ in range(4):
        view.begin(Phase.DECODE, 2)
    assert view.tokens_per_second() == pytest.approx(20.0)
    view.begin(Phase.PREFILL, 50)
    assert view.tokens_per_second() == 0.0


def test_bars_are_empty_only_at_none_and_full_only_at_all() -> None:
    output = Output(None)
    output.console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    view = LiveView(output)
    assert [view._bar(share) for share in (0.0, 0.001, 0.999, 1.0)] == [" ", "▁", "▇", "█"]
    output.console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert LiveView(output)._bar(1.0) == "@"


def test_the_end_of_a_text_fits() -> None:
    assert tail("one\ntwo\nthree", 2, 80) == "two\nthree"
    assert tail("abcdef", 2, 2) == "cd\nef"
    assert tail("", 3, 80) == ""
