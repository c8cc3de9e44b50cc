"""Claims about new inputs, and their test on a holdout, which gives a certificate (T14-T16)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sipp.certificates.compared_output import Output
from sipp.certificates.evidence import DenseOutputs, measure_outputs
from sipp.certificates.measures import Outcomes, measure_of, outcome_counts, outcomes_of
from sipp.errors import DataError, OptionError
from sipp.results import (
    SHARE,
    AccuracyCertificate,
    AnyCertificate,
    Certificate,
    Measure,
    NetworkLike,
    accuracy_claim,
    check,
    holdout_needed,
    k_allowed,
    output_claim,
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


@dataclass(frozen=True)
class OutputClaim:
    """Outputs are off by at most `epsilon`, but for a share `share` of inputs (T14)."""

    epsilon: float | None  # None: the smallest that can be certified
    share: float
    confidence: float
    kind: Measure = "output"  # what epsilon limits

    @property
    def n_needed(self) -> int:
        """The number of distinct points without which nothing can be proved."""
        return holdout_needed(self.share, 1.0 - self.confidence)

    @property
    def words(self) -> str:
        assert self.epsilon is not None
        return output_claim(words.percent(self.epsilon), self.share, self.confidence, self.kind)

    def test(
        self, dense: nn.Module, pruned: NetworkLike, holdout: Any, output: Output, calibration: Any, *,
        dense_outputs: DenseOutputs | None = None, progress: bool = False,
    ) -> Certificate:  # fmt: skip
        """The certificate that follows from the output errors on a holdout."""
        outputs = measure_outputs(
            dense, pruned, holdout, measure_of(self.kind), output, calibration,
            finest=self.epsilon if self.kind == "output" else None, dense_outputs=dense_outputs, progress=progress,
        )  # fmt: skip
        limit, ratios_n = self.epsilon, outputs.fields["ratio"]
        if limit is None:
            limit = float(certified_epsilon(ratios_n, self.share, 1.0 - self.confidence, n=outputs.evidence.n))
        return Certificate(
            fixed="share" if self.epsilon is None else "epsilon",
            epsilon=float(limit),
            share=float(self.share),
            confidence=float(self.confidence),
            violations=int(n_violations(ratios_n, limit)),
            measure=self.kind,
            **asdict(outputs.evidence),
        )

    def holds(self, cert: AnyCertificate) -> bool:
        """Whether a certificate proves the claim."""
        return isinstance(cert, Certificate) and cert.verdict == "certified"


@dataclass(frozen=True)
class AccuracyClaim:
    """The accuracy is lower by at most `max_drop` (T16)."""

    max_drop: float | None  # None: as little as can be certified
    confidence: float
    n_needed: ClassVar[int] = 1

    @property
    def words(self) -> str:
        assert self.max_drop is not None
        return accuracy_claim(words.change(self.max_drop, "the accuracy"), self.confidence)

    def test(
        self, dense: nn.Module, pruned: NetworkLike, holdout: Any, output: Output, calibration: Any, *,
        dense_outputs: DenseOutputs | None = None, progress: bool = False,
    ) -> AccuracyCertificate:  # fmt: skip
        """The certificate that follows from the outcomes on a holdout."""
        outputs = measure_outputs(
            dense, pruned, holdout, outcomes_of, output, calibration,
            drops_padding=False, dense_outputs=dense_outputs, progress=progress,  # a class is no position
        )  # fmt: skip
        outcomes = Outcomes(**outputs.fields)
        lost, gained, differ, labelled = outcome_counts(outcomes, outputs.hashes)
        if labelled not in (0, len(outputs.hashes)):
            raise DataError(
                f"only {labelled} of {len(outputs.hashes)} inputs have labels",
                fix="give labels throughout, or none for the bound that needs none",
            )
        dense_right = outcomes.dense_right.double()
        pruned_right = dense_right - outcomes.lost.double() + outcomes.gained.double()
        return AccuracyCertificate(
            mode="labels" if labelled else "label-free",
            confidence=float(self.confidence),
            n_lost=lost,
            n_gained=gained,
            n_differ=differ,
            measure="next-token" if outcomes.are_sequences else "class",
            accuracies=(float(dense_right.mean()), float(pruned_right.mean())) if labelled else None,
            **asdict(outputs.evidence),
        )

    def holds(self, cert: AnyCertificate) -> bool:
        """Whether a certificate proves the claim."""
        return isinstance(cert, AccuracyCertificate) and self.max_drop is not None and cert.drop_upper <= self.max_drop


def claim_of(
    epsilon: float | None, max_drop: float | None, share: float | None, confidence: float
) -> OutputClaim | AccuracyClaim:
    """The claim that was asked for: about the output (`epsilon`, `share`), or about the accuracy (`max_drop`)."""
    if (epsilon is None) == (max_drop is None):
        raise OptionError("give exactly one of epsilon (relative error of the output) and max_accuracy_drop")
    if epsilon is not None:
        share = check.share("share", SHARE if share is None else share)
        return OutputClaim(check.number("epsilon", epsilon, least=0), share, confidence)
    if share is not None:
        raise OptionError(
            "share is the share of inputs that may be further off than epsilon; an accuracy drop leaves none out",
            fix="leave share out, or give epsilon instead of max_accuracy_drop",
            option="share",
        )
    return AccuracyClaim(
        check.share("max_accuracy_drop", max_drop, fix="max_accuracy_drop=0.02 is two percentage points"), confidence
    )
