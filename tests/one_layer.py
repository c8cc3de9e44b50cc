"""One layer and one budget at a time: what pruning does for all layers and many budgets, as a test calls it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.allocation.largest_scores import largest_in_rows
from sipp.allocation.optimal import allocate_within, allocation_problem, relax_within
from sipp.allocation.rows import (
    add_up,
    as_array,
    compiled_rows,
    draws_of_row,
    fill_rates,
    kept_after,
    over_rows,
    sampling_constant,
)
from sipp.allocation.sparse_rows import SparseRows, masked_rows, tail_sum
from sipp.pruning.sampled_rows import _in_range, _reweigh, _wide, sparsify_layers
from sipp.pruning.sampling import DrawRequest, draw_rows_until
from sipp.results.numerics import BOUND_DTYPE


def sparsify(weight_FK: Tensor, sensitivity_FK: Tensor, kept_F: Tensor, *, method: str, **options: Any) -> SparseRows:
    """The rows of the only layer; with method "det" the most sensitive weights of each (T5)."""
    if method == "det":
        worth_FK = torch.where(weight_FK != 0, sensitivity_FK, 0.0)
        return masked_rows(weight_FK, largest_in_rows(worth_FK, kept_F), worth_FK, c_constant=options["c_constant"])
    return sparsify_layers([weight_FK], [sensitivity_FK], [kept_F], is_hybrid=method == "hybrid", **options)[0]


def eps_det(sensitivity_FK: Tensor, kept_F: Tensor, *, c_constant: float) -> Tensor:
    """T5: C times the sum of all but the m largest sensitivities of each row."""
    return c_constant * tail_sum(sensitivity_FK, largest_in_rows(sensitivity_FK, kept_F))


def allocate(layers: Sequence[Tensor], budget: int, *, generator: torch.Generator, **options: Any) -> list[Tensor]:
    """How many weights each row keeps under OptAlloc (T10)."""
    return allocate_within(allocation_problem(layers, **options), budget, generator=generator)


@dataclass(frozen=True)
class Relaxed:
    """The relaxed optimum of T10, layer by layer."""

    kept: tuple[Tensor, ...]
    objective: float
    multiplier: float


def relax(layers: Sequence[Tensor], budget: int, **options: Any) -> Relaxed:
    """The relaxed optimum of T10."""
    found = relax_within(allocation_problem(layers, **options), budget)
    return Relaxed(found.kept_R.split([len(layer) for layer in layers]), found.objective, found.multiplier)


def expected_kept(sensitivity_FK: Tensor, n_draws_F: Tensor) -> Tensor:
    """U(N) of T7, F float64: how many different weights N draws with replacement are expected to hit in each row."""
    return _by_row(_expected_kept, sensitivity_FK, n_draws_F)


def draws_for(sensitivity_FK: Tensor, kept_F: Tensor) -> Tensor:
    """N(m) of T7, F float64: the draws after which m different weights are expected; 0 for m = 0.

    Infinite where m reaches the number of weights of positive sensitivity: no number of draws is sure to hit them all.
    """
    return _by_row(_draws_for, sensitivity_FK, kept_F)


def _by_row(loop: Callable[..., None], sensitivity_FK: Tensor, given_F: Tensor) -> Tensor:
    """F float64, where the sensitivities lie: what a compiled loop makes of each row and its number."""
    rows, given = as_array(sensitivity_FK), as_array(given_F.to(BOUND_DTYPE))
    result = np.empty(len(rows))

    def work(_: int, first: int, end: int, scratch: np.ndarray) -> None:
        loop(rows[first:end], given[first:end], scratch[0], result[first:end])

    over_rows(work, [rows.shape], n_scratch=1)
    return torch.from_numpy(result).to(sensitivity_FK.device)


@compiled_rows
def _expected_kept(rows_FK: np.ndarray, n_draws_F: np.ndarray, rates_K: np.ndarray, kept_F: np.ndarray) -> None:
    for i in range(rows_FK.shape[0]):
        total, cap = add_up(rows_FK[i])
        kept_F[i] = cap
        if cap > 0 and n_draws_F[i] < math.inf:
            fill_rates(rows_FK[i], total, rates_K)
            kept_F[i] = kept_after(rates_K, n_draws_F[i])[0]


@compiled_rows
def _draws_for(rows_FK: np.ndarray, kept_F: np.ndarray, rates_K: np.ndarray, n_draws_F: np.ndarray) -> None:
    for i in range(rows_FK.shape[0]):
        total, cap = add_up(rows_FK[i])
        if 0 < kept_F[i] < cap:
            fill_rates(rows_FK[i], total, rates_K)
            n_draws_F[i] = draws_of_row(rates_K, cap, kept_F[i])
        else:
            n_draws_F[i] = math.inf if kept_F[i] > 0 else 0.0


def draw_until(share_FK: Tensor, kept_F: Tensor, generator: torch.Generator) -> Tensor:
    """F x K float64 counts of draws with replacement from `share_FK`, made until `kept_F` columns were hit (T8a).

    Rows need m < number of positive shares, m > 0.
    """
    share, ones = as_array(share_FK), np.ones(len(share_FK))
    request = DrawRequest(share, ones, np.arange(len(share)), as_array(kept_F.to(torch.int64)))
    return torch.from_numpy(draw_rows_until([request], generator)[0]).to(share_FK.device)


def reweighted(weight_FK: Tensor, count_FK: Tensor, share_FK: Tensor) -> Tensor:
    """w^_j = n_j w_j / (N q_j) of T8, in the dtype of the weights; 0 where nothing was drawn."""
    weights, share, count = map(as_array, (_wide(weight_FK), share_FK, count_FK))
    values, mask = np.empty_like(weights), np.empty(weights.shape, dtype=np.bool_)
    ones, n_draws = np.ones((2, len(weights)))
    _reweigh(np.arange(len(weights)), share, ones, count, weights, values, mask, n_draws)
    return _in_range(values, n_draws, weight_FK.dtype).to(weight_FK.device)


def eps_rand(total_F: Tensor, n_draws_F: Tensor, *, n_outputs: int, delta: float, c_constant: float) -> Tensor:
    """T6, float64: (S~ + sqrt(S~ (S~ + 6 N))) / N for rows of summed sensitivity `total_F` after N draws.

    Infinite for N = 0, 0 for a row without sensitivity; the two arguments may also be broadcast against each other.
    """
    total = total_F.to(BOUND_DTYPE)
    scale = sampling_constant(total, n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    share = scale / n_draws_F.to(total)
    # Two roots, because the square of t can leave the range of float64.
    return torch.where(scale > 0, share + share.sqrt() * (share + 6.0).sqrt(), 0.0)
