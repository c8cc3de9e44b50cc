"""One layer at a time, rows as groups: what pruning does for all layers, as a test calls it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.pruning import budgets, sampling
from sipp.pruning.rows import SparseRows, largest_in_rows, masked_rows, tail_sum
from sipp.results.options import Allocation

Bound = dict[str, Any]  # n_outputs, delta, c_constant


def sparsify(
    weight_FK: Tensor,
    sensitivity_FK: Tensor,
    kept_F: Tensor,
    *,
    method: str,
    seed: int = 0,
    draws: str = "until",
    **bound: Any,
) -> SparseRows:
    """The rows of the only layer; with method "det" the most sensitive weights of each (T5)."""
    if method == "det":
        worth_FK = torch.where(weight_FK != 0, sensitivity_FK, 0.0)
        return masked_rows(weight_FK, largest_in_rows(worth_FK, kept_F), worth_FK, c_constant=bound["c_constant"])
    return sampling.sparsify(
        weight_FK,
        budgets.groups_of(weight_FK, sensitivity_FK, 1),
        kept_F.numpy()[:, None],
        is_hybrid=method == "hybrid",
        draws=draws,
        scale=budgets.sampling_constant(**bound),
        c_constant=bound["c_constant"],
        rng=np.random.default_rng(seed),
    )


def eps_det(sensitivity_FK: Tensor, kept_F: Tensor, *, c_constant: float) -> Tensor:
    """T5: C times the sum of all but the m largest sensitivities of each row."""
    return c_constant * tail_sum(sensitivity_FK, largest_in_rows(sensitivity_FK, kept_F))


def problem(
    layers: Sequence[Tensor], allocation: Allocation = "paper", weights: Sequence[Tensor] | None = None, **bound: Any
) -> budgets.AllocationProblem:
    """OptAlloc for these sensitivities, of positive weights if none are given."""
    signs = [torch.ones_like(layer) for layer in layers] if weights is None else weights
    return budgets.allocation_problem(signs, layers, budgets.sampling_constant(**bound), allocation)


def relax(posed: budgets.AllocationProblem, budget: float) -> np.ndarray:
    """The relaxed optimum of T10 without minima."""
    return budgets.relaxed(posed, budget, np.zeros_like(posed.caps_R), np.ones(len(posed.caps_R), dtype=bool))


def allocate(posed: budgets.AllocationProblem, budget: int, seed: int = 0, **least: Any) -> list[np.ndarray]:
    """How many weights each group keeps (T10)."""
    return budgets.allocate(posed, budget, np.random.default_rng(seed), **least)


def draws_for(sensitivity_FK: Tensor, kept_F: Tensor) -> Tensor:
    """N(m) of T7 for 0 < m < cap."""
    return torch.from_numpy(budgets.draws_for(sensitivity_FK.numpy(), kept_F.numpy()))


def eps_rand(total_F: Tensor, n_draws_F: Tensor, **bound: Any) -> Tensor:
    """T6 for rows of summed sensitivity `total_F` after N draws."""
    share = budgets.sampling_constant(**bound) * total_F.double() / n_draws_F.double()
    return torch.from_numpy(budgets.eps_rand(share.numpy()))
