"""Scores and a budget in, the largest of them out with a floor under every row and layer, so that none dies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.allocation.largest_scores import largest
from sipp.records.numerics import BOUND_DTYPE


def largest_above_floor(
    scores: Sequence[Tensor], weights: Sequence[Tensor], budget: int, *, share: float
) -> list[Tensor]:
    """One bool mask a layer: exactly `budget` weights, the largest scores, with a floor under rows and layers.

    T10 with lower limits: every row that has a weight keeps its best one, and every layer at least `share` of what an
    even cut would leave it. Where the budget does not reach for both, rows go first; where it does not reach for all
    rows, those with the best weights.
    """
    best = [best_of_rows(layer_FK, weight_FK) for layer_FK, weight_FK in zip(scores, weights)]
    limits = least_of_layers(scores, budget, share)
    forced = [best_FK | largest([layer_FK], limit)[0] for layer_FK, best_FK, limit in zip(scores, best, limits)]
    if _count(forced) > budget:  # the best of rows may do for the floor of their layer
        forced = [
            largest([torch.where(b, torch.inf, s.to(BOUND_DTYPE))], max(limit, int(b.sum())))[0]
            for s, b, limit in zip(scores, best, limits)
        ]
    if _count(forced) > budget:
        forced = best
    if _count(forced) > budget:
        return largest([torch.where(f, s.to(BOUND_DTYPE), -torch.inf) for f, s in zip(forced, scores)], budget)
    return largest([torch.where(f, torch.inf, s.to(BOUND_DTYPE)) for f, s in zip(forced, scores)], budget)


def least_of_layers(scores: Sequence[Tensor], budget: int, share: float) -> list[int]:
    """How many weights each layer keeps at least: this share of what an even cut would leave it."""
    n_weights = sum(layer.numel() for layer in scores)
    return [int(share * budget * layer.numel() / n_weights) for layer in scores]


def best_of_rows(scores_FK: Tensor, weight_FK: Tensor) -> Tensor:
    """The weight of the largest score in each row; of the largest magnitude where all scores are 0; none of zeros."""
    magnitude_FK = weight_FK.to(scores_FK.device, BOUND_DTYPE).abs()
    worth_FK = torch.where(magnitude_FK > 0, scores_FK.to(BOUND_DTYPE), 0.0)
    is_blind_F = worth_FK.amax(1) <= 0
    column_F = torch.where(is_blind_F, magnitude_FK.argmax(1), worth_FK.argmax(1))
    mask_FK = torch.zeros(scores_FK.shape, dtype=torch.bool, device=scores_FK.device)
    mask_FK.scatter_(1, column_F[:, None], magnitude_FK.amax(1, keepdim=True) > 0)
    return mask_FK


def _count(masks: Sequence[Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)
