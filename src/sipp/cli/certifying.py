"""What `sipp certify` does: a certificate of two networks on held-out points, or a check of one made earlier."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import sipp
from sipp.cli.errors import Trouble, at
from sipp.cli.evaluating import evaluate
from sipp.cli.models import load_model, read_text, weights_read
from sipp.cli.options import output_of
from sipp.cli.points import Points, Role, check_fits, default_points, draw, images_lines, open_source, points_read
from sipp.records.certificate import AccuracyCertificate, Certificate, from_json, to_json
from sipp.storage.outputs import CERTIFICATE, check_file, check_ledger, write_file
from sipp.verbs.certify import certify_accuracy
from sipp.verbs.verify import verify


@dataclass(frozen=True, kw_only=True)
class CertifyRequest:
    """What the user asked for."""

    model: str
    dense: Path
    pruned: Path
    holdout: str
    delta: float
    confidence: float
    epsilon: float | None
    accuracy: bool
    calibration: str | None
    normalise: str | None
    output: str | None
    ledger: Path | None
    out: Path | None
    force: bool
    verify: Path | None
    points: int | None
    batch_size: int | None
    device: str


@dataclass(frozen=True)
class Answer:
    """What came of it: whether the claim holds, in words and as a record."""

    ok: bool
    text: str
    record: object


@dataclass(frozen=True)
class Material:
    """The networks, the points that are new to them, and the calibration points if they were given."""

    networks: tuple[nn.Module, nn.Module]
    fresh: Points
    seen: Points | None

    @property
    def calibration(self) -> list[object] | None:
        return None if self.seen is None else self.seen.batches


def answer(request: CertifyRequest) -> Answer:
    """The certificate, or what a check of one found; a new certificate is written where the request says."""
    _check(request)
    material = _load(request)
    return _certified(request, material) if request.verify is None else _verified(request, request.verify, material)


def _check(request: CertifyRequest) -> None:
    """Refuses what cannot be meant, and places that cannot be written, before any work."""
    if request.accuracy and request.epsilon is not None:
        raise Trouble("--accuracy and --epsilon are two claims", where="sipp certify", fix="give one of them")
    if request.verify is not None and (request.out is not None or request.accuracy or request.epsilon is not None):
        raise Trouble(
            "--out, --accuracy and --epsilon are for a new certificate, and --verify checks one",
            where=f"--verify {request.verify}",
            fix="leave them out",
        )
    reads = weights_read("--dense", request.dense) + weights_read("--pruned", request.pruned)
    reads += points_read("--holdout", request.holdout) + points_read("--calibration", request.calibration)
    if request.out is not None:
        with at(f"--out {request.out}", "give another file"):
            check_file(request.out, CERTIFICATE, force=request.force, inputs=reads)
    if request.ledger is not None and request.verify is None:
        with at(f"--ledger {request.ledger}", "allow reading and writing, or give another file"):
            check_ledger(request.ledger, out=request.out, inputs=reads)


def _load(request: CertifyRequest) -> Material:
    dense = load_model(request.model, request.dense, option="--dense", device=request.device)
    pruned = load_model(request.model, request.pruned, option="--pruned", device=request.device)
    fresh = _points(request, request.holdout, "--holdout", dense)
    seen = None if request.calibration is None else _points(request, request.calibration, "--calibration", dense)
    return Material((dense, pruned), fresh, seen)


def _points(request: CertifyRequest, spec: str, option: str, network: nn.Module) -> Points:
    """The points of a holdout (so many, or as many as `default_points` says) or of a calibration set (all)."""
    role: Role = "holdout" if option == "--holdout" else "calibration"
    source = open_source(spec, role, option, model=request.model, normalise=request.normalise)
    n_points = None
    if role == "holdout":
        n_points = request.points or default_points(source, role, lambda: 0)
    points = draw(source, n_points, seed=0, batch_size=request.batch_size, model=network)
    check_fits(network, points, request.model, option)
    return points


def _verified(request: CertifyRequest, path: Path, material: Material) -> Answer:
    """What checking the certificate again on these networks and points found."""
    with at(f"--verify {path}", "give a certificate that `sipp certify --out` wrote"):
        found = verify(
            from_json(read_text(path)),
            *material.networks,
            material.fresh.batches,
            output=output_of(request.output),
            calibration=material.calibration,
            ledger=request.ledger,
        )
    record = {"kind": "verification", "verified": found.ok, "reasons": found.reasons, "unchecked": found.unchecked}
    return Answer(found.ok, f"{found}{_images(material)}", record)


def _certified(request: CertifyRequest, material: Material) -> Answer:
    """The new certificate; it is written where it certifies something."""
    with at(f"--holdout {request.holdout}", "see sipp certify --help"):
        cert = _claim(request, material)
    ok = not isinstance(cert, Certificate) or cert.verdict == "certified"
    if request.out is not None and ok:
        with at(f"--out {request.out}", "give another file"):
            write_file(request.out, to_json(cert).encode(), CERTIFICATE, force=request.force)
    return Answer(ok, f"{cert}{_accuracies(request, material)}{_images(material)}", json.loads(to_json(cert)))


def _images(material: Material) -> str:
    return "".join(f"\n{line}" for line in images_lines(material.fresh, material.seen))


def _accuracies(request: CertifyRequest, material: Material) -> str:
    """A line with the accuracy of both networks on these points; empty where no accuracy is asked for, or known."""
    if not request.accuracy:
        return ""
    found = evaluate(*material.networks, material.fresh.batches, output_of(request.output))
    if found.dense_accuracy is None or found.pruned_accuracy is None:
        return ""
    return f"\naccuracy on these points: {found.dense_accuracy:.2%} dense, {found.pruned_accuracy:.2%} pruned"


def _claim(request: CertifyRequest, material: Material) -> Certificate | AccuracyCertificate:
    """The certificate of a relative error (T14), or of the accuracy drop (T16)."""
    if request.accuracy:
        return certify_accuracy(
            *material.networks,
            material.fresh.batches,
            confidence=request.confidence,
            output=output_of(request.output),
            calibration=material.calibration,
            ledger=request.ledger,
        )
    return sipp.certify(
        *material.networks,
        material.fresh.batches,
        delta=request.delta,
        confidence=request.confidence,
        epsilon=request.epsilon,
        output=output_of(request.output),
        calibration=material.calibration,
        ledger=request.ledger,
    )
