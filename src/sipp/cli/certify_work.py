"""Runs `sipp certify`: creates a certificate on a holdout."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from torch import nn

import sipp
from sipp.certificates.evidence import holdout_data
from sipp.cli.commands.certify_command import CertifyRequest
from sipp.cli.data_option import Points, Reader, normalisation_lines
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.eval_work import evaluate
from sipp.cli.model_option import both_networks
from sipp.cli.out_option import check_out, write_out
from sipp.cli.output import Answer
from sipp.errors import DataError, OptionError
from sipp.results.certificate import KIND, AnyCertificate
from sipp.results.jsonio import to_json
from sipp.results.pruned_to import SeenPoints
from sipp.storage.outputs import WEIGHTS_NAME
from sipp.storage.pruned_folder import is_pruned_folder, read_pruned
from sipp.verbs.certify import certify_accuracy


def run_certify(request: CertifyRequest) -> Answer:
    """Creates a certificate, and writes it if it holds."""
    _check(request)
    dense, pruned = both_networks(request.model, request.dense, request.pruned, request.device)
    reader = Reader(dense, request.model, request.inputs)
    holdout, calibration = reader.holdout(request.holdout, request.points), None
    known = _points_seen(request.pruned)
    if request.calibration is not None:
        calibration = reader.draw(reader.open(request.calibration, option="--calibration"), None)
        given = holdout_data(calibration.batches, "calibration").hashes()
        known = SeenPoints(known.hashes.union(given), is_all=True)
    ok, text, values = _certify(request, (dense, pruned), holdout, known)
    return Answer([text, *normalisation_lines(holdout, calibration)], values, None if ok else typer.Exit(NOT_CERTIFIED))


def _points_seen(pruned: Path) -> SeenPoints:
    """The points that chose a network, from its folder, given itself or by its file of weights; none if unknown."""
    folder = pruned.parent if pruned.name == WEIGHTS_NAME else pruned
    try:
        if folder.is_dir() and is_pruned_folder(folder):
            pruned_facts = read_pruned(folder)[0].pruned
            return SeenPoints(pruned_facts.seen, pruned_facts.seen_all and bool(pruned_facts.seen))
    except DataError:  # weights that do not match the record
        pass
    return SeenPoints(frozenset(), is_all=False)


def _check(request: CertifyRequest) -> None:
    """Refuses contradictory options and unwritable outputs before any work."""
    if request.accuracy and request.epsilon is not None:
        raise OptionError("--accuracy and --epsilon exclude each other", fix="give only one of them")
    if request.accuracy and request.measure != "output":
        raise CommandError("--accuracy already measures next tokens", where="--measure", fix="leave one of them out")
    reads = {f"--{name}": getattr(request, name) for name in ("pruned", "dense", "holdout", "calibration")}
    check_out(request.out, force=request.force, reads=reads)


def _certify(
    request: CertifyRequest,
    networks: tuple[nn.Module, nn.Module],
    fresh: Points,
    calibration: SeenPoints,
) -> tuple[bool, str, object]:
    """Creates a certificate of the relative error (T14) or the accuracy drop (T16), and writes it if it holds."""
    cert: AnyCertificate
    ok, text = True, ""
    with naming_option(f"--holdout {request.holdout}", "see sipp certify --help"):
        if request.accuracy:
            cert = certify_accuracy(
                *networks, fresh.batches, confidence=request.confidence, output=request.output, calibration=calibration,
            )  # fmt: skip
        else:
            cert = sipp.certify(
                *networks, fresh.batches, share=request.share, confidence=request.confidence, epsilon=request.epsilon,
                measure=request.measure, output=request.output, calibration=calibration,
            )  # fmt: skip
            ok = cert.verdict == "certified"
    values = {"kind": KIND, "sipp": sipp.__version__, **to_json(cert)}
    if request.out is not None and ok:
        write_out(request.out, json.dumps(values, indent=2).encode(), force=request.force)
    if request.accuracy:
        accuracies = evaluate(*networks, fresh.batches, request.output).accuracies
        if accuracies is not None:
            dense, pruned = accuracies
            text = f"\naccuracy on these inputs: {dense:.2%} dense, {pruned:.2%} pruned"
    return ok, f"{cert}{text}", values
