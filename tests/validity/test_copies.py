"""Simulation: copies among the holdout make no claim false more often, wherever they come from.

Three sources: few points drawn again and again; inputs of which some are frequent, each draw independent; and both, a
sample of such inputs of which every draw was then copied. Which it was cannot be seen. The rule (n counts different
points, a violation counts with every copy) holds for all; each simpler rule fails for one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles.rates import at_most
from torch import Tensor, nn

import sipp
from sipp.certificates.measures import Outcomes, outcome_counts
from sipp.results import binomial

BETA, SHARE = 0.05, 0.05
N_RUNS, N_DROPS = 2000, 500

Draws = tuple[np.ndarray, np.ndarray]  # of each point: which one it is, and whether it is a violation
Rule = Callable[[Draws], bool]  # whether it is claimed that at most SHARE of inputs are violations


def holds(false_claims: list[bool]) -> bool:
    """Whether a rate of false claims is compatible with BETA."""
    return np.mean(false_claims) <= at_most(BETA, len(false_claims))


def claims(k: int, n: int) -> bool:
    allowed = binomial.k_allowed(n, SHARE, BETA)
    return allowed is not None and k <= allowed


def the_rule(draws: Draws) -> bool:
    which, is_bad = draws
    return claims(int(is_bad.sum()), len(np.unique(which)))


def copies_are_points(draws: Draws) -> bool:
    which, is_bad = draws
    return claims(int(is_bad.sum()), len(which))


def each_point_once(draws: Draws) -> bool:
    which, is_bad = draws
    return claims(len(np.unique(which[is_bad])), len(np.unique(which)))


def both_ways(draws: Draws) -> bool:
    return copies_are_points(draws) and each_point_once(draws)


# ---- where copies come from; every true share of violations is just above SHARE


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


SOURCES = [few_points_often, frequent_inputs, frequent_and_copied]


def false_claims(rule: Rule, source: Callable[[np.random.Generator], Draws]) -> list[bool]:
    rng = np.random.default_rng(0)
    return [rule(source(rng)) for _ in range(N_RUNS)]


@pytest.mark.parametrize("source", SOURCES)
def test_claims_are_false_at_most_beta_of_the_time(source: Callable[[np.random.Generator], Draws]) -> None:
    assert holds(false_claims(the_rule, source))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (copies_are_points, few_points_often),
        (each_point_once, frequent_inputs),
        (both_ways, frequent_and_copied),
    ],
)
def test_simpler_rules_are_caught(rule: Rule, source: Callable[[np.random.Generator], Draws]) -> None:
    assert not holds(false_claims(rule, source))


def test_a_few_copies_of_good_points_cost_nothing() -> None:
    which = np.concatenate([np.arange(500), np.arange(20)])
    is_bad = which >= 490
    assert the_rule((which, is_bad)) and claims(10, 500)


# ---- T16


def false_drops(limit: Callable[[np.ndarray, np.ndarray], float], n_copies: int) -> list[bool]:
    """Points lose their class by 0.06 and gain it by 0.03; one frequent input takes most of what is gained."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(N_DROPS):
        outcome = rng.choice(3, size=60, p=[0.06, 0.03, 0.91])
        which = np.where(outcome == 1, 0, 1 + np.arange(60))
        found.append(limit(which.repeat(n_copies), outcome.repeat(n_copies)) < 0.03)
    return found


def limit_of(which: np.ndarray, outcome: np.ndarray) -> float:
    columns = (outcome == 0, outcome == 1, outcome < 2, outcome < 3, outcome < 0, outcome < 0)
    outcomes = Outcomes(*(torch.from_numpy(column).double() for column in columns))
    draws = [int(one).to_bytes(48, "little") + b"f" for one in which]
    lost, gained, _, _ = outcome_counts(outcomes, [draw[:16] * 3 + b"f" for draw in draws])
    n = len(set(draws))
    return binomial.drop_limit(lost, gained, n, BETA, n_copies=len(which) - n)


def copies_in_both(which: np.ndarray, outcome: np.ndarray) -> float:
    return binomial.drop_limit(int((outcome == 0).sum()), int((outcome == 1).sum()), len(which), BETA)


@pytest.mark.parametrize("n_copies", [1, 10])
def test_accuracy_drops_exceed_their_limit_at_most_beta_of_the_time(n_copies: int) -> None:
    assert holds(false_drops(limit_of, n_copies))
    assert holds(false_drops(copies_in_both, n_copies)) == (n_copies == 1)


# ---- the whole way: networks and points in, certificates out


class Part(nn.Module):
    """1 everywhere; with its second weight pruned away 0 where x is below a limit."""

    def __init__(self, *, is_pruned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0 if is_pruned else 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x < 1.001 * SHARE, self.weight[1], self.weight[0])


def certified(seed: int, n_different: int, n_draws: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n_different, 1, generator=generator)
    x = x[torch.randint(0, n_different, (n_draws,), generator=generator)]
    pair = Part(is_pruned=False), Part(is_pruned=True)
    return sipp.certify(*pair, x, epsilon=0.5, share=SHARE, confidence=1 - BETA, progress=False).verdict == "certified"


def test_certificates_on_points_drawn_again_and_again() -> None:
    assert not any(certified(seed, 20, 300) for seed in range(10))
    assert holds([certified(seed, 70, 300) for seed in range(60)])


def test_certificates_that_count_copies_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = itertools.count()  # a hash of its own for every point, also for a copy
    monkeypatch.setattr(
        "sipp.inputs.data.Batch.hashes", lambda batch: [str(next(fresh)) for _ in range(batch.n_points)]
    )
    assert not holds([certified(seed, 70, 300) for seed in range(60)])
    assert not holds([certified(seed, 20, 300) for seed in range(60)])
