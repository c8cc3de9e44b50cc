"""Slow, obvious binomial statistics: sums of probabilities and bisection, float64, nothing from the package."""

import math


def probability(k, n, p):
    """P(exactly k of n)."""
    if p in (0.0, 1.0):
        return float(k == n * p)
    log_ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_ways + k * math.log(p) + (n - k) * math.log1p(-p))


def cdf(k, n, p):
    """P(at most k of n)."""
    return math.fsum(probability(i, n, p) for i in range(k + 1))


def k_star(n, delta, beta):
    """The largest k with P(at most k of n) <= beta, by trying all; None if there is none."""
    total, best = [], None
    for k in range(n + 1):
        total.append(probability(k, n, delta))
        if math.fsum(total) > beta:
            return best
        best = k
    return best


def upper(k, n, beta):
    """The share p with P(at most k of n; p) = beta."""
    if k == n:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if cdf(k, n, middle) > beta:
            low = middle
        else:
            high = middle
    return high


def lower(k, n, beta):
    """The share p with P(at least k of n; p) = beta."""
    return 1.0 - upper(n - k, n, beta)


def ratio(dense, pruned):
    """||pruned - dense|| / ||dense|| of two lists of numbers; infinite where that is no finite number."""
    if not all(math.isfinite(v) for v in [*dense, *pruned]):
        return math.inf
    error = math.hypot(*(b - a for a, b in zip(dense, pruned)))
    size = math.hypot(*dense)
    if error == 0.0:
        return 0.0
    return math.inf if size == 0.0 else error / size


def epsilon(ratios, delta, beta):
    """The smallest epsilon among the ratios that at most k* of them exceed; infinite if there is none."""
    allowed = k_star(len(ratios), delta, beta)
    if allowed is None:
        return math.inf
    for candidate in sorted(ratios):
        if sum(not (r <= candidate and math.isfinite(r)) for r in ratios) <= allowed:
            return candidate
    return math.inf
