"""``daop``: the command line. Errors a person can mend are one paragraph and exit code 2.

Commands live in modules of their own, which are imported when the command is called: ``daop --help``
needs none of them.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
from importlib import util
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import daop

COMMANDS = {
    "demo": ("daop.cli.demo:demo", "Watch a model whose experts do not fit in memory generate text."),
    "run": ("daop.cli.run:run", "Generate text with a model of yours."),
    "doctor": ("daop.cli.doctor:doctor", "Say what this machine is, and what daop would choose on it."),
    "trace": ("daop.cli.trace:trace_app", "Record, import and inspect routing traces."),
    "train": ("daop.cli.train:train", "Train an activation predictor on traces."),
    "evaluate": ("daop.cli.evaluate:evaluate", "Score predictors on traces they have not seen."),
    "compare": ("daop.cli.compare:compare", "Compare static with dynamic placement, measured or simulated."),
    "quality": ("daop.cli.quality:quality", "Measure what an approximation changes in a model's output."),
    "pack": ("daop.cli.pack:pack", "Write a model's experts for fast reading, in fewer bits if wanted."),
    "calibrate": ("daop.cli.calibrate:calibrate", "Measure what moving and computing experts costs here."),
}
"""Name -> (where it is, what it does), in the order of the help."""

UNUSABLE = 2
INTERRUPTED = 130  # as a shell says that Ctrl-C ended a command
ENDS = ("SIGTERM", "SIGHUP")


class LazyGroup(TyperGroup):
    """Lists its commands without importing them, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (place, _) in COMMANDS.items() if util.find_spec(place.partition(":")[0])]

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Enough of a command for the help."""
        known = cmd_name in self.list_commands(ctx)
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if known else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, about to be called."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub and load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        from daop.core import DaopError  # here, since it needs numpy, which the help does not

        try:
            return super().invoke(ctx)
        except DaopError as error:
            if os.environ.get("DAOP_DEBUG") == "1":
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(UNUSABLE) from error
        except (
            OSError
        ) as error:  # a full disk, a file that may not be read; a closed pipe is click's to handle
            if error.errno == errno.EPIPE or os.environ.get("DAOP_DEBUG") == "1":
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(UNUSABLE) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error


def load_command(name: str) -> Any:
    """Import a command: a function, or a typer app with commands of its own."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: Any = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        only = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        only.command(name)(found)
        found = only
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="daop",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would take a third of a second to load
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"daop {daop.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Run Mixture-of-Experts models whose experts do not fit in fast memory."""


def main() -> None:
    for name in ENDS:
        if signal.getsignal(number := getattr(signal, name)) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end)
    app()


def _end(number: int, _: object) -> None:
    """End as an exception does, so that temporary files go and a recording keeps what it has."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
