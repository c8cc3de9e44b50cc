"""The command line: `sipp` with the commands of `COMMANDS` below.

Results go to stdout (`--json`: one document), everything else to stderr; exit codes are in `errors.py`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sipp
from sipp.cli.errors import EXIT_CODES, TERMINATED, Terminated, run_and_report
from sipp.cli.options import as_command

# Command NAME is the function NAME in `commands/NAME_command.py`, imported when it is called. The text
# is the first line of its help.
COMMANDS = {
    "demo": "Train a small network on built-in digits, prune it with several methods, and show what that costs.",
    "prune": "Prune a network to a share of its weights, or as far as a certificate allows.",
    "compare": "Compare methods on your network: how far each moves the output, and which one to use.",
    "sensitivity": "Write the sensitivity of every prunable weight to a file, and check the theory's assumption.",
    "certify": "Certify on a holdout what pruning costs.",
    "eval": "Compare a pruned network with the dense one: accuracy (or perplexity), and how far outputs move.",
    "inspect": "Show what is in a file from sipp.save or a folder from `sipp prune`: sizes, method, certificate.",
    "export": "Export a pruned network for other programs, or as one small file; the result is compared.",
    "shrink": "Make a smaller dense network: without dead channels (the same outputs), or within a budget.",
    "run": "Run a recipe, or resume one that was stopped; without a recipe, list them.",
    "study": "Reproduce a figure of the paper: all runs of a study, then one page; without a name, list the studies.",
    "report": "Write a page about runs or pruned networks that works offline.",
    "data": "List the data sets and which of them you have, or download CIFAR-10 or MNIST.",
    "bench": "Time a pruned network in the sparse runtime and in PyTorch, step by step and as a whole.",
}


def function_of(name: str) -> Callable[..., None]:
    """The function of a command, wrapped with its options."""
    return as_command(getattr(import_module(f"sipp.cli.commands.{name}_command"), name))


def command_of(name: str) -> Any:
    """Builds the typer command."""
    alone = typer.Typer(add_completion=False)
    alone.command(name)(function_of(name))
    command = typer.main.get_command(alone)
    help_option: Any = command.get_help_option(typer.Context(command))
    help_option.rich_help_panel = "Output"  # otherwise it would come first, alone
    return command


class Commands(TyperGroup):
    """The group of all commands, which imports only the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replaces the placeholder of the called command by the command itself."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = command_of(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    help="Provable, data-informed pruning of neural networks.",
    epilog=EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sipp {sipp.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works anywhere in a command.")
    ] = False,
) -> None:
    """Provable, data-informed pruning of neural networks."""


def _name_only() -> None:
    """A placeholder for a command in the list, which shows only its name and help."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_name_only)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Terminated(TERMINATED)


def main() -> None:
    """The entry point: runs the command line, and reports errors in three lines."""
    signal.signal(signal.SIGTERM, _stop)  # so that temporary files are removed
    sys.exit(run_and_report(app, sys.argv[1:]))
