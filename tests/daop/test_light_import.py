"""What ``import daop`` and ``daop --help`` load; ``benchmarks/import_time.py`` measures how long it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "lightgbm", "sklearn", "pyarrow", "cupy", "scipy", "tokenizers"}


def modules_after(code: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter has loaded after running ``code``."""
    show = "\nimport sys\nprint('\\n', *sorted(name for name in sys.modules if '.' not in name))"
    ran = subprocess.run([sys.executable, "-c", code + show], check=True, capture_output=True, text=True)
    return set(ran.stdout.splitlines()[-1].split())


def test_import_daop_is_light() -> None:
    assert not modules_after("import daop") & (HEAVY | {"numpy", "rich", "typer"})


@pytest.mark.parametrize(
    ("arguments", "also"),
    [
        (["--help"], {"numpy", "rich"}),
        (["--version"], {"numpy", "rich"}),
        (["run", "--help"], set()),
        (["demo", "--help"], set()),
        (["doctor", "--help"], set()),
    ],
)
def test_help_is_light(arguments: list[str], also: set[str]) -> None:
    code = f"from daop.cli.main import app\ntry:\n    app({arguments})\nexcept SystemExit:\n    pass"
    assert not modules_after(code) & (HEAVY | also)


def test_the_parts_of_the_package_are_light_to_import() -> None:
    """Policies and bookkeeping are pure: the simulator needs no torch."""
    names = ("prompts", "config", "machine", "runtime.conductor", "runtime.policies.lru", "runtime.memory")
    assert not modules_after("\n".join(f"import daop.{name}" for name in names)) & HEAVY
