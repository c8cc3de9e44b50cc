"""What counts on a holdout prove, and the records that say so: the binomial rules of T14, T15 and T16.

Plain statistics, no network in sight: counts and relative errors come in, limits and statements come out.
`n` points, `k` of them violations, `beta` = 1 - confidence, `delta` = the share of violations a claim allows,
`ratios` = relative errors of the outputs, one per point, where anything not finite is a violation of every epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, Context, Decimal
from typing import Literal

import numpy as np
import torch
from scipy import stats

from sipp.errors import DataError, OptionError

# Dvoretzky-Kiefer-Wolfowitz with Massart's constant: sup |F_n - F| > h has probability at most 2 exp(-2 n h^2).
DKW_SIDES = 2
DKW_EXPONENT = 2
# Up to here ln beta / ln(1 - delta) is within one of the true quotient in float64, and exact correction is cheap.
EXACT_POINTS = 2**40
SENTENCE_DIGITS = 3  # of measured numbers, rounded up: the words never claim more than the record
PLAIN_RANGE = (Decimal("1e-6"), Decimal("1e9"))  # printed without an exponent


def check_share(name: str, value: float) -> float:
    """The value as a float, if it lies strictly between 0 and 1; OptionError otherwise (NaN included)."""
    if not 0.0 < float(value) < 1.0:
        raise OptionError(f"{name} = {value!r} must lie strictly between 0 and 1; for example {name} = 0.05 or 0.95")
    return float(value)


def check_counts(k: int, n: int) -> None:
    """Nothing; OptionError unless 0 <= k <= n and n >= 1."""
    if n < 1 or not 0 <= k <= n:
        raise OptionError(f"k = {k} of n = {n} is no count; it needs n >= 1 and 0 <= k <= n")


def k_allowed(n: int, delta: float, beta: float) -> int | None:
    """k* = max{k : BinCDF(k; n, delta) <= beta} (T14), or None where even k = 0 proves nothing.

    Bisection on k: the CDF grows in k, lies below 0 at k = -1 by convention and is 1 > beta at k = n.
    """
    check_share("delta", delta)
    check_share("beta", beta)
    check_counts(0, n)
    proves, fails = -1, n
    while fails - proves > 1:
        middle = (proves + fails) // 2
        if stats.binom.cdf(middle, n, delta) <= beta:
            proves = middle
        else:
            fails = middle
    return None if proves < 0 else proves


def points_needed(delta: float, beta: float) -> int:
    """The smallest n with (1 - delta)^n <= beta, ceil(ln beta / ln(1 - delta)): T14 can certify nothing with fewer."""
    check_share("delta", delta)
    check_share("beta", beta)
    n = max(1, math.ceil(math.log(beta) / math.log1p(-delta)))
    # The quotient may round across an integer; k_allowed has the last word, so the two never contradict each other.
    if n > EXACT_POINTS:
        return n
    while n > 1 and k_allowed(n - 1, delta, beta) is not None:
        n -= 1
    while k_allowed(n, delta, beta) is None:
        n += 1
    return n


def upper_limit(k: int, n: int, beta: float) -> float:
    """U(k; beta): the Clopper-Pearson limit that a true share exceeds with probability at most beta; 1 if k = n."""
    check_counts(k, n)
    check_share("beta", beta)
    return 1.0 if k == n else float(stats.beta.isf(beta, k + 1, n - k))


def lower_limit(k: int, n: int, beta: float) -> float:
    """L(k; beta): the Clopper-Pearson limit that a true share undercuts with probability at most beta; 0 if k = 0."""
    check_counts(k, n)
    check_share("beta", beta)
    return 0.0 if k == 0 else float(stats.beta.ppf(beta, k, n - k + 1))


def safe_ratios(ratios: np.ndarray | torch.Tensor) -> np.ndarray:
    """The ratios (... x n) as float64 with NaN turned into +inf: what is not known to be small is taken as large."""
    values = ratios.detach().cpu().numpy() if isinstance(ratios, torch.Tensor) else np.asarray(ratios)
    values = values.astype(np.float64)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise DataError("no ratios: a claim needs at least one holdout point")
    values = np.where(np.isnan(values), np.inf, values)
    if (values < 0).any():
        raise DataError("a ratio is negative; ratios are norms divided by norms")
    return values


def n_violations(ratios: np.ndarray | torch.Tensor, epsilon: float) -> np.ndarray:
    """The number of violations along the last axis (... x n -> ...): ratios not <= epsilon, or not finite."""
    values = safe_ratios(ratios)
    return np.count_nonzero(~((values <= epsilon) & np.isfinite(values)), axis=-1)


def certified_epsilon(ratios: np.ndarray | torch.Tensor, delta: float, beta: float) -> np.ndarray:
    """eps^ along the last axis (... x n -> ...): the (n - k*)-th smallest ratio (T14); +inf where nothing is proved.

    With q the true (1 - delta)-quantile of the ratios, eps^ < q means that at most k* points reached q, although each
    does so with probability >= delta: at most BinCDF(k*; n, delta) <= beta. Choosing eps^ on the points costs nothing.
    """
    values = safe_ratios(ratios)
    n = values.shape[-1]
    allowed = k_allowed(n, delta, beta)
    if allowed is None:
        return np.full(values.shape[:-1], np.inf)
    place = n - allowed - 1  # counted from 0; k* < n, so never negative
    return np.partition(values, place, axis=-1)[..., place]


def drop_limit(n_lost: int, n_gained: int, n: int, beta: float) -> float:
    """Upper limit of accuracy(dense) - accuracy(pruned) from paired outcomes: U(b; beta/2) - L(c; beta/2) (T16)."""
    check_counts(n_lost + n_gained, n)
    return upper_limit(n_lost, n, beta / 2) - lower_limit(n_gained, n, beta / 2)


def first_failure(passes: Iterable[bool]) -> int:
    """The index of the first level that fails, or the number of levels if none does: fixed-sequence testing (T15).

    Levels run dense -> sparse in an order fixed before the holdout was looked at, each tested at full beta; the answer
    is the level before the returned index (none where it is 0). `passes` may be lazy: nothing past the first failure
    is looked at. At most beta, because a false certificate needs the FIRST level that is truly bad to pass.
    """
    index = 0
    for passed in passes:
        if not passed:
            return index
        index += 1
    return index


@dataclass(frozen=True)
class EpsilonCurve:
    """P(ratio > epsilon) for every epsilon at once: at the confidence, the true curve lies in the band everywhere."""

    epsilon_E: np.ndarray  # the different finite ratios, ascending; the curve steps down at each of them
    share_E: np.ndarray  # observed share of points with ratio > epsilon
    lower_E: np.ndarray  # the band, clipped to [0, 1]
    upper_E: np.ndarray
    half_width: float
    n: int
    confidence: float

    def delta_at(self, epsilon: float) -> float:
        """Upper limit of P(ratio > epsilon); epsilon may be chosen after looking at the curve."""
        if math.isnan(epsilon):
            return 1.0
        step = int(np.searchsorted(self.epsilon_E, epsilon, side="right"))
        return 1.0 if step == 0 else float(self.upper_E[step - 1])

    def epsilon_at(self, delta: float) -> float:
        """The smallest epsilon whose upper limit is at most delta, +inf where there is none."""
        steps = np.flatnonzero(self.upper_E <= delta)
        return math.inf if steps.size == 0 else float(self.epsilon_E[steps[0]])


def epsilon_curve(ratios: np.ndarray | torch.Tensor, confidence: float = 0.95) -> EpsilonCurve:
    """The curve epsilon -> P(ratio > epsilon) with its Dvoretzky-Kiefer-Wolfowitz band, valid at all epsilon at once.

    half width h = sqrt(ln(2 / beta) / (2 n)). Wider than T14 at one delta fixed in advance, which is what one pays for
    looking at the whole curve first.
    """
    beta = 1.0 - check_share("confidence", confidence)
    values = np.sort(safe_ratios(ratios).reshape(-1))
    n = values.size
    half_width = math.sqrt(math.log(DKW_SIDES / beta) / (DKW_EXPONENT * n))
    epsilons = np.unique(values[np.isfinite(values)])
    share = (n - np.searchsorted(values, epsilons, side="right")) / n
    return EpsilonCurve(
        epsilon_E=epsilons,
        share_E=share,
        lower_E=np.clip(share - half_width, 0.0, 1.0),
        upper_E=np.clip(share + half_width, 0.0, 1.0),
        half_width=half_width,
        n=int(n),
        confidence=float(confidence),
    )


@dataclass(frozen=True)
class Certificate:
    """P(||f^(x) - f(x)|| <= epsilon ||f(x)||) >= 1 - delta at the confidence, or why not (T14).

    The verdict and everything else that follows from the counts is computed from them, so it cannot contradict them.
    """

    fixed: Literal["delta", "epsilon"]  # which of the two the caller gave; the other was measured
    epsilon: float  # +inf: no finite epsilon is proved
    delta: float  # the share of inputs that may be further off
    confidence: float
    violations: int  # holdout points not within epsilon; an output that is not finite counts as one
    n: int
    n_duplicates: int  # points that are exact copies of an earlier one
    data_hash: str  # of the set of points, whatever their order and batches
    dense_hash: str
    pruned_hash: str
    dtype: str  # of the outputs compared
    output: int | str | None  # which part of the models' output was compared
    calibration_checked: bool  # the calibration points were compared with the holdout, none is shared
    ledger_kept: bool
    prior_uses: int  # earlier claims on the same points in the ledger

    @property
    def k_allowed(self) -> int | None:
        """k* of T14, None where n is too small for any claim."""
        return k_allowed(self.n, self.delta, 1.0 - self.confidence)

    @property
    def verdict(self) -> str:
        """'certified', 'not certified' or 'refused: needs n >= ..'."""
        if self.k_allowed is None:
            return f"refused: needs n >= {points_needed(self.delta, 1.0 - self.confidence)}"
        return "certified" if self.violations <= self.k_allowed else "not certified"

    @property
    def delta_hat(self) -> float:
        """The proved limit of P(not within epsilon): Clopper-Pearson where epsilon was fixed, else delta or 1."""
        if self.fixed == "epsilon":
            return upper_limit(self.violations, self.n, 1.0 - self.confidence)
        # epsilon was chosen on these points, so only the delta fixed in advance may be claimed for it
        return self.delta if self.verdict == "certified" else 1.0

    @property
    def marked(self) -> bool:
        """Whether these points had served an earlier claim, so that this one is no first look."""
        return self.prior_uses > 0

    @property
    def sentence(self) -> str:
        """The certificate in plain words, numbers rounded so that they claim less, never more."""
        return _claim_in_words(self) + _caveats(self)

    def __str__(self) -> str:
        return _sheet(self.verdict, self, ("k_allowed", "delta_hat"))


@dataclass(frozen=True)
class AccuracyCertificate:
    """accuracy(dense) - accuracy(pruned) <= drop_upper at the confidence (T16), from labels or without any."""

    mode: Literal["labels", "label-free"]
    confidence: float
    n_lost: int  # b: dense right, pruned wrong; 0 in mode label-free
    n_gained: int  # c: dense wrong, pruned right; 0 in mode label-free
    n_differ: int  # D: the two choose different classes, or an output is not finite
    n: int
    n_duplicates: int
    data_hash: str
    dense_hash: str
    pruned_hash: str
    dtype: str
    output: int | str | None
    calibration_checked: bool
    ledger_kept: bool
    prior_uses: int

    @property
    def drop_upper(self) -> float:
        """The proved limit of the accuracy drop: U(b; beta/2) - L(c; beta/2), or U(D; beta) without labels."""
        beta = 1.0 - self.confidence
        if self.mode == "labels":
            return drop_limit(self.n_lost, self.n_gained, self.n, beta)
        return upper_limit(self.n_differ, self.n, beta)

    @property
    def marked(self) -> bool:
        """Whether these points had served an earlier claim, so that this one is no first look."""
        return self.prior_uses > 0

    @property
    def sentence(self) -> str:
        """The certificate in plain words, numbers rounded so that they claim less, never more."""
        limit, start = percent_up(self.drop_upper), f"With {percent(self.confidence)} confidence, "
        points = f"by at most {limit.removesuffix(' %')} percentage points"
        if self.mode == "labels":
            claim = f"pruning lowers the accuracy {points}: of {self.n:,} labelled points, {self.n_lost:,} were right "
            claim += f"before and wrong after, {self.n_gained:,} the other way round."
        else:
            claim = f"pruning changes the chosen class of at most {limit} of inputs, so whatever the labels are, it "
            claim += f"lowers the accuracy {points} ({self.n_differ:,} of {self.n:,} points changed)."
        return start + claim + _caveats(self)

    def __str__(self) -> str:
        return _sheet(f"accuracy drop <= {percent_up(self.drop_upper)} ({self.mode})", self, ("drop_upper",))


def _claim_in_words(cert: Certificate) -> str:
    """What a T14 certificate says, before its caveats."""
    delta, confidence = percent(cert.delta), percent(cert.confidence)
    if cert.verdict.startswith("refused"):
        needed = points_needed(cert.delta, 1.0 - cert.confidence)
        text = f"No claim: {cert.n:,} holdout points are too few to say anything about all but {delta} of inputs with "
        text += f"{confidence} confidence; at least {needed:,} are needed."
        if cert.fixed == "epsilon":
            text += f" What they show is that at most {percent_up(cert.delta_hat)} of inputs are further off than "
            text += f"{percent(cert.epsilon)}."
        return text
    counts = f"{cert.violations:,} of {cert.n:,} holdout points were further off, {cert.k_allowed:,} were allowed"
    if cert.verdict == "certified":
        epsilon = percent(cert.epsilon) if cert.fixed == "epsilon" else percent_up(cert.epsilon)
        return (
            f"With {confidence} confidence, for all but at most {delta} of inputs the pruned network's output differs "
            f"from the dense network's by at most {epsilon} of its length ({counts})."
        )
    if cert.fixed == "delta":
        return f"Not certified: too many outputs are not finite or not comparable for any error limit ({counts})."
    return (
        f"Not certified at {percent(cert.epsilon)} error ({counts}); with {confidence} confidence, at most "
        f"{percent_up(cert.delta_hat)} of inputs are further off, more than the {delta} asked for."
    )


def _caveats(cert: Certificate | AccuracyCertificate) -> str:
    """What the reader must know beside the claim: the source of inputs, copies among the points, an earlier use."""
    text = " Any claim here is about inputs drawn like the holdout points, which must be new to both networks."
    if cert.n_duplicates:
        text += f" {cert.n_duplicates:,} of the points are exact copies of others, yet count as independent here."
    if cert.marked:
        times = "once" if cert.prior_uses == 1 else f"{cert.prior_uses:,} times"
        text += f" These points were used {times} before, so this is no longer a first look: the confidence holds for"
        text += " this claim alone, not for the best of several."
    return text


def _sheet(headline: str, cert: Certificate | AccuracyCertificate, derived: tuple[str, ...]) -> str:
    """Headline, sentence and one aligned line per field and derived number, for a terminal."""
    rows = [(name, getattr(cert, name)) for name in (*(field.name for field in fields(cert)), *derived)]
    width = max(len(name) for name, _ in rows)
    return "\n".join([headline, cert.sentence, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def percent(share: float) -> str:
    """A number the caller chose, as a percentage with all its digits: 0.05 -> '5 %'."""
    if not math.isfinite(share):
        return "unlimited"
    value = (Decimal(repr(float(share))) * 100).normalize()
    plain = value == 0 or PLAIN_RANGE[0] <= abs(value) < PLAIN_RANGE[1]
    return f"{value:{'f' if plain else 'e'}} %"


def percent_up(share: float) -> str:
    """A measured number as a percentage of few digits, rounded up: 0.12341 -> '12.4 %'."""
    if not math.isfinite(share):
        return "unlimited"
    return percent(float(Context(prec=SENTENCE_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(float(share)))))
