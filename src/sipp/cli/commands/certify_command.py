"""The command `sipp certify`: what pruning costs on held-out points, or whether a certificate holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.errors import NOT_CERTIFIED
from sipp.cli.options import (
    GUARANTEE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
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

Dense = Annotated[
    Path, typer.Option(help="Weights of the dense network: .safetensors or .pt.", rich_help_panel=MODEL_PANEL)
]
PrunedWeights = Annotated[
    Path,
    typer.Option(help="Weights of the pruned network, or its folder from `sipp prune`.", rich_help_panel=MODEL_PANEL),
]
Holdout = Annotated[str, typer.Option(help=f"Points new to both networks: {REAL_KINDS}.", rich_help_panel=MODEL_PANEL)]
Calibration = Annotated[
    str | None,
    typer.Option(help="Points that chose the pruning: the holdout may hold none of them.", rich_help_panel=MODEL_PANEL),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Relative error to certify; without it, the smallest.", rich_help_panel=GUARANTEE_PANEL),
]
Accuracy = Annotated[
    bool,
    typer.Option("--accuracy", help="Certify the drop in accuracy instead (T16).", rich_help_panel=GUARANTEE_PANEL),
]
Delta = Annotated[float, typer.Option(help="Share of inputs that may be further off.", rich_help_panel=GUARANTEE_PANEL)]
Verify = Annotated[
    Path | None,
    typer.Option(help="Check this certificate again instead of making one.", rich_help_panel=GUARANTEE_PANEL),
]
Out = Annotated[Path | None, typer.Option(help="Where to write the certificate as JSON.", rich_help_panel=OUTPUT_PANEL)]


def certify(
    model: Model,
    dense: Dense,
    pruned: PrunedWeights,
    holdout: Holdout,
    calibration: Calibration = None,
    normalise: Normalise = None,
    epsilon: Epsilon = None,
    accuracy: Accuracy = False,
    delta: Delta = 0.05,
    confidence: Confidence = 0.95,
    points: HoldoutPoints = None,
    output: OutputPart = None,
    ledger: Ledger = None,
    verify: Verify = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
    device: Device = "auto",
    batch_size: BatchSize = None,
) -> None:
    """Certify what pruning costs on held-out points (T14, T16), or check a certificate made earlier.

    For example: sipp certify --model resnet20 --dense net.pt --pruned pruned --holdout cifar10
    """
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
