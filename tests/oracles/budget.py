"""T5-T10 written out one row and one draw at a time: float64 NumPy, slow, obvious, nothing from the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize_scalar

Row = np.ndarray  # the sensitivities of one row


def largest(scores: Sequence[np.ndarray], budget: int) -> list[np.ndarray]:
    """Masks of the `budget` largest scores: everything sorted by (score descending, layer, position)."""
    everything = [(-float(s), i, j) for i, layer in enumerate(scores) for j, s in enumerate(layer.ravel())]
    masks = [np.zeros(layer.size, dtype=bool) for layer in scores]
    for _, i, j in sorted(everything)[:budget]:
        masks[i][j] = True
    return [mask.reshape(layer.shape) for mask, layer in zip(masks, scores)]


def expected_kept(row: Row, n_draws: float) -> float:
    """U(N) of T7."""
    row = row[row > 0].astype(np.float64)
    if n_draws == 0 or len(row) == 0:
        return 0.0
    if len(row) == 1 or math.isinf(n_draws):
        return float(len(row))
    return float(sum(-math.expm1(n_draws * math.log1p(-s / row.sum())) for s in row))


def draws_for(row: Row, kept: float) -> float:
    """N(m) of T7 by bisection on the logarithm of N."""
    if kept == 0:
        return 0.0
    if kept >= (row > 0).sum():
        return math.inf
    low, high = -60.0, 690.0
    for _ in range(70):
        middle = (low + high) / 2
        if expected_kept(row, math.exp(middle)) < kept:
            low = middle
        else:
            high = middle
    return math.exp(low)


def eps_det(row: Row, kept: int, c_constant: float) -> float:
    """T5."""
    return c_constant * math.fsum(sorted(row.astype(np.float64))[: len(row) - kept])


def eps_rand(total: float, n_draws: float, n_outputs: int, delta: float, c_constant: float) -> float:
    """T6."""
    if total == 0:
        return 0.0
    if n_draws == 0:
        return math.inf
    if math.isinf(n_draws):
        return 0.0
    s = total * c_constant / 3 * math.log(16 * n_outputs / delta)
    return (s + math.sqrt(s * (s + 6 * n_draws))) / n_draws


def eps_kept(row: Row, kept: float, n_outputs: int, delta: float, c_constant: float) -> float:
    """eps_rand(N(m)): what OptAlloc adds up (T10)."""
    return eps_rand(float(row.astype(np.float64).sum()), draws_for(row, kept), n_outputs, delta, c_constant)


def hybrid_row(
    groups: Sequence[Row], kept: Sequence[int], n_outputs: int, delta: float, c_constant: float
) -> tuple[bool, float]:
    """T9 for one row of some groups: whether it is sampled, and its bound; draws are N(m), rounded down.

    Both ways are written out for every group: 0 if the group keeps all, 1 if it keeps nothing. A row's bound is its
    largest group's. If both ways have the same one, because of an empty group, the next smaller ones are compared.
    """
    bounds: dict[bool, list[float]] = {True: [], False: []}
    for row, m in zip(groups, kept):
        for is_sampled, found in bounds.items():
            if m >= (row > 0).sum():
                found.append(0.0)
            elif m == 0:
                found.append(1.0)
            elif is_sampled:
                n_draws = math.floor(draws_for(row, m) + 1e-9)
                found.append(eps_rand(math.fsum(row.astype(np.float64)), n_draws, n_outputs, delta, c_constant))
            else:
                found.append(eps_det(row, m, c_constant))
    sampled, sorted_out = (sorted(bounds[way], reverse=True) for way in (True, False))
    return sampled <= sorted_out, max(min(sampled, sorted_out))


def best_by_row(cost: Sequence[Sequence[float]], budget: int) -> float:
    """The least sum of cost[i][m_i] over all whole numbers m with sum <= budget, one row after the other.

    best[b] is the least cost of the rows so far with at most b weights.
    """
    best = [0.0] * (budget + 1)
    for row in cost:
        best = [min(best[b - m] + row[m] for m in range(min(b, len(row) - 1) + 1)) for b in range(budget + 1)]
    return best[budget]


def dual_bound(
    rows: Sequence[Row],
    multiplier: float,
    budget: int,
    n_outputs: int,
    delta: float,
    c_constant: float,
) -> float:
    """sum_i min_N (eps_rand(N) + multiplier U_i(N)) - multiplier * budget: no allocation costs less (weak duality).

    The minimum over N is taken over a fine grid, then around each of its local minima, and at the cap (N infinite).
    """
    total = -multiplier * budget
    for row in rows:
        row = row[row > 0].astype(np.float64)
        if len(row) == 0:
            continue
        rates = -np.log1p(-np.minimum(row / row.sum(), 1 - 2.0**-53))

        def value(log_n: float, row: Row = row, rates: Row = rates) -> float:
            n_draws = math.exp(log_n)
            bound = eps_rand(float(row.sum()), n_draws, n_outputs, delta, c_constant)
            return bound + multiplier * float(-np.expm1(-n_draws * rates).sum())

        grid = np.linspace(math.log(1e-9), math.log(3 / rates.min()), 300)
        values = [value(x) for x in grid]
        least = min(multiplier * len(row), min(values))
        for j in range(1, len(grid) - 1):
            if values[j] <= min(values[j - 1], values[j + 1]) and values[j] <= 1.1 * least:
                found = minimize_scalar(
                    value, bounds=(grid[j - 1], grid[j + 1]), method="bounded", options={"xatol": 1e-9}
                )
                least = min(least, float(found.fun))
        total += least
    return total


def draw_one_by_one(row: Row, kept: int, rng: np.random.Generator) -> np.ndarray:
    """Counts of draws with replacement, one after the other, until `kept` different weights were hit (T8a)."""
    edges = np.cumsum(row.astype(np.float64)) / row.astype(np.float64).sum()
    counts = np.zeros(len(row), dtype=np.int64)
    while (counts > 0).sum() < kept:
        counts[np.searchsorted(edges, rng.random(), side="right")] += 1
    return counts
