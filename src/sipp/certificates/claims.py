"""Held-out certificates: two networks and fresh points in, a frozen statement of what the pruning costs out (T14, T16).

A certificate needs no assumption on the networks, only that the holdout points are independent draws from the source of
future inputs and were used neither for training nor for calibration. What can be checked of that is checked by content
hash; what was not checked is recorded as not checked. Copies of a point prove nothing: different points are counted. A
point is one index of dimension 0 of every input tensor, and the output at it must be a function of that point alone,
which is tried on the first, the largest and the last batch.

Data (holdout, calibration): one tensor of points, a torch Dataset, or an iterable of batches; a batch is a tensor,
(inputs, labels), or a dict of tensors passed as keywords, and inputs may itself be a tuple or a dict of tensors. The
positions that an `attention_mask` or a `*padding_mask` of a dict batch calls padding are neither content nor output.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sipp.binomial import certified_epsilon, n_violations
from sipp.certificates.evidence import CALLABLE, look
from sipp.certificates.ledger import WALK, ledger_lines, n_uses
from sipp.certificates.record import AccuracyCertificate, AnyCertificate, Certificate, from_json, to_json
from sipp.certificates.running import Output
from sipp.checking import check_choice, check_flag, check_number, check_share
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.labels import truth_of
from sipp.inputs.network_hash import model_hash
from sipp.pruning.walked import Given
from sipp.records import Batch

__all__ = [
    "AccuracyCertificate",
    "Certificate",
    "Verification",
    "certify",
    "certify_accuracy",
    "from_json",
    "model_hash",
    "point_ratios",
    "relative_errors",
    "to_json",
    "verify",
]

HISTORY = ("calibration_checked", "ledger_kept", "prior_uses")  # of a certificate: what was done besides looking
VERIFY_TOLERANCE = 1e-5  # of ratios: float32 networks on two machines differ by rounding


@torch.inference_mode(False)
def certify(
    dense: nn.Module,
    pruned: Given,
    holdout: Any,
    *,
    delta: float = 0.05,
    confidence: float = 0.95,
    epsilon: float | None = None,
    output: Output = None,
    calibration: Any = None,
    ledger: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Certificate:
    """A certificate of P(||f^(x) - f(x)|| <= epsilon ||f(x)||) >= 1 - delta at the confidence (T14).

    Without `epsilon` the smallest provable one is reported; with it, whether it holds, and the provable delta_hat.
    `pruned` is a network, or what `prune` or `prune_to` gave, with the points that chose it, as far as it knows: the
    holdout may hold none of them, nor any of `calibration`. `output` picks from tuple or dict outputs: an index, a key,
    or a function of the output. `ledger`: a JSON-lines file in which every look at these points is recorded.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.9, method="wt")
        >>> certificate = sipp.certify(net, pruned, torch.rand(500, 8), delta=0.05, confidence=0.95)
        >>> certificate.verdict, certificate.n, certificate.epsilon < 0.5
        ('certified', 500, True)
    """
    beta = 1.0 - check_share("confidence", confidence)
    check_share("delta", delta)
    if epsilon is not None:  # None asks for the smallest
        check_number("epsilon", epsilon, least=0)
    if ledger is not None:
        ledger_lines(ledger)
    found = look(
        dense,
        pruned,
        holdout,
        lambda f, g, _: point_ratios(f, g),
        output,
        calibration,
        ledger=ledger,
        claim="output",
        finest=epsilon,
        progress=check_flag("progress", progress),
    )
    reached = epsilon
    if reached is None:
        reached = float(certified_epsilon(found.measured, delta, beta, n=found.evidence["n"]))
    return Certificate(
        fixed="delta" if epsilon is None else "epsilon",
        epsilon=float(reached),
        delta=float(delta),
        confidence=float(confidence),
        violations=int(n_violations(found.measured, reached)),
        **found.evidence,
    )


@torch.inference_mode(False)
def certify_accuracy(
    dense: nn.Module,
    pruned: Given,
    holdout: Any,
    *,
    confidence: float = 0.95,
    labels: Literal["auto", "use", "ignore"] = "auto",
    output: Output = None,
    calibration: Any = None,
    ledger: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> AccuracyCertificate:
    """A certificate of accuracy(dense) - accuracy(pruned) <= drop_upper at the confidence (T16).

    `labels="auto"` uses labels where the batches carry them (the record's `mode` says which); outputs are n x classes.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.9, method="wt")
        >>> holdout = [(torch.rand(500, 8), torch.randint(0, 4, (500,)))]
        >>> certificate = sipp.certify_accuracy(net, pruned, holdout, confidence=0.95)
        >>> certificate.mode, 0 < certificate.drop_upper < 0.2
        ('labels', True)
    """
    check_share("confidence", confidence)
    check_choice("labels", labels, ("auto", "use", "ignore"))
    if ledger is not None:
        ledger_lines(ledger)
    found = look(
        dense,
        pruned,
        holdout,
        lambda f, g, batch: outcomes_of(f, g, batch, labels),
        output,
        calibration,
        ledger=ledger,
        claim="accuracy",
        drops_padding=False,  # n x classes: a class is no position
        progress=check_flag("progress", progress),
    )
    lost, gained, differ, labelled = outcome_counts(found.measured, found.draws)
    if labelled not in (0, len(found.draws)) or (labels == "use" and labelled == 0):
        raise DataError(
            f"{labelled} of {len(found.draws)} holdout points have labels",
            fix="give (inputs, labels) batches throughout, or labels='ignore' for the bound that needs none",
        )
    return AccuracyCertificate(
        mode="labels" if labelled else "label-free",
        confidence=float(confidence),
        n_lost=lost,
        n_gained=gained,
        n_differ=differ,
        **found.evidence,
    )


def relative_errors(dense: nn.Module, pruned: nn.Module, holdout: Any, *, output: Output = None) -> Tensor:
    """The n ratios ||f^(x) - f(x)|| / ||f(x)|| in float64, +inf where undefined."""
    return look(dense, pruned, holdout, lambda f, g, _: point_ratios(f, g), output, None).measured


def point_ratios(dense_out: Tensor, pruned_out: Tensor) -> Tensor:
    """||f^ - f|| / ||f|| per point (n x ... -> n, float64), such that ratio > epsilon is the violation Z of T14.

    0 where f^ = f, also for f = 0; +inf for f = 0 != f^ and for anything not finite. Rounded up to the next float64
    where ratio * ||f|| < ||f^ - f||, so that the reported epsilon always satisfies the inequality it stands for.
    """
    n = dense_out.shape[0]
    f, g = dense_out.double().reshape(n, -1), pruned_out.double().reshape(n, -1)
    error, size = _norms(g - f), _norms(f)
    ratio = torch.where(error == 0, torch.zeros_like(error), error / size)
    ratio = torch.where(ratio * size < error, torch.nextafter(ratio, torch.full_like(ratio, math.inf)), ratio)
    # An overflowing norm would make the quotient 0: it counts as not finite, like the outputs themselves.
    finite = f.isfinite().all(dim=1) & g.isfinite().all(dim=1) & error.isfinite() & size.isfinite()
    return torch.where(finite, ratio, torch.full_like(ratio, math.inf))


def _norms(rows: Tensor) -> Tensor:
    """L2 norm of each row, scaled by its largest entry so that squares neither overflow nor vanish."""
    largest = rows.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    return scale * torch.linalg.vector_norm(rows / scale[:, None], dim=1)


def outcomes_of(f: Tensor, g: Tensor, batch: Batch, labels: str) -> Tensor:
    """n x 4 counts per point: dense right and pruned wrong, the reverse, classes differ, has a label (T16).

    Not finite: the pruned network counts as wrong and the dense one as right, which can only raise the limit.
    """
    if f.dim() != 2 or f.shape[1] < 2:
        raise ModelError(
            f"outputs are {tuple(f.shape)}, accuracy needs n x classes",
            where=batch.where,
            fix="select with output=",
            option="output",
        )
    f_fine, g_fine = f.isfinite().all(dim=1), g.isfinite().all(dim=1)
    f_class, g_class = f.argmax(dim=1), g.argmax(dim=1)
    differ = (f_class != g_class) | ~f_fine | ~g_fine
    if batch.labels is None or labels == "ignore":
        none = torch.zeros_like(differ)
        return torch.stack([none, none, differ, none], dim=1).long()
    found = truth_of(batch.labels, len(f), f.shape[1])
    if found.classes_n is None:
        raise DataError(found.why, where=batch.where, fix="give class numbers or one-hot rows, or leave labels out")
    truth = found.classes_n.to(f.device)
    if ((truth < 0) | (truth >= f.shape[1])).any():
        raise DataError(
            f"a label lies outside 0 .. {f.shape[1] - 1}", where=batch.where, fix="drop such points or map them first"
        )
    f_right, g_right = (f_class == truth) | ~f_fine, (g_class == truth) & g_fine
    return torch.stack([f_right & ~g_right, ~f_right & g_right, differ, torch.ones_like(differ)], dim=1).long()


def outcome_counts(outcomes: Tensor, draws: Sequence[bytes]) -> tuple[int, int, int, int]:
    """The sums of `outcomes_of` over all points; of those that gained, each different one that gained at every copy."""
    lost, _, differ, labelled = (int(count) for count in outcomes.sum(dim=0))
    by_gain: dict[bool, set[bytes]] = {False: set(), True: set()}
    for key, gained in zip(draws, outcomes[:, 1].tolist(), strict=True):
        by_gain[bool(gained)].add(key)
    return lost, len(by_gain[True] - by_gain[False]), differ, labelled


@dataclass(frozen=True)
class Verification:
    """What a second look at a certificate found: whether it holds, what differs, and what had to be believed."""

    ok: bool
    reasons: tuple[str, ...]  # what differs from the networks, the points, the calibration or the ledger
    unchecked: tuple[str, ...]  # what the certificate says and no file can show again

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = ["verified" if self.ok else "not verified:", *self.reasons]
        return "\n".join(lines + [f"believed, not checked: {one}" for one in self.unchecked])


def verify(
    cert: AnyCertificate,
    dense: nn.Module,
    pruned: nn.Module,
    holdout: Any,
    *,
    output: Output = None,
    calibration: Any = None,
    ledger: str | os.PathLike[str] | None = None,
    tolerance: float = VERIFY_TOLERANCE,
) -> Verification:
    """Whether the same networks on the same points give this certificate again, what differs, what was only believed.

    `output` is needed only where the certificate was made with a function. Ratios may differ by tolerance * max(1,
    epsilon), hashes and counts not at all. With `calibration` those points are compared with the holdout again; with
    `ledger` (which is only read) the uses of the holdout are counted again. What has no such witness is listed as
    unchecked: that the points are new, what was chosen before they were looked at, flags without their files.
    """
    if output is None:
        if isinstance(cert.output, str) and cert.output.startswith(CALLABLE):
            raise OptionError(
                f"the certificate compared the output of {cert.output!r}",
                fix="pass that function as output=",
                option="output",
            )
        output = cert.output
    if calibration is not None and isinstance(holdout, Iterator):
        holdout = list(holdout)  # it may be gone through twice
    try:
        evidence, reasons = _look_again(cert, dense, pruned, holdout, output, calibration, tolerance)
    except DataError as error:
        if calibration is None:
            raise
        evidence, reasons = _look_again(cert, dense, pruned, holdout, output, None, tolerance)
        reasons.append(f"calibration_checked: {error}")
    reasons += _contradictions(cert)
    for name, value in evidence.items():
        written = getattr(cert, name)
        if name not in HISTORY and written != value:
            reasons.append(f"{name}: the certificate says {written!r}, now it is {value!r}")
    unchecked = _believed(cert)
    if not (cert.calibration_checked and calibration is not None):
        why = "yes: give the calibration points" if cert.calibration_checked else "no: it claims nothing about them"
        unchecked.append(f"calibration_checked: the certificate says {why}")
    if ledger is None or not cert.ledger_kept:
        why = f"{cert.prior_uses} uses before: give the ledger" if cert.ledger_kept else "none was kept: not known"
        unchecked.append(f"ledger_kept, prior_uses: the certificate says {why}")
    else:
        differ, unsure = _compare_uses(cert, ledger)
        reasons, unchecked = reasons + differ, unchecked + unsure
    return Verification(not reasons, tuple(reasons), tuple(unchecked))


def _look_again(
    cert: AnyCertificate,
    dense: nn.Module,
    pruned: nn.Module,
    holdout: Any,
    output: Output,
    calibration: Any,
    tolerance: float,
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a certificate made now, and why ratios, if any, do not give the old one."""
    if isinstance(cert, Certificate):
        found = look(dense, pruned, holdout, lambda f, g, _: point_ratios(f, g), output, calibration)
        return found.evidence, _compare_ratios(cert, found.measured, tolerance)
    labels: Literal["use", "ignore"] = "use" if cert.mode == "labels" else "ignore"
    options: dict[str, Any] = {"labels": labels, "output": output, "calibration": calibration}
    again = certify_accuracy(dense, pruned, holdout, confidence=cert.confidence, progress=False, **options)
    return {field.name: getattr(again, field.name) for field in fields(again)}, []


def _contradictions(cert: AnyCertificate) -> list[str]:
    """Why a record, which need not come from `from_json`, cannot be a certificate."""
    try:
        from_json(to_json(cert))
    except DataError as error:
        return [str(error)]
    return []


def _believed(cert: AnyCertificate) -> list[str]:
    """What no second look can show: the past."""
    first = "epsilon, delta" if isinstance(cert, Certificate) and cert.fixed == "epsilon" else "delta"
    chosen = f"fixed, {first}, confidence" if isinstance(cert, Certificate) else "mode, confidence"
    lines = [
        "data_hash: that the points are independent draws, and new to both networks",
        f"{chosen}: that they were chosen before the points were looked at",
    ]
    if isinstance(cert.output, str) and cert.output.startswith(CALLABLE):
        lines.append("output: that the function of this name is the one that was used")
    return lines


def _compare_uses(cert: AnyCertificate, ledger: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Why this ledger does not show the certificate's claim and the uses before it; what it leaves open."""
    if not os.path.isfile(ledger):
        raise DataError(f"ledger {os.fspath(ledger)!r} is no file", fix="give the one that was kept, or none")
    lines = ledger_lines(ledger)
    kind = "output" if isinstance(cert, Certificate) else "accuracy"
    points = {name: getattr(cert, name) for name in ("data_hash", "dense_hash", "n")}
    claims = ((kind, cert.pruned_hash), (WALK, None))
    places = [
        i
        for i, line in enumerate(lines)
        if (line.get("claim"), line.get("pruned_hash")) in claims and points.items() <= line.items()
    ]
    if not places:
        return ["ledger_kept: the ledger holds no such claim"], []
    before = [n_uses(lines[:i], lines[i]) for i in places]
    found = " or ".join(map(str, before))
    told = f"prior_uses: the certificate says {cert.prior_uses}, the ledger has {found} before this claim"
    if cert.prior_uses not in before:
        return [told], []
    return [], [told] if len(before) > 1 else []  # one claim made twice: which of its lines is this one's?


def _compare_ratios(cert: Certificate, ratios: Tensor, tolerance: float) -> list[str]:
    """The reasons, if any, why these ratios do not give the certificate's epsilon and violations."""
    slack = tolerance * max(1.0, cert.epsilon) if math.isfinite(cert.epsilon) else 0.0
    reasons = []
    if cert.fixed == "delta":
        epsilon = float(certified_epsilon(ratios, cert.delta, 1.0 - cert.confidence, n=cert.n))
        if epsilon != cert.epsilon and not abs(epsilon - cert.epsilon) <= slack:
            reasons.append(f"epsilon: the certificate says {cert.epsilon!r}, now it is {epsilon!r}")
    # Points within rounding of epsilon may fall on either side of it.
    fewest, most = (int(n_violations(ratios, cert.epsilon + side)) for side in (slack, -slack))
    if cert.fixed == "delta" and math.isfinite(cert.epsilon):
        most -= 1  # epsilon is the ratio of a point, which is no violation of it
    if not fewest <= cert.violations <= most:
        reasons.append(f"violations: the certificate says {cert.violations}, now {fewest} to {most}")
    return reasons
