"""The command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import sipp

app = typer.Typer(no_args_is_help=True, add_completion=True, help="Provable, data-informed pruning of neural networks.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sipp {sipp.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Provable, data-informed pruning of neural networks."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the whole run: the same seed prints the same numbers.")] = 0,
) -> None:
    """Train a small network on embedded digits, prune it by every method, print and draw what that costs."""
    from sipp.demo import demo_table, run_demo

    console = Console()
    result = run_demo(out, seed=seed, progress=console.is_terminal)
    console.print(demo_table(result))
    console.print(f"figure: {out / 'accuracy.png'}")


def main() -> None:
    """Nothing; runs the command line."""
    app()
