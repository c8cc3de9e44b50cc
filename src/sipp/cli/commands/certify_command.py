"""The command `sipp certify`: what pruning costs on held-out points, or whether a certificate holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

import sipp
from sipp.certificates.claims import AccuracyCertificate, Certificate, certify_accuracy, from_json, to_json
from sipp.certificates.claims import verify as check
from sipp.cli.errors import NOT_CERTIFIED, Trouble, at
from sipp.cli.files import CERTIFICATE, check_file, check_ledger, write_file
from sipp.cli.models import load_model, read_text, weights_read
from sipp.cli.options import BatchSize, Confidence, Device, Force, HoldoutPoints, Model, OutputPart, output_of
from sipp.cli.output import Json, only_json, print_json, show
from sipp.cli.points import KINDS, Points, Role, check_fits, default_points, draw, open_source, points_read


def certify(
    model: Model,
    dense: Annotated[Path, typer.Option(help="Weights of the dense network: .safetensors or .pt.")],
    pruned: Annotated[Path, typer.Option(help="Weights of the pruned network, or its folder from `sipp prune`.")],
    holdout: Annotated[str, typer.Option(help=f"Points new to both networks: {KINDS.rpartition(', or')[0]}.")],
    delta: Annotated[float, typer.Option(help="Share of inputs that may be further off.")] = 0.05,
    confidence: Confidence = 0.95,
    epsilon: Annotated[float | None, typer.Option(help="Relative error to certify; without it, the smallest.")] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Certify the accuracy drop instead (T16).")] = False,
    calibration: Annotated[str | None, typer.Option(help="Calibration points; the holdout may hold none.")] = None,
    output: OutputPart = None,
    ledger: Annotated[
        Path | None, typer.Option(help="File that records every use of a holdout; with --verify it is only read.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the certificate as JSON.")] = None,
    force: Force = False,
    verify: Annotated[Path | None, typer.Option(help="A certificate to check again on these networks.")] = None,
    points: HoldoutPoints = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Certify what pruning costs on held-out points (T14, T16), or check a certificate made earlier."""
    if accuracy and epsilon is not None:
        raise Trouble("--accuracy and --epsilon are two claims", where="sipp certify", fix="give one of them")
    if verify is not None and (out is not None or accuracy or epsilon is not None):
        raise Trouble(
            "--out, --accuracy and --epsilon are for a new certificate, and --verify checks one",
            where=f"--verify {verify}",
            fix="leave them out",
        )
    with only_json(as_json):
        reads = weights_read("--dense", dense) + weights_read("--pruned", pruned)
        reads += points_read("--holdout", holdout) + points_read("--calibration", calibration)
        if out is not None:
            with at(f"--out {out}", "give another file"):
                check_file(out, CERTIFICATE, force=force, inputs=reads)
        if ledger is not None and verify is None:
            with at(f"--ledger {ledger}", "allow reading and writing, or give another file"):
                check_ledger(ledger, out=out, inputs=reads)
        networks = (
            load_model(model, dense, option="--dense", device=device),
            load_model(model, pruned, option="--pruned", device=device),
        )
        fresh = _points(holdout, "--holdout", networks[0], model, batch_size, points)
        seen = None if calibration is None else _points(calibration, "--calibration", networks[0], model, batch_size)
        if verify is not None:
            with at(f"--verify {verify}", "give a certificate that `sipp certify --out` wrote"):
                found = check(
                    from_json(read_text(verify)),
                    *networks,
                    fresh.batches,
                    output=output_of(output),
                    calibration=None if seen is None else seen.batches,
                    ledger=ledger,
                )
            ok, text = found.ok, str(found)
            record: object = {"kind": "verification", "verified": ok} | {
                "reasons": found.reasons,
                "unchecked": found.unchecked,
            }
        else:
            goal = None if accuracy else (delta, epsilon)
            with at(f"--holdout {holdout}", "see sipp certify --help"):
                cert = _claim(networks, fresh, seen, goal, confidence, output_of(output), ledger)
            ok = not isinstance(cert, Certificate) or cert.verdict == "certified"
            text, record = str(cert), json.loads(to_json(cert))
            if out is not None and ok:
                with at(f"--out {out}", "give another file"):
                    write_file(out, to_json(cert).encode(), CERTIFICATE, force=force)
    if as_json:
        print_json(record)
    else:
        show(text)
    raise typer.Exit(0 if ok else NOT_CERTIFIED)


def _claim(
    networks: tuple[nn.Module, nn.Module],
    points: Points,
    seen: Points | None,
    goal: tuple[float, float | None] | None,
    confidence: float,
    output: int | str | None,
    ledger: Path | None,
) -> Certificate | AccuracyCertificate:
    """The certificate of a relative error (goal: delta and epsilon), or, without a goal, of the accuracy drop."""
    calibration = None if seen is None else seen.batches
    if goal is None:
        return certify_accuracy(
            *networks, points.batches, confidence=confidence, output=output, calibration=calibration, ledger=ledger
        )
    return sipp.certify(
        *networks,
        points.batches,
        delta=goal[0],
        confidence=confidence,
        epsilon=goal[1],
        output=output,
        calibration=calibration,
        ledger=ledger,
    )


def _points(
    spec: str, option: str, network: nn.Module, model: str, batch_size: int | None, n_points: int | None = None
) -> Points:
    """The points of a holdout or of a calibration set: so many, or all of them, or of a large set's holdout 1,000."""
    role: Role = "holdout" if option == "--holdout" else "calibration"
    source = open_source(spec, role, option)
    n = default_points(source, role, lambda: 0) if role == "holdout" else None
    points = draw(source, n_points or n, seed=0, batch_size=batch_size, model=network)
    check_fits(network, points, model, option)
    return points
