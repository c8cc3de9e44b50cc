"""By simulation: T6 holds at its probability, the estimate is unbiased, T8a draws like drawing one by one.

Each claim is a function that says whether it holds for a way of sampling: it holds for ours and fails for broken ones.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from one_layer import draws_for, eps_rand, sparsify
from oracles import budget as oracle
from oracles.claims import Claim
from scipy.stats import chi2_contingency
from torch import Tensor

from sipp.pruning import budgets, sampling
from sipp.pruning.rows import largest_in_rows

Reweighting = Callable[[Tensor, Tensor, Tensor], Tensor]  # weights, counts, shares -> new weights
Sampler = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # shares, kept, generator -> counts


def reweighted(weight: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    """w^_j = n_j w_j / (N q_j) of T8."""
    return torch.where(counts > 0, weight * counts / (counts.sum(1, keepdim=True) * share), 0.0)


def draw_fixed(share: Tensor, n_draws: Tensor, generator: torch.Generator) -> Tensor:
    return torch.from_numpy(sampling.draw_fixed(share.numpy(), n_draws.numpy(), seeded(generator)))


def draw_until(share: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
    return torch.from_numpy(sampling.draw_until(share.numpy(), kept.numpy(), seeded(generator)))


def seeded(generator: torch.Generator) -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))


def without_shares(weight: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    return weight * counts / counts.sum(1, keepdim=True)


def without_counts(weight: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    return weight * (counts > 0)


def by_presence(weight: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    return weight * (counts > 0) / (counts.sum(1, keepdim=True) * share)


# ------------------------------------------------------------------------------------------------------------------ T6

N_RUNS, DELTA, N_PATCHES, KEPT = 4000, 0.05, 5, 80


def positive_problem() -> tuple[Tensor, Tensor, Tensor]:
    """Weights (K), patches (P x K) and sensitivities (K) for which the ES inequality holds there with C = 1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(120, dtype=torch.float64, generator=generator) ** 2
    patches = torch.rand(N_PATCHES, 120, dtype=torch.float64, generator=generator) + 0.2
    terms = weight * patches
    return weight, patches, (terms / terms.sum(1, keepdim=True)).amax(0)


def beyond_t6(reweighting: Reweighting) -> np.ndarray:
    """In which of the runs any patch errs by more than T6 allows, for numbers of draws fixed before."""
    weight, patches, sensitivity = positive_problem()
    share = (sensitivity / sensitivity.sum()).expand(N_RUNS, -1)
    n_draws = draws_for(sensitivity[None], torch.tensor([KEPT])).ceil()
    eps = eps_rand(sensitivity.sum()[None], n_draws, n_outputs=N_PATCHES, delta=DELTA, c_constant=1.0)
    assert float(eps) < 0.75  # the statement says something
    counts = draw_fixed(share, n_draws.expand(N_RUNS), torch.Generator().manual_seed(1))
    exact, estimate = patches @ weight, reweighting(weight.expand(N_RUNS, -1), counts, share) @ patches.T
    return ((estimate - exact).abs() > eps * exact).any(1).numpy()


def beyond_rows(factor: float) -> np.ndarray:
    """The same through `sparsify`, with all rows the same: does its eps bound the error of each?"""
    weight, patches, sensitivity = positive_problem()
    bound = {"n_outputs": N_PATCHES, "delta": DELTA, "c_constant": 1.0}
    given = weight.expand(N_RUNS, -1), sensitivity.expand(N_RUNS, -1), torch.full((N_RUNS,), KEPT)
    result = sparsify(*given, method="rand", draws="fixed", seed=2, **bound)
    exact, estimate = patches @ weight, result.values_FK @ patches.T
    return ((estimate - exact).abs() > factor * result.eps_F[:, None] * exact).any(1).numpy()


def beyond_quadrants(factor: float) -> np.ndarray:
    """Rows with weights of both signs, which are drawn apart: the larger bound of both holds in all quadrants."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(160, dtype=torch.float64, generator=generator)
    patches = torch.rand(N_PATCHES, 160, dtype=torch.float64, generator=generator) + 0.2
    sums, terms = [(weight * is_sign) @ patches.T for is_sign in (weight > 0, weight < 0)], weight * patches
    sensitivity = torch.where(weight > 0, terms / sums[0][:, None], terms / sums[1][:, None]).amax(0)
    found = sampling.sparsify(
        weight.expand(N_RUNS, -1),
        np.tile(budgets.groups_of(weight[None], sensitivity[None], 2), (N_RUNS, 1)),
        np.tile([[60, 30]], (N_RUNS, 1)),
        is_hybrid=False,
        draws="fixed",
        scale=budgets.sampling_constant(n_outputs=N_PATCHES, delta=DELTA, c_constant=1.0),
        c_constant=1.0,
        rng=np.random.default_rng(1),
    )
    estimates = [(found.values_FK * is_sign) @ patches.T for is_sign in (weight > 0, weight < 0)]
    worst = torch.stack([((z - exact) / exact).abs().amax(1) for z, exact in zip(estimates, sums)])
    return (worst.amax(0) > factor * found.eps_F).numpy()


T6 = {
    "formula": Claim(
        beyond_t6,
        reweighted,
        {"without shares": without_shares, "1.8 times": lambda *given: 1.8 * reweighted(*given)},
        DELTA,
    ),
    # a bound that could be ten times smaller would not notice a mistake
    "rows": Claim(beyond_rows, 1.0, {"a tenth": 0.1}, DELTA),
    "quadrants": Claim(beyond_quadrants, 1.0, {"a tenth": 0.1}, DELTA),
}


@pytest.mark.parametrize("name", T6)
def test_t6_holds_at_its_probability(name: str) -> None:
    T6[name].check()


# ------------------------------------------------------------------------------------------------------------ unbiased


def is_unbiased(reweighting: Reweighting) -> bool:
    """Whether the mean over many samples is the weight itself, for each weight (|z| < 4.5)."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(12, dtype=torch.float64, generator=generator)
    share = torch.rand(12, dtype=torch.float64, generator=generator) ** 2
    share = (share / share.sum()).expand(20_000, -1)
    counts = draw_fixed(share, torch.full((20_000,), 9.0, dtype=torch.float64), generator)
    values = reweighting(weight.expand(20_000, -1), counts, share)
    z = (values.mean(0) - weight) / (values.std(0) / math.sqrt(20_000))
    return bool((z.abs() < 4.5).all())


def test_the_estimate_is_unbiased() -> None:
    assert is_unbiased(reweighted)
    assert not is_unbiased(without_shares)
    assert not is_unbiased(without_counts)
    assert not is_unbiased(by_presence)


# -------------------------------------------------------------------------------------------------- laws of the counts


def same_law(first: np.ndarray, second: np.ndarray) -> float:
    """The smallest p-value of chi-square tests that two samples of counts (runs x K) have the same law.

    Compared are the number of draws, each column's count, and which columns were hit.
    """
    pattern = 2 ** np.arange(first.shape[1])
    statistics = [lambda c: c.sum(1), lambda c: (c > 0) @ pattern]
    statistics += [lambda c, j=j: c[:, j] for j in range(first.shape[1])]
    return min(_chi_square(statistic(first), statistic(second)) for statistic in statistics)


def _chi_square(first: np.ndarray, second: np.ndarray, least: int = 12) -> float:
    values, index = np.unique(np.concatenate([first, second]), return_inverse=True)
    table = np.zeros((2, len(values)))
    np.add.at(table, (np.repeat([0, 1], [len(first), len(second)]), index.ravel()), 1)
    common = table.sum(0) >= least
    table = np.column_stack([table[:, common], table[:, ~common].sum(1)])
    table = table[:, table.sum(0) > 0]
    return float(chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0


SHARES = np.array([0.45, 0.3, 0.15, 0.07, 0.03, 0.0])
UNTIL_RUNS = 8000


def counts_of(sampler: Sampler, kept: int) -> np.ndarray:
    share = torch.from_numpy(SHARES).expand(UNTIL_RUNS, -1)
    return sampler(share, torch.full((UNTIL_RUNS,), kept), torch.Generator().manual_seed(4)).numpy()


def arrivals_until(more: Callable[[Tensor, Tensor, Tensor], Tensor], first: float = 1.0) -> Sampler:
    """T8a written out with another mean for the counts after the first one: what a mistake would look like."""

    def sampler(share: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
        arrival = torch.empty_like(share).exponential_(generator=generator) / share
        arrival = torch.where(share > 0, arrival, math.inf)
        mask = largest_in_rows(-arrival, kept)
        tau = torch.where(mask, arrival, 0.0).amax(1, keepdim=True)
        rate = torch.where(mask, more(share, tau, arrival), 0.0)
        return mask * (first + torch.poisson(rate.clamp(min=0.0), generator=generator))

    return sampler


def test_until_draws_as_one_by_one() -> None:
    rng = np.random.default_rng(5)
    for kept in (1, 3, 4):
        one_by_one = np.array([oracle.draw_one_by_one(SHARES, kept, rng) for _ in range(UNTIL_RUNS)])
        assert same_law(counts_of(draw_until, kept), one_by_one) > 1e-3
        if kept > 1:
            whole_time = arrivals_until(lambda share, tau, arrival: share * tau)  # forgets that the first hit came late
            assert same_law(counts_of(whole_time, kept), one_by_one) < 1e-6
            rest_only = arrivals_until(lambda share, tau, arrival: tau - arrival)  # forgets the share
            assert same_law(counts_of(rest_only, kept), one_by_one) < 1e-6
            no_repeats = arrivals_until(lambda share, tau, arrival: 0.0 * share)  # each weight once
            assert same_law(counts_of(no_repeats, kept), one_by_one) < 1e-6
    right = arrivals_until(lambda share, tau, arrival: share * (tau - arrival))
    assert same_law(counts_of(right, 4), one_by_one) > 1e-3  # the broken ones fail for what is broken in them


def test_fixed_draws_are_multinomial() -> None:
    rng = np.random.default_rng(6)
    for n_draws in (1, 4, 60):
        reference = rng.multinomial(n_draws, SHARES, size=UNTIL_RUNS)

        def fixed(share: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
            return draw_fixed(share, kept.double(), generator)

        def independent(share: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
            return torch.poisson(share * kept[:, None], generator=generator)  # the right mean, no fixed sum

        def flattened(share: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
            return draw_fixed(share.sqrt() / share.sqrt().sum(1, keepdim=True), kept.double(), generator)

        assert same_law(counts_of(fixed, n_draws), reference) > 1e-3
        assert same_law(counts_of(independent, n_draws), reference) < 1e-6
        assert same_law(counts_of(flattened, n_draws), reference) < 1e-6


def test_many_draws_have_the_right_mean_and_spread() -> None:
    share = torch.from_numpy(SHARES).expand(4000, -1)
    n_draws = 10.0**9
    counts = draw_fixed(share, torch.full((4000,), n_draws, dtype=torch.float64), torch.Generator().manual_seed(7))
    mean, spread = n_draws * SHARES[:5], np.sqrt(n_draws * SHARES[:5] * (1 - SHARES[:5]))
    z = (counts.mean(0)[:5].numpy() - mean) / (spread / math.sqrt(4000))
    assert (np.abs(z) < 4.5).all()
    assert (np.abs(counts.std(0)[:5].numpy() / spread - 1) < 0.06).all()
    assert (counts[:, 5] == 0).all()
