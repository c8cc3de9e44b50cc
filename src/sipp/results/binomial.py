"""Binomial confidence limits from counts on a holdout: the rules of T14, T15 and T16.

Plain statistics, without networks: counts and relative errors in, confidence limits out.
`n` distinct points, `k` violations, `beta` = 1 - confidence, `delta` = the share of violations a claim allows,
`ratios` = relative errors of the outputs, one per point, where a non-finite value violates every epsilon.

A holdout may contain copies of points. Then n counts distinct points, but a violation counts with all its copies, so k
may exceed n. Whichever copies were independent draws, the limits here are no smaller than theirs (docs/theory.md, T14).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sipp.errors import DataError, OptionError
from sipp.results.checking import check_share

Ratios = Any  # an array or a tensor; torch is not imported here, so that reading records is fast
# Up to here ln beta / ln(1 - delta) is within one of the true quotient in float64, and exact correction is cheap.
EXACT_POINTS = 2**40


def check_counts(k: int, n: int) -> None:
    """Raises unless n >= 1 and 0 <= k <= n."""
    if n < 1 or not 0 <= k <= n:
        raise OptionError(f"k = {k} of n = {n} is not a count; it needs n >= 1 and 0 <= k <= n")


def k_allowed(n: int, delta: float, beta: float) -> int | None:
    """k* = max{k : BinCDF(k; n, delta) <= beta} (T14), or None if even k = 0 proves nothing.

    Bisection on k: the CDF grows in k, from 0 <= beta at k = -1 to 1 > beta at k = n.
    """
    from scipy import special  # slow to import, and only claims need it

    check_share("delta", delta)
    check_share("beta", beta)
    check_counts(0, n)
    proves, fails = -1, n
    while fails - proves > 1:
        middle = (proves + fails) // 2
        if special.betaincc(middle + 1, n - middle, delta) <= beta:  # BinCDF, as an incomplete beta function
            proves = middle
        else:
            fails = middle
    return None if proves < 0 else proves


def holdout_needed(delta: float, beta: float) -> int:
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
    from scipy import special  # slow to import, and only claims need it

    check_counts(k, n)
    check_share("beta", beta)
    return 1.0 if k == n else float(special.betainccinv(k + 1, n - k, beta))


def share_limit(k: int, n: int, beta: float) -> float:
    """U(k; beta) if violations count with their copies, so that k may exceed the n distinct points."""
    return upper_limit(min(k, n), n, beta)


def lower_limit(k: int, n: int, beta: float) -> float:
    """L(k; beta): the Clopper-Pearson limit that a true share undercuts with probability at most beta; 0 if k = 0."""
    from scipy import special  # slow to import, and only claims need it

    check_counts(k, n)
    check_share("beta", beta)
    return 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, beta))


def safe_ratios(ratios: Ratios) -> np.ndarray:
    """The ratios (... x n) as float64, with NaN as +inf: an unknown error counts as large."""
    values = np.asarray(ratios) if not hasattr(ratios, "detach") else ratios.detach().cpu().numpy()
    values = values.astype(np.float64)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise DataError("no ratios", fix="give at least one holdout input")
    values = np.where(np.isnan(values), np.inf, values)
    if (values < 0).any():
        raise DataError("a ratio is negative; ratios are norms divided by norms")
    return values


def n_violations(ratios: Ratios, epsilon: float) -> np.ndarray:
    """The number of violations along the last axis (... x n -> ...): ratios not <= epsilon, or not finite."""
    values = safe_ratios(ratios)
    return np.count_nonzero(~((values <= epsilon) & np.isfinite(values)), axis=-1)


def certified_epsilon(ratios: Ratios, delta: float, beta: float, *, n: int | None = None) -> np.ndarray:
    """eps^ along the last axis (... x N -> ...): the (N - k*)-th smallest ratio (T14); +inf where nothing is proved.

    k* is that of `n` distinct points; by default all N are distinct.

    With q the true (1 - delta)-quantile of the ratios, eps^ < q means that at most k* points reached q, although each
    does so with probability >= delta: at most BinCDF(k*; n, delta) <= beta. Choosing eps^ on the points costs nothing.
    """
    values = safe_ratios(ratios)
    n_points = values.shape[-1]
    allowed = k_allowed(n_points if n is None else min(n, n_points), delta, beta)
    if allowed is None:
        return np.full(values.shape[:-1], np.inf)
    place = n_points - allowed - 1  # counted from 0; k* < n, so never negative
    return np.partition(values, place, axis=-1)[..., place]


def drop_limit(n_lost: int, n_gained: int, n: int, beta: float, *, n_copies: int = 0) -> float:
    """Upper limit of accuracy(dense) - accuracy(pruned) from paired outcomes: U(b; beta/2) - L(c; beta/2) (T16).

    If there are copies beside the n distinct points, b counts every copy and c no point twice. L is taken for c among
    all points, copies included, which is the smallest it can be.
    """
    check_counts(n_lost + n_gained, n + n_copies)
    return share_limit(n_lost, n, beta / 2) - lower_limit(n_gained, n + n_copies, beta / 2)


def first_failure(passes: Iterable[bool]) -> int:
    """The index of the first level that fails, or the number of levels if none does: fixed-sequence testing (T15).

    Levels run from dense to sparse in an order fixed before the holdout is used, each tested at full beta; the answer
    is the level before the returned index (none if it is 0). `passes` may be lazy: nothing after the first failure is
    evaluated. The error rate is at most beta, because a false certificate needs the FIRST truly bad level to pass.
    """
    index = 0
    for passed in passes:
        if not passed:
            return index
        index += 1
    return index
