"""Certificates (T14, T16): their records, the sentences that explain them, and their JSON.

A record stores counts; everything else is computed from them, so that it cannot contradict itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, Context
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from sipp.errors import DataError, OptionError
from sipp.results.binomial import drop_limit, holdout_needed, k_allowed, share_limit
from sipp.results.checking import first_problem, refuse_constant
from sipp.results.display import exactly, percent, percent_up, points_up
from sipp.results.sheet import Sheet, Table, shown

SCHEMA = "sipp-certificate/5"
DERIVED = {"output": ("verdict", "k_allowed", "delta_hat", "marked"), "accuracy": ("drop_upper", "marked")}
USELESS = 1.0  # from this epsilon on, an output of zeros would be within it
DERIVED_RTOL = 1e-9  # tolerance for limits computed by another version of SciPy
HASH_LENGTH = 64
HASH_PATTERN = f"[0-9a-f]{{{HASH_LENGTH}}}"

# The types of fields, checked when a certificate is read from a file. A float may be written without a decimal point,
# as programs with a single number type do.
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]  # larger ones are not exact in float64
OpenShare = Annotated[float, Field(strict=True, gt=0, lt=1)]
Text = Annotated[str, Field(strict=True)]
Digest = Annotated[str, Field(strict=True, pattern=f"^{HASH_PATTERN}$")]
Flag = Annotated[bool, Field(strict=True)]
Limit = Annotated[float, Field(strict=True, ge=0), BeforeValidator(lambda value: math.inf if value == "inf" else value)]
Measure = Literal["output", "kl", "next-token"]
OutputSelector = Annotated[int, Field(strict=True)] | Text | None


@dataclass(frozen=True)
@shown
class Certificate:
    """P(||f^(x) - f(x)|| <= epsilon ||f(x)||) >= 1 - delta at the confidence, or why not (T14).

    For sequences of tokens (T22) `measure` may be the mean KL(f || f^) of the next token over the positions of a
    sequence, in nats, or the share of positions at which another next token is predicted.

    The verdict and all limits are computed from the counts, so they cannot contradict them.
    """

    fixed: Literal["delta", "epsilon"]  # which of the two the caller gave; the other was measured
    epsilon: Limit  # +inf: no finite epsilon is proved
    delta: OpenShare  # the share of inputs that may be further off
    confidence: OpenShare
    violations: Count  # holdout points (with copies) not within epsilon; a non-finite output is a violation
    n: Count  # distinct points
    n_duplicates: Count  # further copies of them
    data_hash: Digest  # of the set of points, independent of order and batches
    dense_hash: Digest
    pruned_hash: Digest
    dtype: Text  # of the outputs compared
    output: OutputSelector  # which part of the models' output was compared
    calibration_checked: Flag  # calibration points, given or in the pruning's record, are not in the holdout
    ledger_kept: Flag
    prior_uses: Count  # earlier claims on the same points in the ledger
    measure: Measure = "output"  # what epsilon limits

    ALSO_IN_JSON = ("verdict", "k_allowed", "delta_hat", "marked", "sentence")

    @property
    def k_allowed(self) -> int | None:
        """k* of T14, None if n is too small for any claim."""
        return k_allowed(self.n, self.delta, 1.0 - self.confidence)

    @property
    def verdict(self) -> str:
        """'certified', 'not certified' or 'refused: needs n >= ..'."""
        if self.k_allowed is None:
            return f"refused: needs n >= {holdout_needed(self.delta, 1.0 - self.confidence)}"
        return "certified" if self.violations <= self.k_allowed else "not certified"

    @property
    def delta_hat(self) -> float:
        """The proved limit of P(not within epsilon): Clopper-Pearson where epsilon was fixed, else delta or 1."""
        if self.fixed == "epsilon":
            return share_limit(self.violations, self.n, 1.0 - self.confidence)
        # epsilon was chosen on these points, so only the delta fixed in advance may be claimed for it
        return self.delta if self.verdict == "certified" else 1.0

    @property
    def marked(self) -> bool:
        """Whether these points had served an earlier claim, so that this one is no first look."""
        return self.prior_uses > 0

    @property
    def limit(self) -> float | None:
        """The certified epsilon; None if no finite one is proved."""
        return self.epsilon if self.verdict == "certified" and math.isfinite(self.epsilon) else None

    @property
    def is_useless(self) -> bool:
        """Whether the certified epsilon is so large that an output of zeros would be within it."""
        return self.verdict == "certified" and self.measure != "kl" and not self.epsilon < USELESS

    @property
    def sentence(self) -> str:
        """The certificate in plain words, numbers rounded so that they claim less, never more."""
        return _claim_in_words(self) + _caveats(self)

    @property
    def _headline(self) -> str:
        return self.verdict + (", but useless" if self.is_useless else "")

    @property
    def sheet(self) -> Sheet:
        counts = [("further off", self.violations), ("allowed", self.k_allowed or 0)]
        return _sheet(self._headline, self, ("k_allowed", "delta_hat"), counts)


@dataclass(frozen=True)
@shown
class AccuracyCertificate:
    """accuracy(dense) - accuracy(pruned) <= drop_upper at the confidence (T16), from labels or without any.

    With `measure` "next-token", points are sequences, and counts are sums of shares of positions, rounded so that they
    claim less (T22).
    """

    mode: Literal["labels", "label-free"]
    confidence: OpenShare
    n_lost: Count  # b: dense right, pruned wrong, with copies; 0 in mode label-free
    n_gained: Count  # c: dense wrong, pruned right at every copy, each point once; 0 in mode label-free
    n_differ: Count  # D: different classes, or a non-finite output, with copies
    n: Count  # distinct points
    n_duplicates: Count  # further copies of them
    data_hash: Digest
    dense_hash: Digest
    pruned_hash: Digest
    dtype: Text
    output: OutputSelector
    calibration_checked: Flag
    ledger_kept: Flag
    prior_uses: Count
    measure: Literal["class", "next-token"] = "class"

    ALSO_IN_JSON = ("drop_upper", "marked", "sentence")

    @property
    def drop_upper(self) -> float:
        """The proved limit of the accuracy drop: U(b; beta/2) - L(c; beta/2), or U(D; beta) without labels."""
        beta = 1.0 - self.confidence
        if self.measure == "next-token":  # sums of shares, not of zeros and ones: Bentkus' inequality costs a factor e
            beta /= math.e
        if self.mode == "labels":
            return drop_limit(self.n_lost, self.n_gained, self.n, beta, n_copies=self.n_duplicates)
        return share_limit(self.n_differ, self.n, beta)

    @property
    def marked(self) -> bool:
        """Whether these points had served an earlier claim, so that this one is no first look."""
        return self.prior_uses > 0

    @property
    def sentence(self) -> str:
        """The certificate in plain words, numbers rounded so that they claim less, never more."""
        limit, start = percent_up(self.drop_upper), f"With {percent(self.confidence)} confidence, "
        points = f"by at most {points_up(self.drop_upper)}"
        if self.measure == "next-token":
            return start + self._claim_about_tokens(limit, points) + _caveats(self)
        if self.mode == "labels":
            inputs = _counted(self, "labelled inputs").rstrip(",")
            were = "was" if self.n_lost == 1 else "were"
            claim = f"pruning lowers the accuracy {points}: of {inputs}, {self.n_lost:,} {were} right "
            distinct = " distinct ones" if self.n_duplicates else ""  # of which no copy is counted
            claim += f"before and wrong after, {self.n_gained:,}{distinct} the other way round."
        else:
            claim = f"pruning changes the predicted class for at most {limit} of inputs, so whatever the labels are, "
            claim += f"it lowers the accuracy {points} ({self.n_differ:,} of {_counted(self, 'inputs')} changed)."
        return start + claim + _caveats(self)

    def _claim_about_tokens(self, limit: str, points: str) -> str:
        """The claim about next tokens; a sequence counts once, however long it is."""
        over, inputs = "on average over the positions of a sequence", _counted(self, "sequences")
        if self.mode == "labels":
            return f"pruning lowers the accuracy of the next token {points}, {over} ({inputs.rstrip(',')})."
        seen = percent_up(self.n_differ / (self.n + self.n_duplicates))
        return (
            f"pruning changes the predicted next token at no more than {limit} of positions, {over} (on these {inputs} "
            f"it was {seen})."
        )

    @property
    def _headline(self) -> str:
        return f"accuracy drop <= {points_up(self.drop_upper)} ({self.mode})"

    @property
    def sheet(self) -> Sheet:
        counts = [("right before, wrong after", self.n_lost), ("wrong before, right after", self.n_gained)]
        counted = [*(counts if self.mode == "labels" else []), ("another class", self.n_differ)]
        return _sheet(self._headline, self, ("drop_upper",), counted)


def _counted(cert: Certificate | AccuracyCertificate, what: str) -> str:
    """The number of inputs, in words; if some are copies, also how many are distinct."""
    inputs = f"{cert.n + cert.n_duplicates:,} {what}"
    return f"{inputs}, {cert.n:,} of them distinct," if cert.n_duplicates else inputs


def _claim_in_words(cert: Certificate) -> str:
    """The claim of a T14 certificate as a sentence, without caveats."""
    delta, confidence = percent(cert.delta), percent(cert.confidence)
    if cert.k_allowed is None:
        needed = holdout_needed(cert.delta, 1.0 - cert.confidence)
        inputs, distinct = _counted(cert, "holdout inputs"), " distinct ones" if cert.n_duplicates else ""
        text = f"No claim: {inputs} are too few to say anything about all but {delta} of inputs with {confidence} "
        text += f"confidence; at least {needed:,}{distinct} are needed."
        if cert.fixed == "epsilon":
            text += f" They only show that at most {percent_up(cert.delta_hat)} of inputs are further off than "
            text += f"{_limit(cert)}."
        return text
    inputs = _counted(cert, "holdout inputs")
    counts = f"{cert.violations:,} of {inputs} {'was' if cert.violations == 1 else 'were'} further off"
    if cert.fixed == "delta":
        counts += f"; the limit was chosen to allow at most {cert.k_allowed:,}"
    else:
        counts += f", {cert.k_allowed:,} {'was' if cert.k_allowed == 1 else 'were'} allowed"
    if cert.verdict == "certified" and cert.measure != "output":
        claim = claim_about_tokens(cert)
        return f"With {confidence} confidence, for all but at most {delta} of sequences {claim} ({counts})."
    if cert.verdict == "certified":
        epsilon = percent(cert.epsilon) if cert.fixed == "epsilon" else percent_up(cert.epsilon)
        start = "True but useless: with" if cert.is_useless else "With"
        end = f" Even a network that always outputs zero is within {percent(USELESS)}." if cert.is_useless else ""
        return (
            f"{start} {confidence} confidence, for all but at most {delta} of inputs the pruned network's output "
            f"differs from the dense network's by at most {epsilon} of its norm ({counts}).{end}"
        )
    if cert.fixed == "delta":
        return f"Not certified: too many outputs are not finite or cannot be compared, so no limit holds ({counts})."
    return (
        f"Not certified at {_limit(cert)} ({counts}); with {confidence} confidence, at most "
        f"{percent_up(cert.delta_hat)} of inputs are further off, which is more than the {delta} asked for."
    )


def _limit(cert: Certificate) -> str:
    """The epsilon that was asked for, in words."""
    if cert.measure == "kl":
        return f"{exactly(cert.epsilon)} nats per token"
    return f"{percent(cert.epsilon)} {'of positions' if cert.measure == 'next-token' else 'error'}"


def claim_about_tokens(cert: Certificate) -> str:
    """The claim about the tokens of a sequence, in words (T22)."""
    if cert.measure == "next-token":
        limit = percent(cert.epsilon) if cert.fixed == "epsilon" else percent_up(cert.epsilon)
        return f"the pruned network predicts a different next token at no more than {limit} of positions"
    nats = exactly(cert.epsilon) if cert.fixed == "epsilon" else _value_text("epsilon", cert.epsilon)
    return f"the next token's distribution is within {nats} nats of the dense network's (KL, mean over positions)"


def _caveats(cert: Certificate | AccuracyCertificate) -> str:
    """Caveats of a claim: the source of inputs, copies among them, earlier uses."""
    text = " This applies to inputs from the same source as the holdout, which must be new to both networks."
    if not cert.calibration_checked:
        text += " sipp could not check this: it was not told which inputs were used for pruning."
    if cert.n_duplicates:
        text += f" {cert.n_duplicates:,} of the inputs are copies of others. Copies add no evidence, so each input"
        text += " counts once; only an input that goes wrong counts with all its copies."
    if cert.marked:
        times = "once" if cert.prior_uses == 1 else f"{cert.prior_uses:,} times"
        text += f" These inputs were used {times} before, so the confidence is that of this claim alone, not of the"
        text += " best of several."
    return text


# Explanations of the fields of a certificate
FIELD_WORDS = {
    "fixed": "which of epsilon and delta was given; the other was measured",
    "epsilon": "error of the output, relative to its norm",
    "delta": "share of inputs that may be further off",
    "confidence": "how sure the claim is",
    "violations": "inputs further off than epsilon",
    "mode": "whether labels were used",
    "n_lost": "inputs right before, wrong after",
    "n_gained": "inputs wrong before, right after",
    "n_differ": "inputs whose class changed",
    "n": "distinct holdout inputs",
    "n_duplicates": "further copies among them",
    "data_hash": "of the inputs",
    "dense_hash": "of the dense network",
    "pruned_hash": "of the pruned network",
    "dtype": "of the outputs",
    "output": "which part of the output was compared; None: all of it",
    "calibration_checked": "whether the holdout was checked for calibration inputs",
    "ledger_kept": "whether a ledger records the uses of these inputs",
    "prior_uses": "earlier claims on these inputs, in the ledger",
    "k_allowed": "violations that the claim allows",
    "delta_hat": "proved limit on the share of inputs further off",
    "drop_upper": "proved limit on the drop in accuracy",
    "measure": "what was compared",
}
LIMITS = ("epsilon", "delta_hat", "drop_upper")  # rounded up: the sheet never claims more than the record
SHEET_DIGITS = 4


def _sheet(
    headline: str, cert: Certificate | AccuracyCertificate, derived: tuple[str, ...], counts: list[tuple[str, int]]
) -> Sheet:
    """The claim in words, how many inputs speak for and against it, and all fields with their meaning."""
    n_given = cert.n + cert.n_duplicates
    rows = tuple((words, f"{count:,}", f"{count / n_given:.2%}") for words, count in counts)
    names = (*(field.name for field in fields(cert)), *derived)
    values = tuple((name, _value_text(name, getattr(cert, name)), FIELD_WORDS[name]) for name in names)
    table = Table((f"of {n_given:,} inputs", "number", "share"), rows, bars=("share",))
    every = Table(("field", "value", "meaning"), values, texts=("value", "meaning"))
    return Sheet(headline, (("claim", cert.sentence),), (table, every))


def _value_text(name: str, value: Any) -> str:
    """The value as text; measured limits are rounded up to a few digits."""
    if name in LIMITS and isinstance(value, float) and math.isfinite(value):
        return f"{Context(prec=SHEET_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(value)):g}"
    return str(value)


AnyCertificate = Certificate | AccuracyCertificate
KINDS: dict[str, type[AnyCertificate]] = {"output": Certificate, "accuracy": AccuracyCertificate}
SCHEMAS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(record) for kind, record in KINDS.items()}


def is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(HASH_PATTERN, value) is not None


def check_certificate(certificate: object) -> None:
    """Raises unless it is a certificate or None."""
    if certificate is not None and not isinstance(certificate, (Certificate, AccuracyCertificate)):
        raise OptionError(f"certificate is a {type(certificate).__name__}", fix="pass what sipp.certify returned")


def certificate_values(cert: AnyCertificate | None) -> dict[str, Any] | None:
    """The fields, derived numbers and the sentence in JSON types; an infinite epsilon becomes "inf"."""
    if cert is None:
        return None
    kind = next(name for name, record in KINDS.items() if isinstance(cert, record))
    content: dict[str, Any] = {"schema": SCHEMA, "kind": kind, "sentence": cert.sentence}
    for name in (*(field.name for field in fields(cert)), *DERIVED[kind]):
        value = getattr(cert, name)
        content[name] = repr(value) if isinstance(value, float) and not math.isfinite(value) else value
    return content


def to_json(cert: AnyCertificate) -> str:
    """The certificate as JSON text."""
    return json.dumps(certificate_values(cert), indent=2, allow_nan=False)


def from_json(text: str) -> AnyCertificate:
    """The inverse of `to_json`; a DataError names the key that is wrong."""
    try:
        pairs = json.loads(text, object_pairs_hook=list, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the certificate is not valid JSON: {error}") from error
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise DataError("the certificate is not a JSON object")
    content = dict(pairs)
    if len(content) != len(pairs):
        raise DataError("the certificate holds a key twice")
    cert = from_values(content)
    if content["sentence"] != cert.sentence:
        raise DataError(
            f"certificate key 'sentence' says {content['sentence']!r:.80}, its counts say {cert.sentence!r:.80}: it "
            "was changed, or written by another version"
        )
    return cert


def from_values(values: Mapping[str, Any]) -> AnyCertificate:
    """The certificate with these JSON values; its sentence is computed again from the counts."""
    schema, kind = values.get("schema"), values.get("kind")
    if schema != SCHEMA or kind not in (*KINDS,):
        raise DataError(f"schema must be {SCHEMA!r}, kind one of {[*KINDS]}; got {schema!r} and {kind!r}")
    names = [field.name for field in fields(KINDS[kind])]
    expected = {"schema", "kind", "sentence", *names, *DERIVED[kind]}
    if set(values) != expected:
        raise DataError(f"unknown keys {sorted(set(values) - expected)}, missing keys {sorted(expected - set(values))}")
    try:
        cert: AnyCertificate = SCHEMAS[kind].validate_python({name: values[name] for name in names})
    except ValidationError as error:
        raise DataError(f"certificate key {first_problem(error)}") from error
    _check_consistent(cert, {name: values[name] for name in DERIVED[kind]})
    return cert


def _check_consistent(cert: AnyCertificate, derived: dict[str, Any]) -> None:
    """Raises if counts contradict each other, or if a written conclusion does not follow from them."""
    n_given = cert.n + cert.n_duplicates
    if isinstance(cert, Certificate):
        counted = cert.violations
        possible = math.isfinite(cert.epsilon) or (cert.fixed == "delta" and cert.verdict != "certified")
    else:
        counted = cert.n_lost + cert.n_gained
        possible = counted <= cert.n_differ <= n_given and (cert.mode == "labels" or counted == 0)
        possible = possible and cert.n_gained <= cert.n
    if not (possible and cert.n >= 1 and counted <= n_given):
        raise DataError("the certificate's counts contradict each other")
    if cert.prior_uses and not cert.ledger_kept:
        raise DataError("the certificate counts prior uses without a ledger")
    for name, written in derived.items():
        true = getattr(cert, name)
        is_number = type(written) in (int, float) and isinstance(true, float)
        close = is_number and math.isclose(written, true, rel_tol=DERIVED_RTOL)
        if not close and (type(written) is not type(true) or written != true):
            raise DataError(f"certificate key {name!r} says {written!r:.80}, its counts say {true!r}")
