"""Certificates (T14, T16): their records, the sentences that explain them, and their JSON.

A record stores counts; everything else is computed from them, so that it cannot contradict itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sipp.results import words
from sipp.results.binomial import drop_limit, holdout_needed, k_allowed, share_limit
from sipp.results.sheet import Sheet, shown

Measure = Literal["output", "kl", "next-token"]


@dataclass(frozen=True)
@shown
class Certificate:
    """A certificate on outputs: P(||f^(x) - f(x)|| <= epsilon ||f(x)||) >= 1 - share, or why there is none (T14).

    For sequences of tokens (T22) `measure` may be the mean KL(f || f^) of the next token over the positions of a
    sequence, in nats, or the share of positions at which another next token is predicted.

    The verdict and all limits are computed from the counts, so they cannot contradict them.
    """

    fixed: Literal["share", "epsilon"]  # which of the two the caller gave; the other was measured
    epsilon: float  # +inf: no finite epsilon is proved
    share: float  # the share of inputs that may be further off
    confidence: float
    violations: int  # holdout points (with copies) not within epsilon; a non-finite output is a violation
    n: int  # distinct points
    n_duplicates: int  # further copies of them
    data_hash: str  # of the set of points, independent of order and batches
    dense_hash: str
    pruned_hash: str
    dtype: str  # of the outputs compared
    output: int | str | None  # which part of the models' output was compared
    calibration_checked: bool  # all inputs that chose the pruning are known, and none is in the holdout
    measure: Measure = "output"  # what epsilon limits

    ALSO_IN_JSON = ("verdict", "k_allowed", "proved_share", "sentence")
    USELESS = 1.0  # from this epsilon on, an output of zeros would be within it

    @property
    def k_allowed(self) -> int | None:
        """The most violations that still certify (k* of T14); None if n is too small for any claim."""
        return k_allowed(self.n, self.share, 1.0 - self.confidence)

    @property
    def verdict(self) -> str:
        """'certified', 'not certified' or 'refused: needs n >= ..'."""
        if self.k_allowed is None:
            return f"refused: needs n >= {holdout_needed(self.share, 1.0 - self.confidence)}"
        return "certified" if self.violations <= self.k_allowed else "not certified"

    @property
    def proved_share(self) -> float:
        """The proved limit of P(not within epsilon): Clopper-Pearson where epsilon was fixed, else the share or 1."""
        if self.fixed == "epsilon":
            return share_limit(self.violations, self.n, 1.0 - self.confidence)
        # epsilon was chosen on these points, so only the share fixed in advance may be claimed for it
        return self.share if self.verdict == "certified" else 1.0

    @property
    def limit(self) -> float | None:
        """The certified epsilon; None if no finite one is proved."""
        return self.epsilon if self.verdict == "certified" and math.isfinite(self.epsilon) else None

    @property
    def is_useless(self) -> bool:
        """Whether the certified epsilon is so large that an output of zeros would be within it."""
        return self.verdict == "certified" and self.measure != "kl" and not self.epsilon < self.USELESS

    @property
    def limit_words(self) -> str:
        """The epsilon in the unit of its measure: as it was asked for, or rounded up."""
        was_asked = self.fixed == "epsilon"
        if self.measure == "kl":
            return f"{words.exactly(self.epsilon) if was_asked else words.number_up(self.epsilon, 4)} nats"
        limit = words.percent(self.epsilon) if was_asked else words.percent_up(self.epsilon)
        return limit + (" of positions" if self.measure == "next-token" else "")

    @property
    def claim(self) -> str:
        """The claim in one short sentence; empty if it claims nothing."""
        if self.limit is None:
            return ""
        if self.is_useless and self.measure == "output":
            return f"The certificate is useless: it allows an error of {self.limit_words} of the output's norm"
        return words.sentence(output_claim(self.limit_words, self.share, self.confidence, self.measure))

    @property
    def claim_in_brief(self) -> str:
        """The claim in two or three words."""
        return "useless" if self.is_useless else "none" if self.limit is None else f"within {self.limit_words}"

    @property
    def sentence(self) -> str:
        """The certificate in plain words, numbers rounded so that they claim less, never more."""
        return _claim_in_words(self) + _caveats(self)

    @property
    def headline(self) -> str:
        return self.verdict + (", but useless" if self.is_useless else "")

    @property
    def sheet(self) -> Sheet:
        return _sheet(self)


@dataclass(frozen=True)
@shown
class AccuracyCertificate:
    """A certificate on accuracy: accuracy(dense) - accuracy(pruned) <= drop_upper, with or without labels (T16).

    With `measure` "next-token", points are sequences, and counts are sums of shares of positions, rounded so that they
    claim less (T22).
    """

    mode: Literal["labels", "label-free"]
    confidence: float
    n_lost: int  # b: dense right, pruned wrong, with copies; 0 in mode label-free
    n_gained: int  # c: dense wrong, pruned right at every copy, each point once; 0 in mode label-free
    n_differ: int  # D: different classes, or a non-finite output, with copies
    n: int  # distinct points
    n_duplicates: int  # further copies of them
    data_hash: str
    dense_hash: str
    pruned_hash: str
    dtype: str
    output: int | str | None
    calibration_checked: bool
    measure: Literal["class", "next-token"] = "class"
    accuracies: tuple[float, float] | None = None  # dense and pruned, on the holdout with copies; None without labels

    ALSO_IN_JSON = ("drop_upper", "sentence")

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
    def limit_words(self) -> str:
        """The proved limit of the drop in percentage points, rounded up."""
        return words.points_up(self.drop_upper).replace("percentage ", "")

    @property
    def change(self) -> str:
        """The claim in a few words: how far the accuracy falls at most."""
        return words.change(self.drop_upper, f"the accuracy{' of the next token' if self.measure != 'class' else ''}")

    @property
    def claim(self) -> str:
        """The claim in one short sentence."""
        return f"On new inputs, {accuracy_claim(self.change, self.confidence)}"

    @property
    def claim_in_brief(self) -> str:
        """The claim in a few words."""
        if self.drop_upper >= 0:
            return f"drop at most {self.limit_words}"
        return f"rises by at least {self.limit_words.removeprefix('-')}"  # rounded up as a drop: down as a gain

    @property
    def sentence(self) -> str:
        """The certificate in plain words, numbers rounded so that they claim less, never more."""
        limit, start = words.percent_up(self.drop_upper), f"With {words.percent(self.confidence)} confidence, "
        if self.measure == "next-token":
            return start + self._claim_about_tokens(limit) + _caveats(self)
        if self.mode == "labels":
            inputs = _counted(self, "labelled inputs").rstrip(",")
            were = "was" if self.n_lost == 1 else "were"
            claim = f"pruning {self.change}: of {inputs}, {self.n_lost:,} {were} right "
            distinct = " distinct ones" if self.n_duplicates else ""  # of which no copy is counted
            claim += f"before and wrong after, {self.n_gained:,}{distinct} the other way round."
        else:
            claim = f"pruning changes the predicted class for at most {limit} of inputs, so whatever the labels are, "
            claim += f"it {self.change} ({self.n_differ:,} of {_counted(self, 'inputs')} changed)."
        return start + claim + _caveats(self)

    def _claim_about_tokens(self, limit: str) -> str:
        """The claim about next tokens; a sequence counts once, however long it is."""
        over, inputs = "on average over the positions of a sequence", _counted(self, "sequences")
        if self.mode == "labels":
            return f"pruning {self.change}, {over} ({inputs.rstrip(',')})."
        seen = words.percent_up(self.n_differ / (self.n + self.n_duplicates))
        return (
            f"pruning changes the predicted next token at no more than {limit} of positions, {over} (on these {inputs} "
            f"it was {seen})."
        )

    @property
    def headline(self) -> str:
        return f"accuracy: {self.claim_in_brief} ({self.mode})"

    @property
    def sheet(self) -> Sheet:
        if self.accuracies is None:
            return _sheet(self)
        dense, pruned = self.accuracies
        return _sheet(self, ("accuracy", f"{pruned:.2%} pruned, {dense:.2%} dense, on these inputs"))


def output_claim(limit: str, share: float, confidence: float, measure: Measure) -> str:
    """A limit on outputs (T14) or tokens (T22) as a short sentence."""
    left_out, sure = words.percent(share), f"({words.percent(confidence)} confidence)"
    if measure == "output":
        return f"for all but {left_out} of new inputs the output stays within {limit} of the original {sure}"
    return f"for all but {left_out} of new sequences {_about_tokens(limit, measure)} {sure}"


def accuracy_claim(change: str, confidence: float) -> str:
    """A limit on the accuracy drop as a short sentence (T16)."""
    return f"pruning {change} ({words.percent(confidence)} confidence)"


def _about_tokens(limit: str, measure: Measure) -> str:
    if measure == "next-token":
        return f"the pruned network predicts a different next token at no more than {limit}"
    return f"the next token's distribution is within {limit} of the dense network's (KL, mean over positions)"


def _counted(cert: Certificate | AccuracyCertificate, what: str) -> str:
    """The number of inputs, in words; if some are copies, also how many are distinct."""
    inputs = f"{cert.n + cert.n_duplicates:,} {what}"
    return f"{inputs}, {cert.n:,} of them distinct," if cert.n_duplicates else inputs


def _claim_in_words(cert: Certificate) -> str:
    """The claim of a T14 certificate as a sentence, without caveats."""
    share, confidence = words.percent(cert.share), words.percent(cert.confidence)
    asked = f"{cert.limit_words}{' error' if cert.measure == 'output' else ''}"
    inputs, further = _counted(cert, "holdout inputs"), words.percent_up(cert.proved_share)
    if cert.k_allowed is None:
        needed = f"{holdout_needed(cert.share, 1.0 - cert.confidence):,}{' distinct ones' if cert.n_duplicates else ''}"
        text = f"No claim: {inputs} are too few to say anything about all but {share} of inputs with {confidence} "
        text += f"confidence; at least {needed} are needed."
        only = f" They only show that at most {further} of inputs are further off than {asked}."
        return text + (only if cert.fixed == "epsilon" else "")
    counts = f"{cert.violations:,} of {inputs} {'was' if cert.violations == 1 else 'were'} further off"
    if cert.fixed == "share":
        counts += f"; the limit was chosen to allow at most {cert.k_allowed:,}"
    else:
        counts += f", {cert.k_allowed:,} {'was' if cert.k_allowed == 1 else 'were'} allowed"
    if cert.verdict != "certified":
        if cert.fixed == "share":
            return (
                f"Not certified: too many outputs are not finite or cannot be compared, so no limit holds ({counts})."
            )
        return (
            f"Not certified at {asked} ({counts}); with {confidence} confidence, at most {further} of inputs are "
            f"further off, which is more than the {share} asked for."
        )
    if cert.measure != "output":
        claim = _about_tokens(cert.limit_words, cert.measure)
        return f"With {confidence} confidence, for all but at most {share} of sequences {claim} ({counts})."
    start = "True but useless: with" if cert.is_useless else "With"
    within = words.percent(cert.USELESS)
    end = f" Even a network that always outputs zero is within {within}." if cert.is_useless else ""
    return (
        f"{start} {confidence} confidence, for all but at most {share} of inputs the pruned network's output "
        f"differs from the dense network's by at most {cert.limit_words} of its norm ({counts}).{end}"
    )


def _caveats(cert: Certificate | AccuracyCertificate) -> str:
    """Caveats of a claim: the source of inputs, and copies among them."""
    text = " This applies to inputs from the same source as the holdout, which must be new to both networks."
    if not cert.calibration_checked:
        text += " Not checked: the inputs used for pruning are unknown."
    if cert.n_duplicates:
        text += f" {cert.n_duplicates:,} of the inputs are copies of others. Copies add no evidence, so each input"
        text += " counts once; only an input that goes wrong counts with all its copies."
    return text


def _sheet(cert: Certificate | AccuracyCertificate, *facts: tuple[str, str]) -> Sheet:
    """The certificate in words, and the hashes of inputs and networks."""
    part = () if cert.output is None else (("output", f"part {cert.output!r}, {cert.dtype}"),)
    hashed = {"inputs": cert.data_hash, "dense": cert.dense_hash, "pruned": cert.pruned_hash}
    hashes = ", ".join(f"{what} {found[:12]}" for what, found in hashed.items())
    return Sheet(
        cert.headline,
        (("certificate", cert.sentence), *facts, *part, ("SHA-256", hashes)),
    )


AnyCertificate = Certificate | AccuracyCertificate
