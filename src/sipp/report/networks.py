"""The facts on a pruned network for its page, read from the folder of `sipp prune`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import sipp
from sipp.files import RECORD_NAME, read_file
from sipp.report.palette import REPAIRED, SEPARATOR
from sipp.results import (
    AccuracyCertificate,
    AnyCertificate,
    Bench,
    Certificate,
    Evaluation,
    Pruned,
    SavedNetwork,
    TextScores,
    from_json,
)

Measurement = AnyCertificate | Evaluation | TextScores | Bench  # of a network; a file in its folder
Kind = TypeVar("Kind", bound=Measurement)
KINDS = {kind.__name__: kind for kind in (Certificate, AccuracyCertificate, Evaluation, TextScores, Bench)}
SEVERAL_CLAIMS = (
    "{} of these certificates rest on the same holdout. Each holds at its own confidence, all of them together, or the "
    "best of them, at less."
)


@dataclass(frozen=True)
class PrunedModel:
    """A pruned network, from a folder or from Python, and what was measured and certified about it."""

    name: str
    record: SavedNetwork
    measured: Mapping[str, Measurement] = field(default_factory=dict)  # by file: of `sipp eval`, `certify` and `bench`
    notes: tuple[str, ...] = ()  # warnings: what could not be read
    folder: Path | None = None  # as given; None: from Python

    @property
    def pruned(self) -> Pruned:
        assert self.record.pruned is not None
        return self.record.pruned

    @property
    def arm(self) -> str:
        """Its label in comparisons: the method, and whether it was repaired."""
        method = self.pruned.method
        return method if self.pruned.repair is None else f"{method}{SEPARATOR}{REPAIRED}"

    def known(self, kind: type[Kind]) -> list[Kind]:
        """Everything of this kind that was measured or certified."""
        certificate = self.record.certificate
        return [one for one in (certificate, *self.measured.values()) if isinstance(one, kind)]

    @property
    def certificates(self) -> list[AnyCertificate]:
        """The certificate from `sipp prune`, then those from `sipp certify`."""
        return [*self.known(Certificate), *self.known(AccuracyCertificate)]

    @property
    def bench(self) -> Bench | None:
        """Size and speed."""
        return next(iter(self.known(Bench)), None)

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation with an accuracy (if any) on the most inputs."""
        return max(self.known(Evaluation), key=lambda one: (one.accuracies is not None, one.n_inputs), default=None)

    @property
    def text_scores(self) -> TextScores | None:
        """The perplexity of a language model, on the most text."""
        return max(self.known(TextScores), key=lambda one: one.n_tokens, default=None)

    @property
    def accuracies(self) -> tuple[float, float, str] | None:
        """The accuracy before and after pruning, and on which inputs; of a certificate if nothing else measured it."""
        if self.evaluation is not None and self.evaluation.accuracies is not None:
            return (*self.evaluation.accuracies, self.evaluation.inputs)
        found = (claim.accuracies for claim in self.known(AccuracyCertificate) if claim.accuracies is not None)
        return next(((*accuracies, "the inputs of the certificate") for accuracies in found), None)

    @property
    def moved(self) -> float | None:
        """The change of the output on a few calibration inputs; None if unknown, or not finite."""
        moved = self.pruned.moved
        return None if moved is None or not math.isfinite(moved.error) else moved.error

    @property
    def certified_output(self) -> Certificate | None:
        """The certificate on the output; the weakest of several, since the best of several is not a claim."""
        claims = [claim for claim in self.known(Certificate) if claim.measure == "output" and claim.limit is not None]
        return max(claims, key=lambda claim: claim.epsilon, default=None)

    @property
    def certified_error(self) -> float | None:
        """The certified error of the output."""
        return None if self.certified_output is None else self.certified_output.limit

    @property
    def certified_drop(self) -> AccuracyCertificate | None:
        """The certificate on the accuracy; the weakest of several."""
        return max(self.known(AccuracyCertificate), key=lambda claim: claim.drop_upper, default=None)


def shared_holdout(models: Iterable[PrunedModel]) -> str:
    """A sentence if several certificates of these networks rest on the same holdout, else empty."""
    holdouts = Counter(claim.data_hash for model in models for claim in model.certificates)
    n_claims = max(holdouts.values(), default=0)
    return SEVERAL_CLAIMS.format(n_claims) if n_claims > 1 else ""


def read_pruned_result(folder: Path) -> PrunedModel:
    """Reads the pruned network in a folder of `sipp prune`, and what was measured and certified about it."""
    own, notes = sipp.inspect(folder), list[str]()
    measured: dict[str, Measurement] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == RECORD_NAME:
            continue
        try:
            values = json.loads(read_file(path))
            kind = KINDS.get(str(values.get("kind"))) if isinstance(values, dict) else None
            found = None if kind is None else from_json(kind, values, path.name)
        except ValueError as error:
            notes.append(f"{path.name} could not be read ({error}).")
            continue
        if found is None:  # some other file
            continue
        dense = getattr(found, "dense_hash", own.dense_hash)
        if found.pruned_hash == own.pruned_hash and own.dense_hash in (None, dense):
            measured[path.name] = found
        else:
            notes.append(f"{path.name} is about other networks and is not shown.")
    return PrunedModel(folder.resolve().name, own, measured, tuple(notes), folder)
