"""Certificates (T14-T16) are false no more often than they say, and the same simulations catch rules that look right.

Every true rate lies just beyond what is allowed, so that each claim is a false one, which BETA of the runs may make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles.claims import Claim
from torch import Tensor, nn

import sipp
from sipp.certificates.claims import certified_epsilon, n_violations
from sipp.certificates.measures import Outcomes, outcome_counts, point_ratios
from sipp.results import binomial

N_RUNS = 3000
SHARE, BETA, EPSILON = 0.05, 0.05, 0.1
BARELY_BAD = SHARE * (1 + 1e-6)
SIZES = (59, 181)  # BinCDF(k*; n, SHARE) is just below BETA, so nothing but the exact rule survives
CLAIMS: dict[str, Claim] = {}


def allowed(n: int) -> int:
    found = binomial.k_allowed(n, SHARE, BETA)
    assert found is not None
    return found


# --- T14, the share is fixed: epsilon is chosen on the points ---------------------------------------------------------


def false_epsilons(n: int) -> Callable[[Any], np.ndarray]:
    ratios = np.random.default_rng(1).exponential(size=(N_RUNS, n))
    return lambda rule: np.exp(-rule(ratios)) > SHARE  # P(ratio > epsilon) is known


def certified(ratios: np.ndarray) -> np.ndarray:
    return certified_epsilon(torch.from_numpy(ratios), SHARE, BETA).numpy()


def one_more_allowed(ratios: np.ndarray) -> np.ndarray:
    n = ratios.shape[-1]
    return np.sort(ratios)[:, n - 1 - (allowed(n) + 1)]


def tied_count_once(ratios: np.ndarray) -> np.ndarray:
    return np.array([np.unique(row)[::-1][: allowed(ratios.shape[-1]) + 1][-1] for row in ratios])


def false_among_ties(rule: Any) -> np.ndarray:
    """Ratios are 0, 0.1 or 0.2, the last with a share just beyond SHARE: any epsilon below 0.2 is false."""
    probabilities = [0.5, 0.5 - BARELY_BAD, BARELY_BAD]
    return rule(np.random.default_rng(1).choice([0.0, 0.1, 0.2], p=probabilities, size=(N_RUNS, 181))) < 0.2


for n in SIZES:
    broken: dict[str, Any] = {
        "one more allowed": one_more_allowed,
        "observed quantile": lambda ratios: np.quantile(ratios, 1 - SHARE, axis=-1),
    }
    CLAIMS[f"epsilon, n={n}"] = Claim(false_epsilons(n), certified, broken)
CLAIMS["epsilon among ties"] = Claim(false_among_ties, certified, {"tied count once": tied_count_once})


def test_the_reported_epsilon_is_not_needlessly_large() -> None:
    assert false_epsilons(SIZES[0])(certified).mean() > BETA / 2


# --- T14, epsilon is fixed: from the outputs of two networks to a verdict ---------------------------------------------


def false_verdicts(n: int, bad_value: float) -> Callable[[Any], np.ndarray]:
    """Certified or not in each run, for a network that is off (or not finite) on a share BARELY_BAD of inputs."""
    rng = np.random.default_rng(3)
    dense = torch.from_numpy(rng.normal(size=(N_RUNS * n, 2)))
    pruned = dense * (1 + EPSILON / 2)
    pruned[torch.from_numpy(rng.random(N_RUNS * n) < BARELY_BAD), 1] = bad_value
    return lambda rule: rule(dense, pruned, n) <= allowed(n)


def counted(dense: Tensor, pruned: Tensor, n: int) -> np.ndarray:
    return n_violations(point_ratios(dense, pruned).reshape(N_RUNS, n), EPSILON).numpy()


def nan_is_fine(dense: Tensor, pruned: Tensor, n: int) -> np.ndarray:
    error, size = (pruned - dense).norm(dim=1), dense.norm(dim=1)
    return (error > EPSILON * size).reshape(N_RUNS, n).sum(dim=1).numpy()  # NaN > x is False, as NaN <= x is


for bad_value in (1e6, math.nan, math.inf):
    broken = {"one fewer": lambda *given: counted(*given) - 1}
    broken |= {"NaN is fine": nan_is_fine} if math.isnan(bad_value) else {}
    CLAIMS[f"verdict, {bad_value}"] = Claim(false_verdicts(59, bad_value), counted, broken)

# --- T15: the sparsest network within a tolerance ---------------------------------------------------------------------

N_LEVELS, N_POINTS = 30, 181


def level_rates(n_good: int) -> np.ndarray:
    """True violation rates, dense -> sparse: some levels clearly good, then a plateau just beyond what is allowed."""
    return np.concatenate([np.linspace(0.0, SHARE / 5, n_good), np.full(N_LEVELS - n_good, BARELY_BAD)])


def false_choices(rates: np.ndarray, *, shares_points: bool = False) -> Callable[[Any], np.ndarray]:
    """Each level passes at full BETA or not; errors are independent between levels, or nested (shared points)."""
    rng = np.random.default_rng(4)
    if shares_points:
        violations = (rng.random((N_RUNS, N_POINTS, 1)) < rates).sum(axis=1)
    else:
        violations = rng.binomial(N_POINTS, rates, size=(N_RUNS, N_LEVELS))
    passed = violations <= allowed(N_POINTS)

    def simulate(search: Any) -> np.ndarray:
        chosen = np.array([search(passes) for passes in passed])
        return (chosen >= 0) & (rates[np.maximum(chosen, 0)] > SHARE)

    return simulate


def fixed_sequence(passes: np.ndarray) -> int:
    return next((i for i, passed in enumerate(passes) if not passed), len(passes)) - 1


def best_of_all(passes: np.ndarray) -> int:
    return int(np.flatnonzero(passes)[-1]) if passes.any() else -1


def bisection(passes: np.ndarray) -> int:
    good, bad = -1, len(passes)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes[middle] else (good, middle)
    return good


for n_good in (0, 8, 20):
    searches = {"bisection": bisection, "best of all": best_of_all}
    CLAIMS[f"levels, {n_good} good"] = Claim(false_choices(level_rates(n_good)), fixed_sequence, searches)
    nested = false_choices(level_rates(n_good), shares_points=True)
    CLAIMS[f"nested levels, {n_good} good"] = Claim(nested, fixed_sequence)

# --- Limits of a rate, and of a drop in accuracy (T16) ----------------------------------------------------------------


def false_limits(rate: float) -> Callable[[Any], np.ndarray]:
    drawn = np.random.default_rng(6).binomial(59, rate, size=N_RUNS)
    return lambda limit: np.array([limit(k, 59) for k in range(60)])[drawn] < rate


def limit_of_rate(k: int, n: int) -> float:
    return binomial.upper_limit(k, n, BETA)


def one_off(k: int, n: int) -> float:
    return 0.0 if k == 0 else limit_of_rate(k - 1, n)


def wald(k: int, n: int) -> float:
    return k / n + 1.645 * math.sqrt(k / n * (1 - k / n) / n)


def false_drops(lost: float, gained: float, n: int = 100) -> Callable[[Any], np.ndarray]:
    counts = np.random.default_rng(8).multinomial(n, [lost, gained, 1 - lost - gained], size=N_RUNS)
    seen, run = np.unique(counts, axis=0, return_inverse=True)
    return lambda limit: np.array([limit(int(b), int(c), n) for b, c, _ in seen])[run] < lost - gained


def limit_of_drop(b: int, c: int, n: int) -> float:
    return binomial.drop_limit(b, c, n, BETA)


for k in (0, 7, 24):
    rate = limit_of_rate(k, 59) * (1 + 1e-6)  # just above a limit that k gives: the hardest rates
    CLAIMS[f"limit above {k}"] = Claim(false_limits(rate), limit_of_rate, {"one off": one_off})
CLAIMS["limit of a small rate"] = Claim(false_limits(0.0505), limit_of_rate, {"normal approximation": wald})
for lost, gained in ((0.1, 0.04), (0.06, 0.0), (0.02, 0.3)):
    broken = {"as observed": lambda b, c, n: (b - c) / n}
    broken |= {"exchanged": lambda b, c, n: limit_of_drop(c, b, n)} if lost > gained else {}
    CLAIMS[f"drop of {lost} - {gained}"] = Claim(false_drops(lost, gained), limit_of_drop, broken)

# --- Copies among the holdout -----------------------------------------------------------------------------------------
#
# Three sources: few points drawn again and again; inputs of which some are frequent, each draw independent; and both, a
# sample of such inputs of which every draw was then copied. Which it was cannot be seen. The rule (n counts different
# points, a violation counts with every copy) holds for all; each simpler rule fails for one of them.

Draws = tuple[np.ndarray, np.ndarray]  # of each point: which one it is, and whether it is a violation


def claims(k: int, n: int) -> bool:
    found = binomial.k_allowed(n, SHARE, BETA)
    return found is not None and k <= found


def the_rule(draws: Draws) -> bool:
    which, is_bad = draws
    return claims(int(is_bad.sum()), len(np.unique(which)))


def copies_are_points(draws: Draws) -> bool:
    which, is_bad = draws
    return claims(int(is_bad.sum()), len(which))


def each_point_once(draws: Draws) -> bool:
    which, is_bad = draws
    return claims(len(np.unique(which[is_bad])), len(np.unique(which)))


def few_points_often(rng: np.random.Generator) -> Draws:
    is_bad = rng.random(60) < 1.001 * SHARE
    which = rng.integers(0, 60, 1000)
    return which, is_bad[which]


def frequent_inputs(rng: np.random.Generator) -> Draws:
    """Two inputs are frequent, together barely too frequent, and bad; all others differ, and are good."""
    which = np.where(rng.random(400) < 1.001 * SHARE, rng.integers(0, 2, 400), 2 + np.arange(400))
    return which, which < 2


def frequent_and_copied(rng: np.random.Generator) -> Draws:
    """One input is barely too frequent, and bad; a sample of 100 is then copied ten times."""
    which = np.where(rng.random(100) < 1.001 * SHARE, 0, 1 + np.arange(100)).repeat(10)
    return which, which == 0


def claimed_by(source: Callable[[np.random.Generator], Draws]) -> Callable[[Any], list[bool]]:
    rng = np.random.default_rng(0)
    drawn = [source(rng) for _ in range(2000)]
    return lambda rule: [rule(draws) for draws in drawn]


for source, name, simpler in (
    (few_points_often, "copies are points", copies_are_points),
    (frequent_inputs, "each point once", each_point_once),
    (frequent_and_copied, "both ways", lambda draws: copies_are_points(draws) and each_point_once(draws)),
):
    CLAIMS[source.__name__] = Claim(claimed_by(source), the_rule, {name: simpler})


def false_drops_of_copies(limit: Any) -> list[bool]:
    """Points lose their class by 0.06 and gain it by 0.03; one frequent input takes most of what is gained."""
    rng, found = np.random.default_rng(1), []
    for _ in range(500):
        outcome = rng.choice(3, size=60, p=[0.06, 0.03, 0.91])
        which = np.where(outcome == 1, 0, 1 + np.arange(60))
        found.append(limit(which.repeat(10), outcome.repeat(10)) < 0.03)
    return found


def drop_of_copies(which: np.ndarray, outcome: np.ndarray) -> float:
    columns = (outcome == 0, outcome == 1, outcome < 2, outcome < 3, outcome < 0, outcome < 0)
    outcomes = Outcomes(*(torch.from_numpy(column).double() for column in columns))
    lost, gained, _, _ = outcome_counts(outcomes, [str(one) for one in which])
    n = len(np.unique(which))
    return binomial.drop_limit(lost, gained, n, BETA, n_copies=len(which) - n)


def copies_in_both(which: np.ndarray, outcome: np.ndarray) -> float:
    return binomial.drop_limit(int((outcome == 0).sum()), int((outcome == 1).sum()), len(which), BETA)


CLAIMS["drop of copies"] = Claim(false_drops_of_copies, drop_of_copies, {"copies in both": copies_in_both})


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_false_at_most_beta_of_the_time_and_broken_ones_are_caught(name: str) -> None:
    CLAIMS[name].check()


# --- The whole way: networks and points in, certificates out ----------------------------------------------------------


class Part(nn.Module):
    """1 everywhere; with its second weight pruned away 0 where x is below a limit."""

    def __init__(self, *, is_pruned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0 if is_pruned else 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x < 1.001 * SHARE, self.weight[1], self.weight[0])


def certified_again_and_again(_: None) -> list[bool]:
    found = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(70, 1, generator=generator)[torch.randint(0, 70, (300,), generator=generator)]
        pair = Part(is_pruned=False), Part(is_pruned=True)
        made = sipp.certify(*pair, x, epsilon=0.5, share=SHARE, confidence=1 - BETA, progress=False)
        found.append(made.verdict == "certified")
    return found


def test_certificates_on_points_drawn_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_way = Claim(certified_again_and_again, None)
    whole_way.check()
    fresh = itertools.count()  # a hash of its own for every point, also for a copy
    hashes = "sipp.inputs.data.Batch.hashes"
    monkeypatch.setattr(hashes, lambda batch: [str(next(fresh)) for _ in range(batch.n_points)])
    assert whole_way.is_false_too_often(None)


# --- T15: a walk over levels that stops at the first failure ----------------------------------------------------------

N_AXES = 8
LEVELS = tuple((N_AXES + 1 - j) / (N_AXES + 1) for j in range(1, N_AXES))


def in_order() -> nn.Module:
    """Its weights go one after another; the last, of what all inputs have, stays."""
    model = nn.Linear(N_AXES + 1, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([*(1 + 0.01 * j for j in range(N_AXES)), 10.0])[None])
    return model


def with_failures(n: int, seed: int) -> Tensor:
    """A share of inputs just beyond SHARE fails at level j and at no other: weights j and j + 1 cancel in them."""
    generator = torch.Generator().manual_seed(seed)
    kind = (torch.rand(n, generator=generator) / BARELY_BAD).long()
    x = nn.functional.one_hot(torch.full((n,), N_AXES)).float()
    for j in range(N_AXES - 1):
        x[kind == j, j], x[kind == j, j + 1] = 1.0, -1.0
    return x * (1 + torch.rand(n, 1, generator=generator))


def sparsest_level(levels: tuple[float, ...], seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a level is certified, which is false at each of them."""
    data = nn.functional.one_hot(torch.full((20,), N_AXES)) * torch.linspace(1, 2, 20)[:, None]
    monkeypatch.setattr("sipp.verbs.prune_to.levels_of", lambda n: levels)
    found = sipp.prune_to(
        in_order(),
        data,
        with_failures(59, seed),
        epsilon=0.05,
        share=SHARE,
        method="magnitude",
        progress=False,
    )
    return found.keep < 1


@pytest.mark.filterwarnings("ignore")
def test_a_walk_is_false_no_more_often_than_one_level_and_the_best_of_all_levels_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def walks(is_best_of_all: bool) -> list[bool]:
        alone = [(level,) for level in LEVELS] if is_best_of_all else [LEVELS]
        return [any(sparsest_level(levels, seed, monkeypatch) for levels in alone) for seed in range(200)]

    Claim(walks, False, {"every level is tested": True}, rate=BETA).check()
