"""Sparsifies groups of weights by sampling, or by whichever of sampling and sorting has the smaller bound (T6-T9).

A group is a row, or the weights of one sign of a row (`pruning/budgets.py`). The row's bound is the largest of its
groups, because each group is about quadrants of its own (T2), and hybrid chooses by it, once for all groups of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError
from sipp.pruning.budgets import allocate, draws_for, eps_rand
from sipp.pruning.ranking import Ranking
from sipp.pruning.rows import (
    DET,
    RAND,
    WHOLE,
    SparseRows,
    best_in_each_row,
    largest_in_rows,
    minimum_of_layers,
    row_chunks,
    with_restored,
)
from sipp.results import Draws
from sipp.scoring import method_of

EMPTY_GROUP_EPS = 1.0  # a group without weights gives 0 in its quadrants, and |0 - z| = z
_DRAW_SLACK = 1e-9  # N(m) has rounding errors: a whole number (N(1) = 1) must not be floored to the one below
_MOST_DRAWS = 2.0**53  # numbers of draws beyond it are no exact float64; fewer draws than allowed claim less
_LARGEST_RATE = 2.0**52  # above it a Poisson count is its mean: they differ by one part in 2^26


def sampled_rows(ranking: Ranking, budget: int, *, seed: int) -> list[SparseRows]:
    """The rows of all layers at this budget: each group has its share (T10), and is sampled or, if hybrid, sorted.

    With a floor, a row keeps a weight, its best one if none of its weights can be drawn.
    """
    rng, dense, problem = np.random.default_rng(seed), ranking.dense, ranking.problem
    undrawable = [torch.zeros(scores_FK.shape, dtype=torch.bool, device="cpu") for scores_FK in ranking.scores]
    least, layer_least = None, None
    if ranking.floor is not None:
        least = [_one_in_each_row(worth_GK, problem.n_signs) for worth_GK in problem.worths]
        left = [torch.where(*layer, 0.0) for layer in zip(ranking.alive, dense)] if ranking.alive else dense
        best = [_best_of_undrawable_rows(*layer) for layer in zip(ranking.scores, left)]
        if sum(int(mask.sum()) for mask in best) + sum(int(one.sum()) for one in least) <= budget:
            undrawable = best  # rows that can be drawn from come first
        limits = minimum_of_layers(ranking.scores, budget, ranking.floor, ranking.alive)
        layer_least = [max(0, limit - int(mask.sum())) for limit, mask in zip(limits, undrawable)]
    budget -= sum(int(mask.sum()) for mask in undrawable)
    kept = allocate(problem, budget, rng, least=least, layer_least=layer_least)
    rows = []
    for weight_FK, worth_GK, kept_FS, restored_FK in zip(dense, problem.worths, kept, undrawable):
        sampled = sparsify(
            weight_FK,
            worth_GK,
            kept_FS,
            is_hybrid=method_of(ranking.options.method).rule == "hybrid",
            draws=ranking.options.draws,
            scale=ranking.sampling_constant,
            c_constant=ranking.options.c_constant,
            rng=rng,
        )
        rows.append(with_restored(sampled, restored_FK, weight_FK) if bool(restored_FK.any()) else sampled)
    return rows


def _one_in_each_row(worth_GK: np.ndarray, n_signs: int) -> np.ndarray:
    """1 for the group that holds the most sensitive weight of its row, 0 for the others and for rows without one."""
    best_FS = worth_GK.max(1, initial=0).reshape(-1, n_signs)
    is_best_FS = np.arange(n_signs) == best_FS.argmax(1)[:, None]
    return (is_best_FS & (best_FS > 0)).ravel().astype(np.float64)


def _best_of_undrawable_rows(scores_FK: Tensor, weight_FK: Tensor) -> Tensor:
    """The best weight of each row whose weights have no sensitivity, so that none of them can be sampled."""
    can_draw_F = ((scores_FK > 0) & (weight_FK != 0)).any(1)
    return best_in_each_row(scores_FK, weight_FK) & ~can_draw_F[:, None]


def sparsify(
    weight_FK: Tensor,
    worth_GK: np.ndarray,
    kept_FS: np.ndarray,
    *,
    is_hybrid: bool,
    draws: Draws,
    scale: float,
    c_constant: float,
    rng: np.random.Generator,
) -> SparseRows:
    """Cuts every group to its number of weights: the most sensitive ones unchanged, or a re-weighted sample.

    All rows are sampled (T6), or, `is_hybrid`, those where that has the smaller bound (T9). draws: "until" the group
    has m distinct weights, so the count is exact; or a "fixed" number floor(N(m)), so that the sample is unbiased, T6
    holds exactly, and the expected number of distinct weights is at most m (T8). A group that may keep every weight
    that can be drawn is kept whole. `worth_GK` comes from `budgets.groups_of`, `scale` from `sampling_constant`.
    """
    n_rows, n_signs = kept_FS.shape
    weight = weight_FK.detach().cpu().to(torch.float64).numpy()
    factor_FK, kept_G = np.zeros(weight.shape), kept_FS.ravel()
    strategy_G, eps_G = np.empty(len(kept_G), dtype=np.int8), np.zeros(len(kept_G))
    for rows in row_chunks(n_rows, weight.shape[1] * n_signs):
        groups = slice(rows.start * n_signs, rows.stop * n_signs)
        found = _factors(worth_GK[groups], kept_G[groups], n_signs, is_hybrid, draws, scale, c_constant, rng)
        factor_GK, strategy_G[groups], eps_G[groups] = found
        factor_FK[rows] = factor_GK.reshape(-1, n_signs, weight.shape[1]).sum(1)  # a weight is in one group
    with np.errstate(over="ignore"):
        values_FK = torch.from_numpy(weight * factor_FK).to(weight_FK.dtype)
    if not bool(values_FK.isfinite().all()):
        raise DataError(
            f"a re-weighted weight leaves the range of {weight_FK.dtype}: the row's sensitivities differ by too many "
            "orders of magnitude to sample from",
            fix="use method='sipp-det', or a wider dtype",
        )
    return SparseRows(
        values_FK,
        mask_FK=torch.from_numpy(factor_FK > 0),
        strategy_FS=torch.from_numpy(strategy_G.reshape(n_rows, n_signs)),
        eps_F=torch.from_numpy(eps_G.reshape(n_rows, n_signs).max(1)),
    )


def _factors(
    worth_GK: np.ndarray,
    kept_G: np.ndarray,
    n_signs: int,
    is_hybrid: bool,
    draws: Draws,
    scale: float,
    c_constant: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By how much each weight is multiplied (0: removed), and of each group its strategy and its bound."""
    cap_G, total_G = (worth_GK > 0).sum(1), worth_GK.sum(1, dtype=np.float64)
    factor_GK = (worth_GK > 0).astype(np.float64)
    is_cut_G = kept_G < cap_G
    factor_GK[is_cut_G] = 0.0
    strategy_G = np.where(is_cut_G, DET, WHOLE).astype(np.int8)
    # T5 would say C S of an empty group and T6 nothing; the error is known, so neither is needed
    eps_G = np.where(is_cut_G, EMPTY_GROUP_EPS, 0.0)
    some = np.flatnonzero(is_cut_G & (kept_G > 0))
    worth_DK, kept_D = worth_GK[some], kept_G[some]
    entitled_D = draws_for(worth_DK, kept_D)
    if draws == "fixed":  # The most draws with U(N) <= m: the paper's "at most B weights" holds for what is expected.
        entitled_D = np.clip(np.floor(entitled_D + _DRAW_SLACK), 1.0, _MOST_DRAWS)
    eps_D = eps_rand(scale * total_G[some] / entitled_D)
    if is_hybrid:
        mask_DK = largest_in_rows(torch.from_numpy(worth_DK), torch.from_numpy(kept_D)).numpy()
        eps_det_D = c_constant * np.where(mask_DK, 0.0, worth_DK).sum(1, dtype=np.float64)
        is_det_D = _largest_of_row(eps_D, some // n_signs) > _largest_of_row(eps_det_D, some // n_signs)  # T9
        factor_GK[some[is_det_D]], eps_G[some[is_det_D]] = mask_DK[is_det_D], eps_det_D[is_det_D]
        some, worth_DK, kept_D, entitled_D = (values[~is_det_D] for values in (some, worth_DK, kept_D, entitled_D))
    if len(some):
        share_DK = worth_DK / total_G[some, None]
        count_DK = draw_until(share_DK, kept_D, rng) if draws == "until" else draw_fixed(share_DK, entitled_D, rng)
        made_D = count_DK.sum(1)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            factor_GK[some] = np.where(count_DK > 0, count_DK / (made_D[:, None] * share_DK), 0.0)
        strategy_G[some] = RAND
        # With "until" the number of draws is a result of the draws: a lucky one must not tighten the claim, so no more
        # than N(m) count. Deviates: T6 is proved for a number of draws fixed beforehand; for "until" it is a guide.
        eps_G[some] = eps_rand(scale * total_G[some] / np.minimum(made_D, entitled_D))
    return factor_GK, strategy_G, eps_G


def _largest_of_row(values_D: np.ndarray, row_D: np.ndarray) -> np.ndarray:
    """For each group, the largest value of the groups of its row.

    Groups that are whole or empty are not among them: they have the same bound whichever way the row is cut. So where
    an empty one decides the row's bound, the other group decides the choice.
    """
    largest_F = np.zeros(row_D.max(initial=-1) + 1)
    np.maximum.at(largest_F, row_D, values_D)
    return largest_F[row_D]


def draw_until(share_DK: np.ndarray, kept_D: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """D x K counts of draws with replacement, made until `kept_D` columns were hit (T8a).

    In continuous time: column j is hit at rate q_j, first at T_j ~ Exp(q_j), and the clock stops at tau, the m-th
    smallest T. Then it was hit 1 + Poisson(q_j (tau - T_j)) times.
    """
    time_DK = rng.standard_exponential(share_DK.shape)
    with np.errstate(divide="ignore", over="ignore"):
        arrival_DK = np.where(share_DK > 0, np.minimum(time_DK / share_DK, np.finfo(np.float64).max), np.inf)
    is_hit_DK = largest_in_rows(torch.from_numpy(-arrival_DK), torch.from_numpy(kept_D)).numpy()
    tau_D1 = np.where(is_hit_DK, arrival_DK, 0.0).max(1, keepdims=True)
    count_DK = is_hit_DK.astype(np.float64)
    rates = (share_DK * np.where(is_hit_DK, tau_D1 - arrival_DK, 0.0))[is_hit_DK]
    count_DK[is_hit_DK] += np.where(rates < _LARGEST_RATE, rng.poisson(np.minimum(rates, _LARGEST_RATE)), rates)
    return count_DK


def draw_fixed(share_DK: np.ndarray, n_draws_D: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """D x K counts of `n_draws_D` draws with replacement from `share_DK` (T8b): exact multinomial counts."""
    return rng.multinomial(n_draws_D.astype(np.int64), share_DK).astype(np.float64)
