"""Turns measured outputs into certificates (T14, T16), and tests them against a tolerance (T15)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sipp.certificates.evidence import MeasuredOutputs
from sipp.certificates.measures import Labels, MeasureFunction, measure_of, measure_of_classes, outcome_counts
from sipp.errors import DataError, OptionError
from sipp.records.binomial import (
    certified_epsilon,
    drop_limit,
    holdout_needed,
    k_allowed,
    n_violations,
    share_limit,
)
from sipp.records.certificate import AccuracyCertificate, AnyCertificate, Certificate, Measure
from sipp.records.checking import check_drop, check_number, check_share
from sipp.records.display import exactly, percent


def output_claim(
    outputs: MeasuredOutputs, *, epsilon: float | None, delta: float, confidence: float, measure: Measure
) -> Certificate:
    """The certificate that follows from measured output errors (T14)."""
    limit = epsilon
    if limit is None:
        limit = float(certified_epsilon(outputs.measured, delta, 1.0 - confidence, n=outputs.evidence["n"]))
    return Certificate(
        fixed="delta" if epsilon is None else "epsilon",
        epsilon=float(limit),
        delta=float(delta),
        confidence=float(confidence),
        violations=int(n_violations(outputs.measured, limit)),
        measure=measure,
        **outputs.evidence,
    )


def accuracy_claim(outputs: MeasuredOutputs, *, confidence: float, labels: Labels) -> AccuracyCertificate:
    """The certificate that follows from measured outcomes (T16)."""
    lost, gained, differ, labelled = outcome_counts(outputs.measured, outputs.draws)
    if labelled not in (0, len(outputs.draws)) or (labels == "use" and labelled == 0):
        raise DataError(
            f"{labelled} of {len(outputs.draws)} holdout inputs have labels",
            fix="give (inputs, labels) batches throughout, or labels='ignore' for the bound that needs none",
        )
    return AccuracyCertificate(
        mode="labels" if labelled else "label-free",
        confidence=float(confidence),
        n_lost=lost,
        n_gained=gained,
        n_differ=differ,
        measure="next-token" if outputs.measured.is_floating_point() else "class",  # sums of shares, or counts
        **outputs.evidence,
    )


@dataclass(frozen=True)
class Tolerance:
    """The loss that a caller accepts, and its test: what to measure of each point, and which counts prove the claim."""

    measure: MeasureFunction
    check: Callable[[Tensor, str], None]  # (measurements, role of the data): raises if some points lack labels
    # (measurements, keys that copies share, number of distinct points) -> bad points, proved limit, passed
    judge: Callable[[Tensor, list[bytes], int], tuple[int, float, bool]]
    certificate: Callable[[MeasuredOutputs], AnyCertificate]
    holds: Callable[[AnyCertificate], bool]  # whether a certificate proves the claim
    drops_padding: bool  # padding positions of the output are not compared
    n_needed: int  # distinct points without which nothing can be proved
    words: str


def tolerance_of(epsilon: float | None, max_drop: float | None, delta: float, confidence: float) -> Tolerance:
    """The tolerance that was asked for: of the output (`epsilon`), or of the accuracy (`max_drop`)."""
    if (epsilon is None) == (max_drop is None):
        raise OptionError("give exactly one of epsilon (relative error of the output) and max_accuracy_drop")
    if epsilon is not None:
        return _output_tolerance(epsilon, delta, confidence)
    assert max_drop is not None
    return _accuracy_tolerance(max_drop, confidence)


def _output_tolerance(epsilon: float, delta: float, confidence: float) -> Tolerance:
    check_share("delta", delta)
    beta, most = 1.0 - confidence, check_number("epsilon", epsilon, least=0)

    def judge(ratios: Tensor, _: list[bytes], n: int) -> tuple[int, float, bool]:
        count, allowed = int(n_violations(ratios, most)), k_allowed(n, delta, beta)
        return count, share_limit(count, n, beta), allowed is not None and count <= allowed

    def holds(cert: AnyCertificate) -> bool:
        return isinstance(cert, Certificate) and cert.verdict == "certified" and cert.epsilon <= most

    return Tolerance(
        measure=measure_of("output"),
        check=lambda ratios, role: None,
        judge=judge,
        certificate=partial(output_claim, epsilon=most, delta=delta, confidence=confidence, measure="output"),
        holds=holds,
        drops_padding=True,
        n_needed=holdout_needed(delta, beta),
        words=f"relative output error <= {exactly(epsilon)} for all but {percent(delta)} of inputs, confidence "
        f"{percent(confidence)}",
    )


def _accuracy_tolerance(max_drop: float, confidence: float) -> Tolerance:
    beta, most = 1.0 - confidence, check_drop("max_accuracy_drop", max_drop)

    def check(outcomes: Tensor, role: str) -> None:
        labelled, n_points = int(outcomes[:, 3].sum()), len(outcomes)
        if labelled not in (0, n_points):
            raise DataError(
                f"{labelled} of {n_points} {role} inputs have labels", fix="give labels throughout, or none"
            )

    def judge(outcomes: Tensor, draws: list[bytes], n: int) -> tuple[int, float, bool]:
        lost, gained, differ, labelled = outcome_counts(outcomes, draws)
        risk = beta / math.e if outcomes.is_floating_point() else beta  # sums of shares of positions (T22)
        if labelled:
            limit = drop_limit(lost, gained, n, risk, n_copies=len(outcomes) - n)
        else:
            limit = share_limit(differ, n, risk)
        return lost if labelled else differ, limit, limit <= most

    def holds(cert: AnyCertificate) -> bool:
        return isinstance(cert, AccuracyCertificate) and cert.drop_upper <= most

    return Tolerance(
        measure=measure_of_classes("auto"),
        check=check,
        judge=judge,
        certificate=partial(accuracy_claim, confidence=confidence, labels="auto"),
        holds=holds,
        drops_padding=False,
        n_needed=1,
        words=f"accuracy drop <= {percent(max_drop)}, confidence {percent(confidence)}",
    )
