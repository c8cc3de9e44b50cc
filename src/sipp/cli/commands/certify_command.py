"""The command `sipp certify`: what pruning costs on held-out points, or whether a certificate holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.errors import NOT_CERTIFIED
from sipp.cli.options import (
    REAL_KINDS,
    BatchSize,
    Confidence,
    Device,
    Force,
    HoldoutPoints,
    Ledger,
    Model,
    Normalise,
    OutputPart,
)
from sipp.cli.output import Json, only_json, print_json, show


def certify(
    model: Model,
    dense: Annotated[Path, typer.Option(help="Weights of the dense network: .safetensors or .pt.")],
    pruned: Annotated[Path, typer.Option(help="Weights of the pruned network, or its folder from `sipp prune`.")],
    holdout: Annotated[str, typer.Option(help=f"Points new to both networks: {REAL_KINDS}.")],
    delta: Annotated[float, typer.Option(help="Share of inputs that may be further off.")] = 0.05,
    confidence: Confidence = 0.95,
    epsilon: Annotated[float | None, typer.Option(help="Relative error to certify; without it, the smallest.")] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Certify the accuracy drop instead (T16).")] = False,
    calibration: Annotated[str | None, typer.Option(help="Calibration points; the holdout may hold none.")] = None,
    normalise: Normalise = None,
    output: OutputPart = None,
    ledger: Ledger = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the certificate as JSON.")] = None,
    force: Force = False,
    verify: Annotated[Path | None, typer.Option(help="A certificate to check again on these networks.")] = None,
    points: HoldoutPoints = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Certify what pruning costs on held-out points (T14, T16), or check a certificate made earlier."""
    from sipp.cli.certifying import CertifyRequest, answer

    request = CertifyRequest(
        model=model, dense=dense, pruned=pruned, holdout=holdout, delta=delta, confidence=confidence, epsilon=epsilon,
        accuracy=accuracy, calibration=calibration, normalise=normalise, output=output, ledger=ledger, out=out,
        force=force, verify=verify, points=points, batch_size=batch_size, device=device,
    )  # fmt: skip
    with only_json(as_json):
        found = answer(request)
    if as_json:
        print_json(found.record)
    else:
        show(found.text)
    raise typer.Exit(0 if found.ok else NOT_CERTIFIED)
