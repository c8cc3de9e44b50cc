"""`sipp certify`: certifies on a holdout what pruning costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.options import REAL_KINDS
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.results import CERTIFICATE_KIND, CONFIDENCE, SHARE, AnyCertificate, Certificate, Measure, Option, to_json


def certify(
    *,
    model: shared.Model,
    pruned: shared.PrunedWeights,
    dense: shared.Dense = None,
    holdout: Annotated[str, Option(f"Inputs that are new to both networks: {REAL_KINDS}.", "Model and data")],
    calibration: Annotated[
        str | None,
        Option("Inputs that were used for pruning, beside those that the folder of --pruned knows.", "Model and data"),
    ] = None,
    device: shared.Device = "auto",
    inputs: shared.InputOptions,
    epsilon: Annotated[
        float | None, Option("Relative error to certify; default: the smallest that can be certified.", "Guarantee")
    ] = None,
    accuracy: Annotated[bool, Option("Certify the drop in accuracy instead.", "Guarantee")] = False,
    measure: Annotated[
        Measure,
        Option(
            "What epsilon limits: the output; for a language model also kl (nats per token) or next-token.",
            "Guarantee",
        ),
    ] = "output",
    share: shared.Share = SHARE,
    confidence: shared.Confidence = CONFIDENCE,
    part: shared.Part = None,
    out: Annotated[
        Path | None, Option("File for the certificate; in the network's folder, it appears on the page.", "Output")
    ] = None,
    force: shared.Force = False,
) -> Answer:
    """Certify on a holdout what pruning costs.

    For example: sipp certify --model resnet20 --dense net.pt --pruned pruned --holdout cifar10
    """
    from sipp.cli.data_option import Reader, normalisation_lines
    from sipp.cli.model_option import both_networks, points_seen_by
    from sipp.cli.out_option import check_out, write_record

    if accuracy and epsilon is not None:
        raise OptionError("--accuracy and --epsilon exclude each other", fix="give only one of them")
    if accuracy and measure != "output":
        raise CommandError("--accuracy already measures next tokens", where="--measure", fix="leave one of them out")
    reads = {"--pruned": pruned, "--dense": dense, "--holdout": holdout, "--calibration": calibration}
    check_out(out, force=force, reads=reads)
    networks = both_networks(model, dense, pruned, device)
    reader = Reader(networks[0], model, inputs)
    fresh = reader.holdout(holdout, None)
    used = None if calibration is None else reader.draw(reader.open(calibration, option="--calibration"), None)
    known = replace(points_seen_by(pruned), given=None if used is None else used.batches)
    certificate: AnyCertificate
    with naming_option(f"--holdout {holdout}", "see sipp certify --help"):
        if accuracy:
            certificate = sipp.certify_accuracy(
                *networks, fresh.batches, confidence=confidence, output=part, calibration=known
            )
        else:
            certificate = sipp.certify(
                *networks, fresh.batches, share=share, confidence=confidence, epsilon=epsilon, measure=measure,
                output=part, calibration=known,
            )  # fmt: skip
    record = {"kind": CERTIFICATE_KIND, "sipp": sipp.__version__, **to_json(certificate)}
    is_failed = isinstance(certificate, Certificate) and certificate.verdict != "certified"
    written = [] if is_failed else write_record(out, record)
    lines = [str(certificate), *normalisation_lines(fresh, used), *written]
    return Answer(lines, record, typer.Exit(NOT_CERTIFIED) if is_failed else None)
