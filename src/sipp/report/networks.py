"""What a page knows about a pruned network, and how it is read from the folder of `sipp prune`.

Errors name the file and line; missing values are never guessed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sipp.files import RECORD_NAME, read_file, read_json
from sipp.report.palette import REPAIRED, SEPARATOR
from sipp.results import (
    AccuracyCertificate,
    AnyCertificate,
    Bench,
    Certificate,
    Evaluation,
    Identity,
    Pruned,
    TextScores,
    from_json,
)
from sipp.storage import is_pruned_folder, read_pruned

Measurement = AnyCertificate | Evaluation | TextScores | Bench  # of a network; a file in its folder
KINDS: dict[str, tuple[str, Any]] = {
    **{kind.__name__: ("a certificate", kind) for kind in (Certificate, AccuracyCertificate)},
    **{kind.__name__: ("an evaluation", kind) for kind in (Evaluation, TextScores)},
    Bench.__name__: ("a benchmark", Bench),
}
SEVERAL_CLAIMS = (
    "{} of these certificates rest on the same holdout. Each holds at its own confidence, all of them together, or the "
    "best of them, at less."
)


@dataclass(frozen=True)
class PrunedModel:
    """A pruned network, from a folder or from Python, and what was measured and certified about it."""

    name: str
    pruned: Pruned
    identity: Identity
    rest: Mapping[str, Any] = field(default_factory=dict)  # what else its report says
    notes: tuple[str, ...] = ()  # warnings: what could not be checked
    bench: Bench | None = None  # size and speed, from `sipp bench`
    certificates: Mapping[str, AnyCertificate] = field(default_factory=dict)  # from `sipp certify --out`
    evaluations: Mapping[str, Evaluation | TextScores] = field(default_factory=dict)  # from `sipp eval --out`
    folder: Path | None = None  # as given; None: from Python

    @property
    def arm(self) -> str:
        """Its label in comparisons: the method, and whether it was repaired."""
        method = self.pruned.method
        return method if self.pruned.repair is None else f"{method}{SEPARATOR}{REPAIRED}"

    @property
    def output_change(self) -> float | None:
        """How far the output moved on a few calibration points; None if unknown, or not finite."""
        moved = self.pruned.moved
        return None if moved is None or not math.isfinite(moved.error) else moved.error

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation with an accuracy (if any) on the most inputs."""
        known = [measured for measured in self.evaluations.values() if isinstance(measured, Evaluation)]
        return max(known, key=lambda measured: (measured.accuracies is not None, measured.n_inputs), default=None)

    @property
    def text_scores(self) -> TextScores | None:
        """The perplexity of a language model, on the most text."""
        known = [measured for measured in self.evaluations.values() if isinstance(measured, TextScores)]
        return max(known, key=lambda measured: measured.n_tokens, default=None)

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """The accuracy before and after pruning, by that evaluation or by a certificate that was made from labels."""
        if self.evaluation is not None and self.evaluation.accuracies is not None:
            return self.evaluation.accuracies
        claims = (claim for claim in self.all_certificates if isinstance(claim, AccuracyCertificate))
        return next((claim.accuracies for claim in claims if claim.accuracies is not None), None)

    @property
    def measured_on(self) -> str:
        """The inputs of these accuracies, in words."""
        if self.evaluation is not None and self.evaluation.accuracies is not None:
            return self.evaluation.inputs
        return "the inputs of the certificate"

    @property
    def certified_error(self) -> float | None:
        """The certified error of the output; the largest of several, since the best of several is not a claim."""
        claims = [claim for claim in self.all_certificates if isinstance(claim, Certificate)]
        limits = [claim.limit for claim in claims if claim.measure == "output"]
        return max((limit for limit in limits if limit is not None), default=None)

    @property
    def certified_drop(self) -> AccuracyCertificate | None:
        """The certificate on accuracy; the weakest of several."""
        known = [claim for claim in self.all_certificates if isinstance(claim, AccuracyCertificate)]
        return max(known, key=lambda claim: claim.drop_upper, default=None)

    @property
    def all_certificates(self) -> list[AnyCertificate]:
        """The certificate from `sipp prune`, then those from `sipp certify`."""
        first = [] if self.identity.certificate is None else [self.identity.certificate]
        return [*first, *self.certificates.values()]


def shared_holdout(models: Iterable[PrunedModel]) -> str:
    """A sentence if several certificates of these networks rest on the same holdout, else empty."""
    holdouts = Counter(claim.data_hash for model in models for claim in model.all_certificates)
    n_claims = max(holdouts.values(), default=0)
    return SEVERAL_CLAIMS.format(n_claims) if n_claims > 1 else ""


def is_pruned_result(folder: Path) -> bool:
    """Whether this is a folder of a pruned network, intact or not."""
    return is_pruned_folder(folder)


def read_pruned_result(folder: Path) -> PrunedModel:
    """Reads the pruned network in a folder of `sipp prune`, and what was measured and certified about it."""
    report = read_pruned(folder)
    notes: tuple[str, ...] = (report.note,) if report.note else ()
    found: dict[str, Measurement] = {}
    for path in sorted(folder.glob("*.json")):
        measured, note = (None, "") if path.name == RECORD_NAME else _read_measurement(path, report.identity)
        notes += (note,) if note else ()
        found |= {} if measured is None else {path.name: measured}
    benches = [measured for measured in found.values() if isinstance(measured, Bench)]
    claims = {name: claim for name, claim in found.items() if isinstance(claim, Certificate | AccuracyCertificate)}
    evaluations = {name: measured for name, measured in found.items() if isinstance(measured, Evaluation | TextScores)}
    name, last = folder.resolve().name, benches[-1] if benches else None
    return PrunedModel(name, report.pruned, report.identity, report.rest, notes, last, claims, evaluations, folder)


def _read_measurement(path: Path, identity: Identity) -> tuple[Measurement | None, str]:
    """The certificate, evaluation or benchmark in a file, if it is intact and about this network; and a note."""
    what = "a record"
    try:
        values = json.loads(read_file(path))
        if not isinstance(values, dict) or "pruned_hash" not in values:
            return None, ""  # some other file
        kind = str(values.get("kind"))
        what, schema = KINDS.get(kind, ("a record", None))
        if schema is None:
            return None, ""
        measured = from_json(schema, values if what == "a certificate" else read_json(path), path)
    except (OSError, ValueError, RecursionError):
        return None, f"{path.name} cannot be read as {what}."
    dense_hash = values.get("dense_hash", identity.dense_hash)
    if values["pruned_hash"] != identity.pruned_hash or identity.dense_hash not in (None, dense_hash):
        return None, f"{path.name} is {what} for other networks and is not shown."
    return measured, ""
