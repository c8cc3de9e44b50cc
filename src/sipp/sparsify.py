"""Weights, sensitivities and a number to keep per row in; sparse rows with their strategy and bound out (T8, T9)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.numerics import BOUND_DTYPE
from sipp.rowbounds import (
    MAX_DRAWS,
    check_constants,
    check_kept,
    check_sensitivity,
    draws_for,
    draws_for_eps,
    eps_rand,
    largest_in_rows,
    reaches,
    row_chunks,
    tail_sum,
)

RowMethod = Literal["det", "rand", "hybrid"]
Draws = Literal["until", "fixed"]

DET = 0  # the most sensitive weights, unchanged (T5)
RAND = 1  # a re-weighted sample (T6, T8)
WHOLE = 2  # nothing of positive sensitivity was lost
STRATEGIES = {DET: "det", RAND: "rand", WHOLE: "whole"}

EMPTY_ROW_EPS = 1.0  # a row without weights answers 0 in every quadrant, and |0 - z| = z
_DRAW_SLACK = 1e-9  # N(m) is computed: one that is a whole number (N(1) = 1) must not be rounded up to the next
_LARGEST_RATE = 2.0**52  # above it a Poisson count is its mean: they differ by one part in 2^26


@dataclass(frozen=True)
class SparseRows:
    """The rows of one weight after pruning."""

    values_FK: Tensor
    mask_FK: Tensor
    strategy_F: Tensor  # int8: DET, RAND or WHOLE
    n_draws_F: Tensor  # float64, draws made; 0 where nothing was drawn
    eps_F: Tensor  # float64, the bound of T5, T6 or T9


def keep_masked(weight_FK: Tensor, mask_FK: Tensor) -> SparseRows:
    """The weights under a given mask, unchanged; no bound is claimed beyond 0 for a complete row."""
    whole_F = mask_FK.all(1)
    return SparseRows(
        values_FK=torch.where(mask_FK, weight_FK, torch.zeros_like(weight_FK)),
        mask_FK=mask_FK,
        strategy_F=torch.where(whole_F, WHOLE, DET).to(torch.int8),
        n_draws_F=torch.zeros(len(weight_FK), dtype=BOUND_DTYPE, device=weight_FK.device),
        eps_F=torch.where(whole_F, 0.0, math.inf).to(BOUND_DTYPE),
    )


def sparsify(
    weight_FK: Tensor,
    sensitivity_FK: Tensor,
    kept_F: Tensor,
    *,
    method: RowMethod,
    draws: Draws,
    n_outputs: int,
    delta: float,
    c_constant: float,
    generator: torch.Generator,
) -> SparseRows:
    """Each row with `kept_F` of its weights: the most sensitive ones unchanged, or a re-weighted sample of them.

    method: det (T5), rand (T6), hybrid (T9, the smaller bound of each row). draws: "until" the row holds m different
    weights, so the count is exact, or a "fixed" number ceil(N(m)), so unbiasedness and T6 are exact (T8). A weight that
    is zero or has no sensitivity is never drawn. Rows that may keep all they can draw are kept whole.
    """
    _check(weight_FK, sensitivity_FK, kept_F, method, draws)
    check_constants(n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    weight_FK = weight_FK.detach()
    sensitivity_FK = torch.where(weight_FK != 0, sensitivity_FK, 0.0)
    kept_F = kept_F.to(sensitivity_FK.device)
    det = det_rows(weight_FK, sensitivity_FK, largest_in_rows(sensitivity_FK, kept_F), c_constant=c_constant)
    if method == "det":
        return det
    total_F = sensitivity_FK.sum(1, dtype=BOUND_DTYPE)
    is_drawn_F = (det.strategy_F == DET) & (kept_F > 0)
    if method == "hybrid":
        enough_F = draws_for_eps(total_F, det.eps_F, n_outputs=n_outputs, delta=delta, c_constant=c_constant)
        is_drawn_F &= reaches(sensitivity_FK, kept_F, enough_F, is_drawn_F)
    # T5 would say C S of an empty row and T6 nothing; its error is known, so neither is needed (nor believed).
    eps_F = torch.where((kept_F == 0) & (total_F > 0), EMPTY_ROW_EPS, det.eps_F)
    # Exactly the weights of positive sensitivity make a row whole, even where the number to keep leaves more room.
    mask_FK = det.mask_FK & (sensitivity_FK > 0)
    values_FK, n_draws_F = torch.where(mask_FK, weight_FK, 0.0), torch.zeros_like(eps_F)
    drawn = is_drawn_F.nonzero()[:, 0]
    expected_F = torch.zeros_like(eps_F)
    expected_F[drawn] = draws_for(sensitivity_FK[drawn], kept_F[drawn])
    for rows in row_chunks(sensitivity_FK, len(drawn)):
        index = drawn[rows]
        share_FK = sensitivity_FK[index].to(BOUND_DTYPE) / total_F[index, None]
        if draws == "until":
            count_FK = draw_until(share_FK, kept_F[index], generator)
        else:
            count_FK = draw_fixed(share_FK, (expected_F[index] - _DRAW_SLACK).ceil(), generator)
        n_draws_F[index] = count_FK.sum(1)
        mask_FK[index] = count_FK > 0
        values_FK[index] = reweighted(weight_FK[index], count_FK, share_FK)
    # With "until" the number of draws is a result of the draws: a lucky one must not tighten the claim, so no more than
    # N(m) count. Deviates: T6 is proved for a number of draws fixed beforehand; for "until" it is a guide.
    entitled_F = n_draws_F if draws == "fixed" else torch.minimum(n_draws_F, expected_F)
    bound_F = eps_rand(total_F, entitled_F, n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    strategy_F = torch.where(is_drawn_F, RAND, det.strategy_F)
    return SparseRows(values_FK, mask_FK, strategy_F, n_draws_F, torch.where(is_drawn_F, bound_F, eps_F))


def det_rows(weight_FK: Tensor, sensitivity_FK: Tensor, mask_FK: Tensor, *, c_constant: float) -> SparseRows:
    """Each row with the weights under the mask, unchanged (T5); the mask holds a row's most sensitive weights."""
    sensitivity_FK = torch.where(weight_FK != 0, sensitivity_FK, 0.0)
    is_whole_F = mask_FK.sum(1) >= (sensitivity_FK > 0).sum(1)
    eps_F = c_constant * tail_sum(sensitivity_FK, mask_FK)
    return SparseRows(
        values_FK=torch.where(mask_FK, weight_FK, 0.0),
        mask_FK=mask_FK,
        strategy_F=torch.where(is_whole_F, WHOLE, DET).to(torch.int8),
        n_draws_F=torch.zeros_like(eps_F),
        eps_F=torch.where(is_whole_F, 0.0, eps_F),
    )


def draw_until(share_FK: Tensor, kept_F: Tensor, generator: torch.Generator) -> Tensor:
    """F x K float64 counts of draws with replacement from `share_FK`, made until `kept_F` columns were hit (T8a).

    In continuous time: column j is hit at rate q_j, first at T_j ~ Exp(q_j), and the clock stops at tau, the m-th
    smallest T. Then it was hit 1 + Poisson(q_j (tau - T_j)) times. Rows need m < number of positive shares, m > 0.
    """
    arrival_FK = -torch.log1p(-_uniform(share_FK, generator)) / share_FK
    arrival_FK = torch.where(share_FK > 0, arrival_FK.clamp(max=MAX_DRAWS), math.inf)
    mask_FK = largest_in_rows(-arrival_FK, kept_F)
    tau_F = arrival_FK.masked_fill(~mask_FK, -math.inf).amax(1, keepdim=True)
    rate_FK = torch.where(mask_FK, share_FK * (tau_F - arrival_FK), 0.0)
    rate = rate_FK[mask_FK].to(generator.device)
    again = torch.where(rate < _LARGEST_RATE, torch.poisson(rate.clamp(max=_LARGEST_RATE), generator=generator), rate)
    count_FK = mask_FK.to(BOUND_DTYPE)
    count_FK[mask_FK] += again.to(count_FK.device)
    return count_FK


def draw_fixed(share_FK: Tensor, n_draws_F: Tensor, generator: torch.Generator) -> Tensor:
    """F x K float64 counts of `n_draws_F` draws with replacement from `share_FK` (T8b): exact multinomial counts.

    A row is halved again and again; the draws of a part go to its left half with probability left / part (binomial), so
    that there are as many calls as K has binary digits.
    """
    fan_in = share_FK.shape[1]
    n_leaves = 1 << max(0, fan_in - 1).bit_length()
    parts = [torch.nn.functional.pad(share_FK, (0, n_leaves - fan_in))]  # leaves first, the whole row last
    while parts[-1].shape[1] > 1:
        parts.append(parts[-1][:, 0::2] + parts[-1][:, 1::2])
    count = n_draws_F[:, None].to(generator.device)
    for part, halves in zip(parts[:0:-1], parts[-2::-1]):
        chance = torch.where(part > 0, halves[:, 0::2] / part, 0.0).to(generator.device)
        left = torch.binomial(count, chance, generator=generator)
        count = torch.stack([left, count - left], dim=2).flatten(1)
    return count[:, :fan_in].to(share_FK.device)


def reweighted(weight_FK: Tensor, count_FK: Tensor, share_FK: Tensor) -> Tensor:
    """w^_j = n_j w_j / (N q_j) of T8, in the dtype of the weights; 0 where nothing was drawn."""
    factor = count_FK / (count_FK.sum(1, keepdim=True) * share_FK)
    values = torch.where(count_FK > 0, weight_FK.to(BOUND_DTYPE) * factor, 0.0).to(weight_FK.dtype)
    if not bool(values.isfinite().all()):
        raise DataError(
            f"a re-weighted weight leaves the range of {weight_FK.dtype}: the row's sensitivities differ by too many "
            'orders of magnitude to sample from; use method "det" or a wider dtype'
        )
    return values


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) of the tensor's shape and dtype, drawn where the generator lives."""
    return torch.rand(like.shape, dtype=like.dtype, device=generator.device, generator=generator).to(like.device)


def _check(weight_FK: Tensor, sensitivity_FK: Tensor, kept_F: Tensor, method: str, draws: str) -> None:
    if method not in get_args(RowMethod):
        raise OptionError(f"method={method!r} for rows is unknown; choose one of {', '.join(get_args(RowMethod))}")
    if draws not in get_args(Draws):
        raise OptionError(f"draws={draws!r} is unknown; choose one of {', '.join(get_args(Draws))}")
    check_sensitivity(sensitivity_FK)
    if weight_FK.shape != sensitivity_FK.shape:
        raise DataError(
            f"weights of shape {tuple(weight_FK.shape)} and sensitivities of shape {tuple(sensitivity_FK.shape)} "
            "must be the same F x K rows"
        )
    check_kept(kept_F, sensitivity_FK)
