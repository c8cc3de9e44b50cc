"""The command line: `sipp demo, score, prune, certify, run, runs, report, data, bench`.

Exit codes: 0 done; 1 unexpected (a bug: `--debug` shows the traceback); 2 wrong input; 3 not certified, or not
verified: nothing was written; 130 stopped by Ctrl-C, 143 by SIGTERM. Results go to stdout (`--json`: one document),
everything else to stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import sipp
from sipp.cli.commands import (
    bench_command,
    certify_command,
    data_command,
    prune_command,
    report_command,
    run_command,
    score_command,
)
from sipp.cli.errors import EXIT_CODES, fail_well
from sipp.cli.options import Force
from sipp.cli.output import Json, only_json, print_json, show, shows_progress

app = typer.Typer(
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
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere in a command.")
    ] = False,
) -> None:
    """Provable, data-informed pruning of neural networks."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the figure.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the whole run: the same seed prints the same numbers.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a small network on embedded digits, prune it by every method, print and draw what that costs."""
    from sipp.cli.commands.demo_command import demo_table, run_demo

    with only_json(as_json):
        result = run_demo(out, seed=seed, progress=shows_progress(as_json), force=force)
    if not as_json:
        show(demo_table(result), f"page: {result.page}, figure: {out / 'accuracy.png'}")
        return
    rows = [
        {"method": method, "keep": keep, "pruned": share, "retrained": result.after[method, keep]}
        for (method, keep), share in result.before.items()
    ]
    files = {"page": result.page, "figure": out / "accuracy.png"}
    print_json({"kind": "demo", "dense": result.dense, "accuracies": rows, **files})


app.command()(score_command.score)
app.command()(prune_command.prune)
app.command()(certify_command.certify)
app.command()(run_command.run)
app.command()(run_command.runs)
app.command()(report_command.report)
app.command()(data_command.data)
app.command()(bench_command.bench)


def main() -> None:
    """Nothing; runs the command line, and says in three lines what was wrong with its input."""
    sys.exit(fail_well(app, sys.argv[1:]))
