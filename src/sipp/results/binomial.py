"""Binomial confidence limits from counts on a holdout (T14, T16), from SciPy.

`n` distinct points, `k` violations, `beta` = 1 - confidence, `share` = the share of violations a claim allows.

A holdout may contain copies of points. Then n counts distinct points, but a violation counts with all its copies, so k
may exceed n. Whichever copies were independent draws, the limits here are no smaller than theirs (docs/theory.md, T14).
"""

from __future__ import annotations

import math
from bisect import bisect_right


def k_allowed(n: int, share: float, beta: float) -> int | None:
    """The most violations with a proof: k* = max{k : BinCDF(k; n, share) <= beta} (T14), None if even 0 give none."""
    proved = bisect_right(range(n), beta, key=lambda k: _cdf(k, n, share))  # how many k, from 0 on, prove the claim
    return proved - 1 if proved else None


def holdout_needed(share: float, beta: float) -> int:
    """The smallest n with (1 - share)^n <= beta: T14 can certify nothing with fewer."""
    about = math.ceil(math.log(beta) / math.log1p(-share))  # rounding may take it across an integer
    return next((n for n in (about - 1, about) if n >= 1 and _cdf(0, n, share) <= beta), max(1, about + 1))


def upper_limit(k: int, n: int, beta: float) -> float:
    """The Clopper-Pearson limit U(k; beta), which a true share exceeds with probability at most beta; 1 if k = n."""
    from scipy import special  # slow to import, and only claims need it

    return 1.0 if k == n else float(special.betainccinv(k + 1, n - k, beta))


def share_limit(k: int, n: int, beta: float) -> float:
    """The limit U(k; beta) if violations count with their copies, so that k may exceed the n distinct inputs."""
    return upper_limit(min(k, n), n, beta)


def lower_limit(k: int, n: int, beta: float) -> float:
    """The Clopper-Pearson limit L(k; beta), which a true share undercuts with probability at most beta; 0 if k = 0."""
    from scipy import special  # slow to import, and only claims need it

    return 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, beta))


def drop_limit(n_lost: int, n_gained: int, n: int, beta: float, *, n_copies: int = 0) -> float:
    """Upper limit of accuracy(dense) - accuracy(pruned) from paired outcomes: U(b; beta/2) - L(c; beta/2) (T16).

    If there are copies beside the n distinct points, b counts every copy and c no point twice. L is taken for c among
    all points, copies included, which is the smallest it can be.
    """
    return share_limit(n_lost, n, beta / 2) - lower_limit(n_gained, n + n_copies, beta / 2)


def _cdf(k: int, n: int, share: float) -> float:
    """The distribution function BinCDF(k; n, share), as an incomplete beta function."""
    from scipy import special  # slow to import, and only claims need it

    return float(special.betaincc(k + 1, n - k, share))
