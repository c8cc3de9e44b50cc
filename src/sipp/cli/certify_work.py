"""Runs `sipp certify`: creates a certificate on a holdout, or verifies an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from torch import nn

import sipp
from sipp.certificates.evidence import holdout_data
from sipp.cli.commands.certify_command import CertifyRequest
from sipp.cli.data_option import Points, Reader, normalisation_lines
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.eval_work import evaluate
from sipp.cli.model_option import both_networks
from sipp.cli.out_option import check_ledger_option, check_out, write_out
from sipp.cli.output import Answer
from sipp.errors import DataError, OptionError
from sipp.report.results import PrunedModel, read_pruned_result
from sipp.results.certificate import AnyCertificate, from_json, to_json
from sipp.results.display import listed
from sipp.results.hashing import SeenPoints, seen_points, with_all_points
from sipp.results.schemas import PrunedRecord
from sipp.storage.outputs import RECORD_NAME, WEIGHTS_NAME
from sipp.storage.pruned_folder import is_pruned_folder
from sipp.verbs.certify import certify_accuracy
from sipp.verbs.verify import verify

MOST_TEXT = 1 << 20  # bytes of a certificate

Known = list[object] | SeenPoints | None  # calibration points, or a record of them


def run_certify(request: CertifyRequest) -> Answer:
    """Creates (and writes) or verifies a certificate, as requested."""
    _check(request)
    dense, pruned = both_networks(request.model, request.dense, request.pruned, request.device)
    reader = Reader(dense, request.model, request.inputs)
    fresh, seen = reader.holdout(request.holdout, request.points), None
    folder = _read_folder(request.pruned)
    recorded = None if folder is None else _points_seen(folder.record)
    known: Known = recorded
    if request.calibration is not None:
        seen = reader.draw(reader.open(request.calibration, option="--calibration"), None)
        known = seen.batches
        if recorded is not None:  # points recorded in the folder count too
            known = with_all_points(recorded, holdout_data(seen.batches, "calibration").keys())
    if request.verify is not None:
        ok, text, values = _verify(request, (dense, pruned), fresh, known)
    else:
        ok, text, values = _certify(request, (dense, pruned), fresh, known, folder)
    return Answer([text, *normalisation_lines(fresh, seen)], values, None if ok else typer.Exit(NOT_CERTIFIED))


def _read_folder(pruned: Path) -> PrunedModel | None:
    """Reads the folder of a pruned network, given itself or by its file of weights.

    None if it is another kind of folder, or its weights do not match its record.
    """
    folder = pruned.parent if pruned.name == WEIGHTS_NAME else pruned
    try:
        return read_pruned_result(folder) if folder.is_dir() and is_pruned_folder(folder) else None
    except DataError:
        return None


def _points_seen(record: PrunedRecord) -> SeenPoints | None:
    """The points used for pruning, if recorded by the same versions of sipp and torch."""
    is_same = (record.sipp, record.torch) == (sipp.__version__, str(torch.__version__))
    return seen_points(record.seen, is_all=record.seen_all) if record.seen and is_same else None


def _reuse_warning(request: CertifyRequest, folder: PrunedModel | None, certificate: AnyCertificate) -> str:
    """A warning if other certificates in the folder used the same points, else empty."""
    certificates = {} if folder is None else {RECORD_NAME: folder.record.certificate, **folder.certificates}
    replaced = None if request.out is None else request.out.resolve()
    names = [
        name
        for name, earlier in certificates.items()
        if earlier is not None and (earlier.model_extra or {}).get("data_hash") == certificate.data_hash
        and (request.pruned / name).resolve() != replaced
    ]  # fmt: skip
    if not names:
        return ""
    return (
        f"\nsecond use:  these inputs already served {listed(names)}; the confidence is that of each claim, for all of "
        "them together it is less"
    )


def _check(request: CertifyRequest) -> None:
    """Refuses contradictory options and unwritable outputs before any work."""
    if request.accuracy and request.epsilon is not None:
        raise OptionError("--accuracy and --epsilon exclude each other", fix="give only one of them")
    if request.accuracy and request.measure != "output":
        raise CommandError("--accuracy already measures next tokens", where="--measure", fix="leave one of them out")
    if request.verify is not None and (request.out is not None or request.accuracy or request.epsilon is not None):
        raise CommandError(
            "--out, --accuracy and --epsilon are for a new certificate, but --verify checks an old one",
            where=f"--verify {request.verify}",
            fix="leave them out",
        )
    reads = {f"--{name}": getattr(request, name) for name in ("pruned", "dense", "holdout", "calibration")}
    check_out(request.out, force=request.force, reads=reads)
    if request.verify is None:
        check_ledger_option(request.ledger, out=request.out)


def _verify(
    request: CertifyRequest, networks: tuple[nn.Module, nn.Module], fresh: Points, calibration: Known
) -> tuple[bool, str, object]:
    """Verifies an earlier certificate: (holds, text, values)."""
    assert request.verify is not None
    with naming_option(f"--verify {request.verify}", "give a certificate that `sipp certify --out` wrote"):
        certificate = from_json(_read_certificate(request.verify))
        verification = verify(
            certificate, *networks, fresh.batches, output=request.output, calibration=calibration, ledger=request.ledger
        )
    about = {"kind": "verification", "verified": verification.ok}
    return verification.ok, str(verification), about | {
        "reasons": verification.reasons, "unchecked": verification.unchecked
    }  # fmt: skip


def _certify(
    request: CertifyRequest,
    networks: tuple[nn.Module, nn.Module],
    fresh: Points,
    calibration: Known,
    folder: PrunedModel | None,
) -> tuple[bool, str, object]:
    """Creates a certificate of the relative error (T14) or the accuracy drop (T16), and writes it if it holds."""
    cert: AnyCertificate
    ok, text = True, ""
    with naming_option(f"--holdout {request.holdout}", "see sipp certify --help"):
        if request.accuracy:
            cert = certify_accuracy(
                *networks, fresh.batches, confidence=request.confidence, output=request.output, calibration=calibration,
                ledger=request.ledger,
            )  # fmt: skip
        else:
            cert = sipp.certify(
                *networks, fresh.batches, delta=request.delta, confidence=request.confidence, epsilon=request.epsilon,
                measure=request.measure, output=request.output, calibration=calibration, ledger=request.ledger,
            )  # fmt: skip
            ok = cert.verdict == "certified"
    if request.out is not None and ok:
        write_out(request.out, to_json(cert).encode(), force=request.force)
    if request.accuracy:
        accuracies = evaluate(*networks, fresh.batches, request.output).accuracies
        if accuracies is not None:
            dense, pruned = accuracies
            text = f"\naccuracy on these inputs: {dense:.2%} dense, {pruned:.2%} pruned"
    return ok, f"{cert}{text}{_reuse_warning(request, folder, cert)}", json.loads(to_json(cert))


def _read_certificate(path: Path) -> str:
    """Reads the text of a certificate."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_TEXT:
            raise OSError(f"it is not a plain file of at most {MOST_TEXT:,} bytes")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} could not be read ({error})", fix="give a certificate that `sipp certify --out` wrote"
        ) from error
