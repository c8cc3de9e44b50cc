"""Turns measured outputs into certificates (T14, T16), and tests them against a tolerance (T15)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sipp.certificates.evidence import MeasuredOutputs
from sipp.certificates.measures import Outcomes, outcome_counts, outcomes_of, point_ratios
from sipp.errors import DataError, OptionError
from sipp.inputs import Batch
from sipp.results import (
    SHARE,
    AccuracyCertificate,
    AnyCertificate,
    Certificate,
    Measure,
    check,
    holdout_needed,
    k_allowed,
    words,
)


def n_violations(ratios_n: Tensor, epsilon: float) -> Tensor:
    """How many relative errors along the last axis are not <= epsilon, or not finite."""
    return (~((ratios_n <= epsilon) & ratios_n.isfinite())).sum(-1)


def certified_epsilon(ratios_n: Tensor, share: float, beta: float, *, n: int | None = None) -> Tensor:
    """eps^ along the last axis: the (N - k*)-th smallest of N relative errors (T14); infinite if nothing is proved.

    k* is that of `n` distinct points; by default all N are distinct. NaN counts as infinite.

    With q the true (1 - share)-quantile of the errors, eps^ < q means that at most k* points reached q, although each
    does so with probability >= share: at most BinCDF(k*; n, share) <= beta. Choosing eps^ on the points costs nothing.
    """
    n_points = ratios_n.shape[-1]
    allowed = k_allowed(n_points if n is None else min(n, n_points), share, beta)
    if allowed is None:
        return torch.full_like(ratios_n[..., 0], torch.inf)
    return ratios_n.nan_to_num(nan=torch.inf, posinf=torch.inf).kthvalue(n_points - allowed).values


def output_claim(
    outputs: MeasuredOutputs, *, epsilon: float | None, share: float, confidence: float, measure: Measure
) -> Certificate:
    """The certificate that follows from measured output errors (T14)."""
    limit = epsilon
    if limit is None:
        limit = float(certified_epsilon(outputs.measured, share, 1.0 - confidence, n=outputs.evidence.n))
    return Certificate(
        fixed="share" if epsilon is None else "epsilon",
        epsilon=float(limit),
        share=float(share),
        confidence=float(confidence),
        violations=int(n_violations(outputs.measured, limit)),
        measure=measure,
        **asdict(outputs.evidence),
    )


def accuracy_claim(outputs: MeasuredOutputs, *, confidence: float) -> AccuracyCertificate:
    """The certificate that follows from measured outcomes (T16)."""
    outcomes = Outcomes(*outputs.measured.unbind(1))
    lost, gained, differ, labelled = outcome_counts(outcomes, outputs.hashes)
    if labelled not in (0, len(outputs.hashes)):
        raise DataError(
            f"{labelled} of {len(outputs.hashes)} inputs have labels",
            fix="give labels throughout, or none for the bound that needs none",
        )
    pruned_right = outcomes.dense_right - outcomes.lost + outcomes.gained
    return AccuracyCertificate(
        mode="labels" if labelled else "label-free",
        confidence=float(confidence),
        n_lost=lost,
        n_gained=gained,
        n_differ=differ,
        measure="next-token" if outcomes.are_sequences else "class",
        accuracies=(float(outcomes.dense_right.mean()), float(pruned_right.mean())) if labelled else None,
        **asdict(outputs.evidence),
    )


@dataclass(frozen=True)
class OutputTolerance:
    """Accepts outputs that are off by up to `epsilon`, and further off for a share `share` of inputs (T14)."""

    epsilon: float
    share: float
    confidence: float
    drops_padding: ClassVar[bool] = True  # padding positions of the output are not compared

    @property
    def n_needed(self) -> int:
        """The number of distinct points without which nothing can be proved."""
        return holdout_needed(self.share, 1.0 - self.confidence)

    @property
    def finest(self) -> float:
        """The error that a dependence on the batch must stay below."""
        return self.epsilon

    @property
    def words(self) -> str:
        inputs = f"for all but {words.percent(self.share)} of inputs, confidence {words.percent(self.confidence)}"
        return f"relative output error <= {words.exactly(self.epsilon)} {inputs}"

    def measure(self, f: Tensor, g: Tensor, _: Batch) -> Tensor:
        """The relative error of each output."""
        return point_ratios(f, g)

    def certificate(self, outputs: MeasuredOutputs) -> Certificate:
        return output_claim(
            outputs, epsilon=self.epsilon, share=self.share, confidence=self.confidence, measure="output"
        )

    def holds(self, cert: AnyCertificate) -> bool:
        """Whether a certificate proves the claim."""
        return isinstance(cert, Certificate) and cert.verdict == "certified" and cert.epsilon <= self.epsilon


@dataclass(frozen=True)
class AccuracyTolerance:
    """Accepts an accuracy that is lower by up to `max_drop` (T16)."""

    max_drop: float
    confidence: float
    drops_padding: ClassVar[bool] = False
    finest: ClassVar[None] = None  # an error that a dependence on the batch must stay below
    n_needed: ClassVar[int] = 1

    @property
    def words(self) -> str:
        return f"accuracy drop <= {words.percent(self.max_drop)}, confidence {words.percent(self.confidence)}"

    def measure(self, f: Tensor, g: Tensor, batch: Batch) -> Tensor:
        """Which outputs were right before and after, and which changed their class."""
        return outcomes_of(f, g, batch)

    def certificate(self, outputs: MeasuredOutputs) -> AccuracyCertificate:
        return accuracy_claim(outputs, confidence=self.confidence)

    def holds(self, cert: AnyCertificate) -> bool:
        """Whether a certificate proves the claim."""
        return isinstance(cert, AccuracyCertificate) and cert.drop_upper <= self.max_drop


Tolerance = OutputTolerance | AccuracyTolerance  # the loss that a caller accepts, and its test


def tolerance_of(epsilon: float | None, max_drop: float | None, share: float | None, confidence: float) -> Tolerance:
    """The tolerance that was asked for: of the output (`epsilon`, `share`), or of the accuracy (`max_drop`)."""
    if (epsilon is None) == (max_drop is None):
        raise OptionError("give exactly one of epsilon (relative error of the output) and max_accuracy_drop")
    if epsilon is not None:
        share = check.share("share", SHARE if share is None else share)
        return OutputTolerance(check.number("epsilon", epsilon, least=0), share, confidence)
    if share is not None:
        raise OptionError(
            "share is the share of inputs that may be further off than epsilon; an accuracy drop leaves none out",
            fix="leave share out, or give epsilon instead of max_accuracy_drop",
            option="share",
        )
    return AccuracyTolerance(
        check.share("max_accuracy_drop", max_drop, fix="max_accuracy_drop=0.02 is two percentage points"), confidence
    )
