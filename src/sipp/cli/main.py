"""The command line: `sipp` with the commands of `COMMANDS` below.

Results go to stdout (`--json`: one document), everything else to stderr; exit codes are in `errors.py`.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer

import sipp
from sipp.cli.errors import EXIT_CODES, TERMINATED, Terminated, run_and_report
from sipp.cli.options import as_command

# Command NAME is the function NAME in `commands/NAME_command.py`, and its docstring the help. In the order of --help.
COMMANDS = (
    "demo", "prune", "compare", "sensitivity", "certify", "eval", "inspect", "export", "shrink", "run", "study",
    "report", "data", "bench",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sipp {sipp.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works anywhere in a command.")
    ] = False,
) -> None:
    """Prune a PyTorch network and certify the error."""


def _built() -> Any:
    """The group of all commands, which import nothing slow before they are called."""
    whole = typer.Typer(no_args_is_help=True, add_completion=True, epilog=EXIT_CODES)
    whole.callback()(_options)
    for name in COMMANDS:
        function = getattr(import_module(f"sipp.cli.commands.{name}_command"), name)
        whole.command(name)(as_command(function))
    group: Any = typer.main.get_command(whole)
    for command in group.commands.values():
        command.get_help_option(typer.Context(command)).rich_help_panel = "Output"  # otherwise it comes first, alone
    return group


app = _built()


def _stop(number: int, frame: FrameType | None) -> None:
    raise Terminated(TERMINATED)


def main() -> None:
    """The entry point: runs the command line, and reports errors in three lines."""
    signal.signal(signal.SIGTERM, _stop)  # so that temporary files are removed
    sys.exit(run_and_report(app, sys.argv[1:]))
