"""T4 looked at one point, one patch, one weight at a time, in float64.

A row is (its K weights, its patches on the calibration points, its patches on the holdout): `Points` of the other
oracle, one (P, K) array per point.
"""

from __future__ import annotations

import math

import numpy as np

from oracles.sensitivity import Array, Points, row_sensitivity, shares

Row = tuple[Array, Points, Points]
SLACK = 1 + 1e-9  # float64 rounding when both sides are the same number


def rows_of(weight_FK: Array, calibration: Points, holdout: Points) -> list[Row]:
    """The rows of a weight that all meet the same patches."""
    return [(w_K, calibration, holdout) for w_K in weight_FK]


def n_holding(w_K: Array, points: Points, c_constant: float, k_constant: float) -> int:
    """How many weights of a row have g_j(x) > 1/C on a share of at least 1 - exp(-1/K_s) of the points."""
    n_above = np.zeros(len(w_K))
    for patches_PK in points:
        for j in range(len(w_K)):
            g_j = max(shares(w_K, a_K)[:, j].max() for a_K in patches_PK)
            n_above[j] += g_j > 1 / c_constant * SLACK
    return sum(n / len(points) >= 1 - math.exp(-1 / k_constant) for n in n_above)


def es_failures(w_K: Array, calibration: Points, holdout: Points, c_constant: float) -> tuple[int, int]:
    """(failures of g_j(x) <= C s_j, pairs with g_j(x) > 0) over all points x of the holdout."""
    s_K = row_sensitivity(w_K, calibration, "max")
    n_failures = n_pairs = 0
    for patches_PK in holdout:
        for j in range(len(w_K)):
            g_j = max(shares(w_K, a_K)[:, j].max() for a_K in patches_PK)
            n_pairs += g_j > 0
            n_failures += g_j > c_constant * s_K[j] * SLACK
    return n_failures, n_pairs


def look(rows: list[Row], c_constant: float, k_constant: float) -> tuple[int, int, int]:
    """(weights that hold, ES failures, pairs) of a layer."""
    holding = sum(n_holding(w_K, calibration, c_constant, k_constant) for w_K, calibration, _ in rows)
    counts = [es_failures(w_K, calibration, holdout, c_constant) for w_K, calibration, holdout in rows]
    return int(holding), int(sum(f for f, _ in counts)), sum(n for _, n in counts)
