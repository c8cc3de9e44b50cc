"""`verify`: checks a certificate by measuring the same networks on the same points again (T14, T16)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from sipp.certificates.claims import accuracy_claim
from sipp.certificates.evidence import CALLABLE, measure_outputs
from sipp.certificates.ledger import ACCURACY, OUTPUT, WALK, ledger_lines, n_uses
from sipp.certificates.measures import measure_of, outcomes_of
from sipp.certificates.running import Output
from sipp.errors import DataError, OptionError
from sipp.results.binomial import certified_epsilon, n_violations
from sipp.results.certificate import AnyCertificate, Certificate, from_json, to_json
from sipp.results.pruned_to import NetworkLike
from sipp.results.shrunk import Shrunk
from sipp.results.verification import Verification

# Fields of a certificate that a new measurement cannot repeat.
HISTORY = ("calibration_checked", "ledger_kept", "prior_uses")
VERIFY_TOLERANCE = 1e-5  # of ratios: float32 networks on two machines differ by rounding


def verify(
    cert: AnyCertificate,
    dense: nn.Module,
    pruned: NetworkLike,
    holdout: Any,
    *,
    output: Output = None,
    calibration: Any = None,
    ledger: str | os.PathLike[str] | None = None,
    tolerance: float = VERIFY_TOLERANCE,
) -> Verification:
    """Checks whether the same networks on the same points give this certificate again.

    `output` is needed only if the certificate was made with a function. Ratios may differ by tolerance * max(1,
    epsilon), hashes and counts not at all. With `calibration`, these points are compared with the holdout again; with
    `ledger` (which is only read), the uses of the holdout are counted again. What cannot be checked is listed: that the
    points are new, that epsilon or delta was fixed before the holdout was used, and flags whose files are not given. A
    `Shrunk` network is measured like any other; its record names the network it was made from.
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
        holdout = list(holdout)  # it may be read twice
    try:
        evidence, reasons = _measured_again(cert, dense, pruned, holdout, output, calibration, tolerance)
    except DataError as error:
        if calibration is None:
            raise
        evidence, reasons = _measured_again(cert, dense, pruned, holdout, output, None, tolerance)
        reasons.append(f"calibration_checked: {error}")
    reasons += _contradictions(cert)
    smaller = isinstance(pruned, Shrunk) and pruned.hash_before == cert.pruned_hash and pruned.is_as_made
    for name, value in evidence.items():
        written = getattr(cert, name)
        if smaller and name == "pruned_hash":
            continue
        if name not in HISTORY and written != value:
            reasons.append(f"{name}: the certificate says {written!r}, now it is {value!r}")
    unchecked = _unverifiable(cert)
    if smaller:
        unchecked.append(
            "pruned_hash: that this network is the certified one without dead channels, as its record says"
        )
    if not (cert.calibration_checked and calibration is not None):
        why = "says yes; pass calibration= to check it" if cert.calibration_checked else "says no, and claims nothing"
        unchecked.append(f"calibration_checked: the certificate {why}")
    if ledger is None or not cert.ledger_kept:
        why = f"says {cert.prior_uses}; pass ledger= to check it" if cert.ledger_kept else "was made without a ledger"
        unchecked.append(f"ledger_kept, prior_uses: the certificate {why}")
    else:
        differ, unsure = _compare_uses(cert, ledger)
        reasons, unchecked = reasons + differ, unchecked + unsure
    return Verification(not reasons, tuple(reasons), tuple(unchecked))


def _measured_again(
    cert: AnyCertificate,
    dense: nn.Module,
    pruned: NetworkLike,
    holdout: Any,
    output: Output,
    calibration: Any,
    tolerance: float,
) -> tuple[dict[str, Any], list[str]]:
    """Measures again: the fields of a new certificate, and the reasons why its ratios do not give the old one."""
    if isinstance(cert, Certificate):
        outputs = measure_outputs(dense, pruned, holdout, measure_of(cert.measure), output, calibration)
        return asdict(outputs.evidence), _compare_ratios(cert, outputs.measured, tolerance)
    labels: Literal["use", "ignore"] = "use" if cert.mode == "labels" else "ignore"
    measure = partial(outcomes_of, labels=labels)
    outputs = measure_outputs(dense, pruned, holdout, measure, output, calibration, drops_padding=False)
    return asdict(accuracy_claim(outputs, confidence=cert.confidence, labels=labels)), []


def _contradictions(cert: AnyCertificate) -> list[str]:
    """Why the record contradicts itself; `from_json` would refuse it, but it may have been built by hand."""
    try:
        from_json(to_json(cert))
    except DataError as error:
        return [str(error)]
    return []


def _unverifiable(cert: AnyCertificate) -> list[str]:
    """What cannot be checked afterwards, because it was done before the claim."""
    first = "epsilon, delta" if isinstance(cert, Certificate) and cert.fixed == "epsilon" else "delta"
    chosen = f"fixed, {first}, confidence" if isinstance(cert, Certificate) else "mode, confidence"
    lines = [
        "data_hash: that the inputs were drawn independently and are new to both networks",
        f"{chosen}: that they were chosen before the inputs were used",
    ]
    if isinstance(cert.output, str) and cert.output.startswith(CALLABLE):
        lines.append("output: that the function of this name is the one that was used")
    return lines


def _compare_uses(cert: AnyCertificate, ledger: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """What the ledger contradicts, and what it leaves open, about the claim and the uses before it."""
    if not os.path.isfile(ledger):
        raise DataError(f"ledger {os.fspath(ledger)!r} is not a file", fix="give the one that was kept, or none")
    lines = ledger_lines(ledger)
    kind = OUTPUT if isinstance(cert, Certificate) else ACCURACY
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
    counts = " or ".join(map(str, before))
    difference = f"prior_uses: the certificate says {cert.prior_uses}, the ledger has {counts} before this claim"
    if cert.prior_uses not in before:
        return [difference], []
    is_repeated = len(before) > 1  # then the ledger cannot say which line is this one
    return [], [difference] if is_repeated else []


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
    if cert.fixed == "delta" and slack > 0:
        most -= 1  # epsilon is the ratio of a point, which is no violation of it
    if not fewest <= cert.violations <= most:
        reasons.append(f"violations: the certificate says {cert.violations}, now {fewest} to {most}")
    return reasons
