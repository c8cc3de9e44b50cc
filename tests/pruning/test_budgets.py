"""T6, T7, T10: both forms of the relaxed optimum against enumeration and duality, exact sums, numbers of draws."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from one_layer import allocate, draws_for, eps_rand, problem, relax
from oracles import budget as oracle
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.pruning.budgets import AllocationProblem, curves_of, round_to_sum

OPTIONS = {"n_outputs": 50, "delta": 1e-3, "c_constant": 3.0}
KINDS = ("plain", "heavy", "two scales", "steps", "lognormal")
TABLE = 1.05  # "paper" looks at numbers of draws half an octave apart


def some_layers(seed: int, kind: str, n_layers: int = 4, n_rows: int = 2, largest_fan_in: int = 30) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(n_layers):
        fan_in = int(torch.randint(1, largest_fan_in + 1, (1,), generator=generator))
        s = torch.rand(n_rows, fan_in, dtype=torch.float64, generator=generator) + 1e-9
        if kind == "plain":
            s = s**3 * torch.rand(n_rows, 1, dtype=torch.float64, generator=generator)
        elif kind == "heavy":
            s = s**12
        elif kind == "two scales":
            s = torch.where(torch.rand(s.shape, generator=generator) < 0.3, s, 1e-5 * s)
        elif kind == "steps":
            s = 10.0 ** (-6 * torch.randint(0, 3, s.shape, generator=generator)) * (1 + 0.1 * s)
        else:
            s = torch.exp(3 * torch.randn(s.shape, dtype=torch.float64, generator=generator))
        layers.append(s)
    return layers


def rows_of(layers: list[Tensor]) -> list[np.ndarray]:
    return [row for layer in layers for row in layer.double().numpy()]


# --- The relaxed optimum ----------------------------------------------------------------------------------------------


def groups_of(layers: list[Tensor], weights: list[Tensor], n_signs: int) -> list[np.ndarray]:
    """Rows, or the positive and then the negative weights of each row, one after the other."""
    rows = []
    for layer, weight in zip(layers, weights):
        for s, w in zip(layer.double().numpy(), weight.double().numpy()):
            rows += [s] if n_signs == 1 else [np.where(w > 0, s, 0.0), np.where(w < 0, s, 0.0)]
    return rows


def signed(layers: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layer.shape, generator=generator) for layer in layers]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_better_than_the_paper_s_optimum_by_duality(kind: str) -> None:
    """Where the multiplier's dual bound is largest it reaches the sum of bounds, up to the table and to one row."""
    for seed, share in itertools.product(range(1), (0.1, 0.6)):
        layers = some_layers(100 + seed, kind)
        budget = int(share * sum(layer.numel() for layer in layers))
        posed, rows = problem(layers, **OPTIONS), rows_of(layers)
        kept = relax(posed, budget)
        assert kept.sum() == pytest.approx(budget, rel=1e-12) and (kept <= posed.caps_R).all()
        costs = [oracle.eps_kept(row, m, **OPTIONS) for row, m in zip(rows, kept)]
        below = max(oracle.dual_bound(rows, 2.0**k, budget, **OPTIONS) for k in np.arange(-30, 16, 0.5))
        assert below <= sum(costs) <= TABLE * below + max(costs)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_layers_are_those_of_a_convex_optimum(kind: str) -> None:
    """Karush, Kuhn and Tucker: the same slope for all groups inside of their limits, a steeper one at their caps."""
    for seed, share in itertools.product(range(3), (0.03, 0.3, 0.6, 0.9)):
        layers = some_layers(200 + seed, kind, n_rows=3)
        weights = signed(layers, seed)
        budget = max(1, int(share * sum(layer.numel() for layer in layers)))
        posed = problem(layers, "layers", weights, **OPTIONS)
        kept, groups = relax(posed, budget), groups_of(layers, weights, 2)
        assert kept.sum() == pytest.approx(budget, rel=1e-12)
        open_R = posed.caps_R > 0
        assert (kept[~open_R] == 0).all() and (kept[open_R] > 0).all()

        def slope(i: int, m: float, groups: list[np.ndarray] = groups, posed: AllocationProblem = posed) -> float:
            def bound(x: float) -> float:
                return posed.price_R[i] * oracle.eps_rand(float(groups[i].sum()), x, **OPTIONS)

            return (bound(m * (1 + 1e-6)) - bound(m * (1 - 1e-6))) / (2e-6 * m)

        slopes = np.array([slope(i, kept[i]) for i in np.flatnonzero(open_R)])
        at_cap = kept[open_R] == posed.caps_R[open_R]
        if not at_cap.all():
            common = np.median(slopes[~at_cap])
            assert slopes[~at_cap] == pytest.approx(np.full((~at_cap).sum(), common), rel=1e-3)
            assert (slopes[at_cap] <= common * (1 - 1e-3 * np.sign(common))).all()


def best_of_all(posed: AllocationProblem, groups: list[np.ndarray], budget: int) -> float:
    """The least cost of all whole numbers, each at least 1 (0 costs infinity in "layers")."""
    caps = [int(cap) for cap in posed.caps_R]
    cost = [[cost_of_one(posed, groups, i, m) for m in range(cap + 1)] for i, cap in enumerate(caps)]
    return oracle.best_by_row(cost, budget)


def cost_of_one(posed: AllocationProblem, groups: list[np.ndarray], i: int, m: float) -> float:
    if posed.caps_R[i] == 0:
        return 0.0
    if posed.curves is not None:
        return oracle.eps_kept(groups[i], m, **OPTIONS)
    return float(posed.price_R[i]) * oracle.eps_rand(float(groups[i].sum()), m, **OPTIONS)


@pytest.mark.parametrize("allocation", ["layers", "paper"])
def test_whole_numbers_come_close_to_the_best_of_all(allocation: str) -> None:
    """On average within 6 % of the best of all whole numbers, tried one by one; a broken objective is not."""
    ratios, broken = [], []
    for seed in range(2):
        layers = [layer for layer in some_layers(60 + seed, "plain", n_layers=5) if layer.shape[1] >= 16]
        layers = [layers[0], *(0.01 * layer for layer in layers[1:])]
        layers[0] = layers[0].repeat(3, 1)  # layers that differ in rows and scale, so that prices matter
        weights = signed(layers, seed)
        posed = problem(layers, allocation, weights, **OPTIONS)
        groups = groups_of(layers, weights, posed.n_signs)
        for share in (0.4, 0.6):
            budget = int(share * posed.caps_R.sum())
            best = best_of_all(posed, groups, budget)
            for posed_as, found in ((posed, ratios), (backwards(posed), broken)):
                runs = [np.concatenate([x.ravel() for x in allocate(posed_as, budget, s)]) for s in range(20)]
                costs = [sum(cost_of_one(posed, groups, i, m) for i, m in enumerate(run.tolist())) for run in runs]
                found.append(min(np.mean(costs), 1e6) / best)
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.06
    assert np.mean(broken) > 1.12


def backwards(posed: AllocationProblem) -> AllocationProblem:
    """The problem with sums of sensitivities the wrong way round: small ones for large ones."""
    scale_R = (
        posed.scale_R.max() * posed.scale_R[posed.scale_R > 0].min() / np.where(posed.scale_R > 0, posed.scale_R, 1)
    )
    scale_R = np.where(posed.scale_R > 0, scale_R, 0.0)
    curves = posed.curves and curves_of(posed.worths, scale_R, posed.caps_R)
    return replace(posed, scale_R=scale_R, curves=curves)


# --- Whole numbers ----------------------------------------------------------------------------------------------------


def in_expectation(
    rounding: Callable[[np.ndarray, np.random.Generator], np.ndarray], relaxed: np.ndarray, target: int
) -> bool:
    """Whether a rounding keeps the sum, rounds each number up or down, and is right on average (|z| < 4.5)."""
    rng = np.random.default_rng(3)
    rounded = np.stack([rounding(relaxed, rng) for _ in range(2000)])
    fraction = relaxed - np.floor(relaxed)
    error = (rounded.mean(0) - relaxed) / np.sqrt(np.maximum(fraction * (1 - fraction), 1e-12) / 2000)
    return bool(
        (rounded.sum(1) == target).all()
        and (rounded >= np.floor(relaxed)).all()
        and (rounded <= np.ceil(relaxed)).all()
        and (np.abs(error) < 4.5).all()
    )


def test_rounding_keeps_the_sum_and_the_expectation() -> None:
    relaxed = np.random.default_rng(1).random(40) * 7
    relaxed[:5] = [0.0, 3.0, 2.5, 1e-4, 6.9999]
    relaxed[-1] += math.ceil(relaxed.sum()) - relaxed.sum()
    target = round(float(relaxed.sum()))
    assert in_expectation(round_to_sum, relaxed, target)

    def first_come(numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rounded = np.floor(numbers)
        rounded[np.flatnonzero(numbers > rounded)[: target - int(rounded.sum())]] += 1
        return rounded

    def no_order(numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.floor(numbers) + (rng.random(len(numbers)) < numbers - np.floor(numbers))

    assert not in_expectation(first_come, relaxed, target)
    assert not in_expectation(no_order, relaxed, target)


# --- Exact sums, limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["layers", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_exact_for_any_budget_and_seed(dtype: torch.dtype, allocation: str) -> None:
    layers = [layer.to(dtype) for layer in some_layers(11, "plain", largest_fan_in=12)]
    layers[1][:, ::2] = 0.0
    layers.append(torch.zeros(3, 6, dtype=dtype))  # a dead layer
    posed = problem(layers, allocation, signed(layers, 0), **OPTIONS)
    n_positive = int(posed.caps_R.sum())
    for seed, budget in enumerate((0, 1, 2, 7, 20, n_positive // 2, n_positive - 1, n_positive, n_positive + 3)):
        kept = allocate(posed, budget, seed)
        assert [k.shape for k in kept] == [(len(layer), posed.n_signs) for layer in layers]
        flat = np.concatenate([k.ravel() for k in kept])
        assert flat.dtype == np.int64 and int(flat.sum()) == min(budget, n_positive)
        assert (flat >= 0).all() and (flat <= posed.caps_R).all()


@pytest.mark.parametrize("allocation", ["layers", "paper"])
@pytest.mark.parametrize("seed", range(3))
def test_groups_have_a_lower_limit_and_the_others_share_the_rest(seed: int, allocation: str) -> None:
    posed = problem(some_layers(seed, "heavy", largest_fan_in=7), allocation, **OPTIONS)
    least, n_some = [(worth.max(1) > 0).astype(float) for worth in posed.worths], int((posed.caps_R > 0).sum())
    budget = n_some + (int(posed.caps_R.sum()) - n_some) // 3
    kept = allocate(posed, budget, least=least)
    assert sum(int(layer.sum()) for layer in kept) == budget
    assert all((layer.ravel() >= one).all() for layer, one in zip(kept, least))
    if (relax(posed, budget) >= np.concatenate(least)).all():  # nothing binds: the plain optimum
        assert all(map(np.array_equal, allocate(posed, budget), kept))
    assert sum(int(layer.sum()) for layer in allocate(posed, n_some // 2, least=least)) == n_some // 2
    each_its_own = allocate(posed, n_some, least=least)
    assert all(np.array_equal(layer.ravel(), one) for layer, one in zip(each_its_own, least))


@pytest.mark.parametrize("allocation", ["layers", "paper"])
def test_a_layer_worth_next_to_nothing_and_one_of_another_scale(allocation: str) -> None:
    layers = [layer * share for layer, share in zip(some_layers(15, "plain", n_rows=4), (1.0, 1e-18, 1e-26, 1e-300))]
    posed = problem(layers, allocation, **OPTIONS)
    kept = relax(posed, posed.caps_R.sum() // 4)
    assert np.isfinite(kept).all() and kept.sum() == pytest.approx(posed.caps_R.sum() // 4, rel=1e-9)
    edges = posed.edges
    assert kept[edges[0] : edges[1]].sum() > kept[edges[2] : edges[3]].sum()


def test_bad_arguments_are_refused() -> None:
    layers = [torch.rand(2, 3), torch.rand(2, 3)]
    with pytest.raises(OptionError, match="budget"):
        allocate(problem(layers, **OPTIONS), -1)
    for bad in (layers[1] * math.nan, layers[1] * math.inf, layers[1] - 2):
        with pytest.raises(DataError, match="layer 1 contains values outside"):
            problem([layers[0], bad], **OPTIONS)
    assert allocate(problem([], **OPTIONS), 5) == []


# --- T6, T7: the bound of a sampled group, and its number of draws ----------------------------------------------------


def test_eps_rand_is_the_formula() -> None:
    for total, n_draws in itertools.product((0.7, 40.0), (1.0, 13.5, 2.0**40)):
        found = eps_rand(torch.tensor([total]).double(), torch.tensor([n_draws]), **OPTIONS).item()
        assert found == pytest.approx(oracle.eps_rand(total, n_draws, *OPTIONS.values()), rel=1e-6)


@pytest.mark.parametrize("power", [0.2, 1.0, 10.0])
def test_draws_for_is_the_inverse_found_by_bisection(power: float) -> None:
    rows = torch.rand(6, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) ** power
    rows[:, ::9] = 0.0
    for kept in (1, 2, 9, 20, 24, 25, 0.3, 12.5):
        for row, found in zip(rows.numpy(), draws_for(rows, torch.full((6,), kept, dtype=torch.float64)).tolist()):
            expected = oracle.draws_for(row, kept)
            more = oracle.expected_kept(row, 1.001 * expected) - kept  # next to nothing on a plateau of U
            assert found == pytest.approx(expected, rel=max(1e-9, 1e-17 * kept / more))


def test_draws_for_at_its_ends() -> None:
    rare = [[1.0, 1e-12, 1e-12, 0.0], [1.0, 1e-300, 1e-300, 1e-300], [1.0, 5e-324, 5e-324, 0.0]]
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], *rare], dtype=torch.float64)
    found = draws_for(rows, torch.tensor([2, 2, 3, 2])).tolist()
    assert found[0] == pytest.approx(math.log(0.5) / math.log(0.75), rel=1e-12)
    # Two of three equal, very rare weights beside a certain one: 1 + 2 (1 - e^-Nq) = 2.
    assert found[1] == pytest.approx(math.log(2.0) / 1e-12, rel=1e-9)
    assert 1e299 < found[2] < math.inf  # huge, but never infinite below the cap: that would claim eps = 0
    assert math.isfinite(found[3])
