"""SparseGPT (Frantar & Alistarh 2023) by its definition: columns in order, each compensating for those before.

H = X'X + 1 % of its mean diagonal. Among each 128 columns the weights of the least  w^2 / [H_j^-1]_jj  go, H_j
being H without the columns before j; n:m patterns choose the same way in each group of m as its turn comes. The
weights to the right in its row compensate for a removed one: the OBS update, read from one Cholesky factor of H^-1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.repairing.search import LeastSquares, MaskRule
from sipp.repairing.solving import cholesky_or_nan

N_COLUMNS = 128  # whose weights are compared with each other
DAMPING = 0.01


def sparsegpt(problems: Sequence[LeastSquares], rule: MaskRule) -> tuple[Tensor, Tensor]:
    """The mask and the values, the rows of one problem below those of the other.

    Differs from the paper: each set of columns gets an even part of the layer's exact budget, not its own rounding of
    a share; and rows that must not die keep their best weight.
    """
    shapes = [one.before_GRK.shape for one in problems]
    sizes = [n_groups * n_rows for n_groups, n_rows, _ in shapes]
    fan_in, device = shapes[0][2], problems[0].before_GRK.device
    none_FK = torch.zeros(sum(sizes), fan_in, dtype=torch.bool, device=device)
    may_FK = ~none_FK if rule.may_FK is None else rule.may_FK
    parts = [part.view(shape) for part, shape in zip(may_FK.split(sizes), shapes)]
    lives_F = none_FK[:, 0] if rule.lives_F is None else rule.lives_F
    lives = [part.view(shape[:2]) for part, shape in zip(lives_F.split(sizes), shapes)]
    factors = [_factor(one) for one in problems]
    limits = [_limits(*layer) for layer in zip(problems, factors, parts, lives)]
    step = N_COLUMNS if rule.pattern is None else max(rule.pattern.m, N_COLUMNS // rule.pattern.m * rule.pattern.m)
    counts: Sequence[Tensor | None] = [None] * len(problems)
    if rule.pattern is None:
        counts = _counts(limits, rule.n_kept, step)
    found = [
        _pruned(one, factor, limit, count, step, rule)
        for one, factor, limit, count in zip(problems, factors, limits, counts)
    ]
    masks, values = zip(*found)
    return torch.cat([mask.flatten(0, 1) for mask in masks]), torch.cat([value.flatten(0, 1) for value in values])


def _factor(rows: LeastSquares) -> Tensor:
    """The upper Cholesky factor of H^-1; its row j, divided by the diagonal, is the update for removing column j."""
    diagonal_GK = rows.xx_GKK.diagonal(dim1=1, dim2=2)
    damped_GKK = rows.xx_GKK.clone()
    spread_GK = (DAMPING * diagonal_GK.mean(1, keepdim=True)).expand_as(diagonal_GK)
    damped_GKK.diagonal(dim1=1, dim2=2).add_(torch.where(diagonal_GK == 0, 1.0, spread_GK))
    inverse_GKK = torch.cholesky_inverse(cholesky_or_nan(damped_GKK))
    return cholesky_or_nan(inverse_GKK).mT


def _is_dead(rows: LeastSquares) -> Tensor:
    """Inputs that are always 0 (G x K): their weights are removed, unless one keeps a row alive."""
    return rows.xx_GKK.diagonal(dim1=1, dim2=2) == 0


def _limits(rows: LeastSquares, factor_GKK: Tensor, may_GRK: Tensor, lives_GR: Tensor) -> Tensor:
    """What is added to the scores: -inf where a weight may not be kept, inf for the best of each row that lives."""
    score_GRK = rows.before_GRK.square() / factor_GKK.diagonal(dim1=1, dim2=2).square()[:, None]
    score_GRK = torch.where(_is_dead(rows)[:, None], 0.0, score_GRK)
    best_GR1 = torch.where(may_GRK, score_GRK, -1.0).argmax(2, keepdim=True)
    limit_GRK = torch.where(may_GRK, 0.0, -torch.inf).to(score_GRK)
    lifted_GR1 = torch.where(lives_GR[..., None], torch.inf, limit_GRK.gather(2, best_GR1))
    return limit_GRK.scatter(2, best_GR1, lifted_GR1)


def _counts(limits: Sequence[Tensor], n_kept: int, step: int) -> list[Tensor]:
    """How many weights each group keeps in each set of columns (G x sets): even, exact, within what is allowed."""
    pieces = [torch.stack([part.sum((1, 2)) for part in (l > -torch.inf).split(step, 2)], 1) for l in limits]
    forced = [torch.stack([part.sum((1, 2)) for part in (l == torch.inf).split(step, 2)], 1) for l in limits]
    most, least = (torch.cat([count_GB.flatten() for count_GB in each]).cpu() for each in (pieces, forced))
    ends = most.cumsum(0) * n_kept // max(1, int(most.sum()))
    counts = torch.maximum(ends.diff(prepend=torch.zeros_like(ends[:1])), least)
    while int(counts.sum()) > n_kept:  # rows that must live took more than their set's part
        counts[(counts - least).argmax()] -= 1
    split = counts.split([count_GB.numel() for count_GB in pieces])
    return [part.view(count_GB.shape).to(count_GB.device) for part, count_GB in zip(split, pieces)]


def _pruned(
    rows: LeastSquares, factor_GKK: Tensor, limit_GRK: Tensor, count_GB: Tensor | None, step: int, rule: MaskRule
) -> tuple[Tensor, Tensor]:
    """The mask and the values of one problem (G x R x K)."""
    left_GRK = torch.where(_is_dead(rows)[:, None] & (limit_GRK < torch.inf), 0.0, rows.before_GRK)
    mask_GRK = torch.zeros(left_GRK.shape, dtype=torch.bool, device=left_GRK.device)
    values_GRK = torch.zeros_like(left_GRK)
    diagonal_GK = factor_GKK.diagonal(dim1=1, dim2=2)
    for b, start in enumerate(range(0, left_GRK.shape[2], step)):
        stop = min(start + step, left_GRK.shape[2])
        here_GRB, limit_GRB = left_GRK[..., start:stop].clone(), limit_GRK[..., start:stop]
        factor_GBB, pivot_GB = factor_GKK[:, start:stop, start:stop], diagonal_GK[:, start:stop]
        kept_GRB, lost_GRB = mask_GRK[..., start:stop], torch.zeros_like(here_GRB)
        if count_GB is not None:
            score_GRB = here_GRB.square() / pivot_GB.square()[:, None] + limit_GRB
            order_GN = score_GRB.flatten(1).argsort(dim=1, descending=True, stable=True)
            is_kept_GN = (
                torch.arange(order_GN.shape[1], dtype=torch.int64, device=order_GN.device) < count_GB[:, b, None]
            )
            kept_GRB.copy_(torch.zeros_like(is_kept_GN).scatter(1, order_GN, is_kept_GN).view_as(kept_GRB))
        for i in range(stop - start):
            if rule.pattern is not None and i % rule.pattern.m == 0:
                group = slice(i, i + rule.pattern.m)
                score_GRM = here_GRB[..., group].square() / pivot_GB[:, None, group].square() + limit_GRB[..., group]
                n_taken = min(rule.pattern.n, score_GRM.shape[2])
                taken_GRN = score_GRM.argsort(dim=2, descending=True, stable=True)[..., :n_taken]
                chosen_GRM = torch.zeros_like(kept_GRB[..., group]).scatter(2, taken_GRN, True)
                kept_GRB[..., group] = chosen_GRM & (limit_GRB[..., group] > -torch.inf)
            column_GR = here_GRB[..., i]
            values_GRK[..., start + i] = torch.where(kept_GRB[..., i], column_GR, 0.0)
            lost_GRB[..., i] = (column_GR - values_GRK[..., start + i]) / pivot_GB[:, i, None]
            here_GRB[..., i:] -= lost_GRB[..., i, None] * factor_GBB[:, None, i, i:]
        left_GRK[..., stop:] -= lost_GRB @ factor_GKK[:, start:stop, stop:]
    return mask_GRK, values_GRK
