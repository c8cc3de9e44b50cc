"""The command line. Exit codes: 0 done; 2 wrong input; 3 not certified, or not verified."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import sipp
from sipp import cli_run
from sipp.errors import DataError, ModelError, OptionError

WRONG_INPUT = 2
NOT_CERTIFIED = 3

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


@app.command()
def certify(
    model: Annotated[str, typer.Option(help="A built-in network (resnet20, ...) or package.module:callable.")],
    dense: Annotated[Path, typer.Option(help="Weights of the dense network: .safetensors or .pt.")],
    pruned: Annotated[Path, typer.Option(help="Weights of the pruned network.")],
    holdout: Annotated[Path, typer.Option(help="Points: .npy, or .npz/.safetensors with inputs and labels.")],
    delta: Annotated[float, typer.Option(help="Share of inputs that may be further off.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="Confidence of the statement.")] = 0.95,
    epsilon: Annotated[float | None, typer.Option(help="Relative error to certify; without it, the smallest.")] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Certify the accuracy drop instead (T16).")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Calibration points; the holdout may hold none.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="File that records every use of a holdout.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the certificate as JSON.")] = None,
    verify: Annotated[Path | None, typer.Option(help="A certificate to check again on these networks.")] = None,
) -> None:
    """Certify what pruning costs on held-out points (T14, T16), or check a certificate made earlier."""
    from sipp.certify import AccuracyCertificate, Certificate, certify_accuracy, from_json, to_json
    from sipp.certify import verify as check
    from sipp.cli_inputs import load_model, load_points, read_text

    networks = load_model(model, dense), load_model(model, pruned)
    points = load_points(holdout)
    if verify is not None:
        ok, reasons = check(from_json(read_text(verify)), *networks, points)
        typer.echo("verified" if ok else "not verified:\n" + "\n".join(reasons))
        raise typer.Exit(0 if ok else NOT_CERTIFIED)
    seen = None if calibration is None else load_points(calibration)
    cert: Certificate | AccuracyCertificate
    if accuracy:
        cert = certify_accuracy(*networks, points, confidence=confidence, calibration=seen, ledger=ledger)
    else:
        cert = sipp.certify(
            *networks, points, delta=delta, confidence=confidence, epsilon=epsilon, calibration=seen, ledger=ledger
        )
    typer.echo(str(cert))
    if out is not None:
        out.write_text(to_json(cert))
    failed = isinstance(cert, Certificate) and cert.verdict != "certified"
    raise typer.Exit(NOT_CERTIFIED if failed else 0)


app.command()(cli_run.run)
app.command()(cli_run.runs)


def main() -> None:
    """Nothing; runs the command line, and says in one line what was wrong with its input."""
    try:
        app()
    except (DataError, ModelError, OptionError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(WRONG_INPUT)
