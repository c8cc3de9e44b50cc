"""Least squares without whole groups of inputs, by definition: every candidate is solved anew (T23)."""

from __future__ import annotations

import numpy as np


def objective(x: np.ndarray, t: np.ndarray, w: np.ndarray, lam: float, v: np.ndarray) -> float:
    """||T - X V||^2 + lam ||V - W||^2."""
    return float(((t - x @ v) ** 2).sum() + lam * ((v - w) ** 2).sum())


def fit_without(x: np.ndarray, t: np.ndarray, w: np.ndarray, lam: float, gone: list[int]) -> np.ndarray:
    """The V that minimises the objective among those whose rows `gone` are 0."""
    left = [k for k in range(x.shape[1]) if k not in gone]
    v = np.zeros_like(w)
    system = x[:, left].T @ x[:, left] + lam * np.eye(len(left))
    v[left] = np.linalg.solve(system, x[:, left].T @ t + lam * w[left])
    return v


def backward(
    x: np.ndarray, t: np.ndarray, w: np.ndarray, lam: float, groups: list[list[int]], n_removed: int
) -> tuple[list[int], list[float]]:
    """The groups in the order in which the cheapest goes next, and the objective before and after each removal."""
    gone: list[int] = []
    order: list[int] = []
    costs = [objective(x, t, w, lam, fit_without(x, t, w, lam, gone))]
    for _ in range(n_removed):
        tried = {
            g: objective(x, t, w, lam, fit_without(x, t, w, lam, gone + groups[g]))
            for g in range(len(groups))
            if g not in order
        }
        best = min(tried, key=lambda g: tried[g])
        order.append(best)
        gone += groups[best]
        costs.append(tried[best])
    return order, costs
