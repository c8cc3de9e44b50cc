"""Simulation: certificates are false no more often than they say, and the same checks catch rules that look right."""

import itertools
import math

import numpy as np
import pytest
import torch
from oracles.rates import at_most

from sipp.certificates.claims import certified_epsilon, n_violations
from sipp.certificates.measures import point_ratios
from sipp.results import binomial

N_RUNS = 4000
DELTA = 0.05
BETA = 0.05
EPSILON = 0.1
BARELY_BAD = DELTA * (1 + 1e-6)  # the smallest true rate for which a certificate is false: the hardest case
SIZES = (59, 181)  # BinCDF(k*; n, DELTA) is just below BETA, so nothing but the exact rule survives


def holds(false_claims):
    """Whether a rate of false claims is compatible with BETA."""
    false_claims = np.asarray(false_claims)
    assert false_claims.size >= 2000
    return false_claims.mean() <= at_most(BETA, false_claims.size)


# ---- T14, delta fixed: epsilon is chosen on the points


def false_epsilons(rule, n, seed):
    ratios = np.random.default_rng(seed).exponential(size=(N_RUNS, n))
    return np.exp(-rule(ratios)) > DELTA  # P(ratio > epsilon) is known


def certified(ratios):
    return certified_epsilon(torch.from_numpy(ratios), DELTA, BETA).numpy()


def one_more_allowed(ratios):
    n = ratios.shape[-1]
    return np.sort(ratios)[:, n - 1 - (binomial.k_allowed(n, DELTA, BETA) + 1)]


def observed_quantile(ratios):
    return np.quantile(ratios, 1 - DELTA, axis=-1)


@pytest.mark.parametrize("n", SIZES)
def test_the_reported_epsilon_is_too_small_at_most_beta_of_the_time(n):
    assert holds(false_epsilons(certified, n, seed=1))
    assert not holds(false_epsilons(one_more_allowed, n, seed=1))
    assert not holds(false_epsilons(observed_quantile, n, seed=1))


def test_the_reported_epsilon_is_not_needlessly_large():
    false = false_epsilons(certified, SIZES[0], seed=2)
    assert false.mean() > BETA / 2


# ---- T14, epsilon fixed: from outputs of two networks to a verdict, with outputs that are not finite


def false_verdicts(count, n, bad_value, seed, extra=0):
    """Certified or not in each run, for a network that is off (or not finite) on a share BARELY_BAD of inputs."""
    rng = np.random.default_rng(seed)
    dense = torch.from_numpy(rng.normal(size=(N_RUNS * n, 2)))
    pruned = dense * (1 + EPSILON / 2)
    pruned[torch.from_numpy(rng.random(N_RUNS * n) < BARELY_BAD), 1] = bad_value
    return count(dense, pruned, n) <= binomial.k_allowed(n, DELTA, BETA) + extra


def real_count(dense, pruned, n):
    return n_violations(point_ratios(dense, pruned).reshape(N_RUNS, n), EPSILON).numpy()


def nan_is_fine(dense, pruned, n):
    error, size = (pruned - dense).norm(dim=1), dense.norm(dim=1)
    return (error > EPSILON * size).reshape(N_RUNS, n).sum(dim=1).numpy()  # NaN > x is False, as NaN <= x is


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bad_value", [1e6, math.nan, math.inf])
def test_bad_networks_are_certified_at_most_beta_of_the_time(n, bad_value):
    assert holds(false_verdicts(real_count, n, bad_value, seed=3))
    assert not holds(false_verdicts(real_count, n, bad_value, seed=3, extra=1))
    assert holds(false_verdicts(nan_is_fine, n, bad_value, seed=3)) == (not math.isnan(bad_value))


# ---- T15: the sparsest network within a tolerance


N_LEVELS = 30
N_POINTS = 181


def level_rates(n_good):
    """True violation rates, dense -> sparse: some levels clearly good, then a plateau just beyond what is allowed."""
    return np.concatenate([np.linspace(0.0, DELTA / 5, n_good), np.full(N_LEVELS - n_good, BARELY_BAD)])


def levels_passed(rates, seed, shared_points):
    """Runs x levels: does the level pass at full beta? Errors independent between levels, or nested (shared points)."""
    rng = np.random.default_rng(seed)
    if shared_points:
        worst = rng.random((N_RUNS, N_POINTS, 1))
        violations = (worst < rates).sum(axis=1)
    else:
        violations = rng.binomial(N_POINTS, rates, size=(N_RUNS, N_LEVELS))
    return violations <= binomial.k_allowed(N_POINTS, DELTA, BETA)


def fixed_sequence(passes):
    return next((i for i, passed in enumerate(passes) if not passed), len(passes)) - 1


def best_of_all(passes):
    return int(np.flatnonzero(passes)[-1]) if passes.any() else -1


def bisection(passes):
    good, bad = -1, len(passes)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes[middle] else (good, middle)
    return good


def false_choices(search, rates, seed, shared_points=False):
    chosen = np.array([search(passes) for passes in levels_passed(rates, seed, shared_points)])
    return (chosen >= 0) & (rates[np.maximum(chosen, 0)] > DELTA)


@pytest.mark.parametrize(("n_good", "shared_points"), [*itertools.product((0, 8, 20), (False, True))])
def test_fixed_sequence_testing_is_false_at_most_beta_of_the_time(n_good, shared_points):
    assert holds(false_choices(fixed_sequence, level_rates(n_good), 4, shared_points))


@pytest.mark.parametrize("search", [bisection, best_of_all])
@pytest.mark.parametrize("n_good", [0, 8, 20])
def test_searching_on_the_holdout_is_caught(search, n_good):
    assert not holds(false_choices(search, level_rates(n_good), 4))


def test_fixed_sequence_testing_finds_the_sparsest_clearly_good_level():
    rates = np.concatenate([np.full(10, DELTA / 20), np.full(N_LEVELS - 10, 0.5)])
    chosen = [fixed_sequence(passes) for passes in levels_passed(rates, 5, False)]
    assert np.mean(np.array(chosen) == 9) > 0.99


# ---- limits and band


def false_limits(limit, n, rate, seed):
    table = np.array([limit(k, n) for k in range(n + 1)])
    return table[np.random.default_rng(seed).binomial(n, rate, size=N_RUNS)] < rate


def wald_limit(k, n):
    return k / n + 1.645 * math.sqrt(k / n * (1 - k / n) / n)


def one_off_limit(k, n):
    return 0.0 if k == 0 else binomial.upper_limit(k - 1, n, BETA)


@pytest.mark.parametrize("k", [0, 7, 24])
def test_upper_limits_are_too_low_at_most_beta_of_the_time(k):
    rate = binomial.upper_limit(k, 59, BETA) * (1 + 1e-6)  # just above a limit that k gives: the hardest rates
    assert holds(false_limits(lambda k, n: binomial.upper_limit(k, n, BETA), 59, rate, seed=6))
    assert not holds(false_limits(one_off_limit, 59, rate, seed=6))


def test_the_normal_approximation_is_caught():
    assert not holds(false_limits(wald_limit, 59, 0.0505, seed=6))


# ---- T16


def false_drops(limit, lost, gained, n, seed):
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, [lost, gained, 1 - lost - gained], size=N_RUNS)
    seen, run = np.unique(counts, axis=0, return_inverse=True)
    return np.array([limit(int(b), int(c), n) for b, c, _ in seen])[run] < lost - gained


@pytest.mark.parametrize(("lost", "gained"), [(0.1, 0.04), (0.06, 0.0), (0.02, 0.3)])
def test_accuracy_drops_exceed_their_limit_at_most_beta_of_the_time(lost, gained):
    def label_free(b, c, n):
        return binomial.upper_limit(b + c, n, BETA)

    assert holds(false_drops(lambda b, c, n: binomial.drop_limit(b, c, n, BETA), lost, gained, 100, seed=8))
    assert holds(false_drops(label_free, lost, gained, 100, seed=8))
    assert not holds(false_drops(lambda b, c, n: (b - c) / n, lost, gained, 100, seed=8))
    if lost > gained:
        assert not holds(false_drops(lambda b, c, n: binomial.drop_limit(c, b, n, BETA), lost, gained, 100, seed=8))
