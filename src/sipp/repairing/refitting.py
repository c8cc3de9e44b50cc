"""Refits one weight from its moments: the ridge chosen, and the result judged, on points kept aside."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sipp.records.numerics import BOUND_DTYPE
from sipp.records.repair import LayerRepair
from sipp.records.weights import Weight, from_rows, to_rows
from sipp.repairing.gathering import Rows, Sums, rows_of, solvable
from sipp.repairing.intercepts import Place, apply_shift, shift
from sipp.repairing.moments import Moments
from sipp.repairing.solving import solve_rows

# Shares of a feature's own square that a change of its weight costs: the larger, the nearer to the weights as they are.
# The error on new points falls and then rises along them.
RIDGES = (1e-8, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
N_TRIAL_ROWS = 32  # spread over the weight, that choose the ridge; then all rows are solved once


@dataclass(frozen=True)
class _Block:
    """Rows of a weight that meet the same patches, group by group."""

    rows: slice
    mask_GRK: Tensor
    fit: Moments
    aside: Moments


def refit(model: nn.Module, weight: Weight, mask: Tensor, sums: Sums, place: Place) -> LayerRepair:
    """What was done to the weight and its intercept, in place: refitted, or left alone where that is not better."""
    mask_FK = to_rows(weight, mask)
    blocks, obstacle = _blocks(sums, mask_FK)
    if obstacle:
        return LayerRepair(weight.name, None, None, None, "none", obstacle)
    parameter = model.get_parameter(weight.name)
    old_FK = to_rows(weight, parameter.detach()).to(BOUND_DTYPE)
    has_intercept = place.kind != "none"
    ridge = _best_ridge([_some_rows(block) for block in blocks], has_intercept)
    new_FK, shift_F = old_FK.clone(), torch.zeros(weight.n_rows, dtype=BOUND_DTYPE, device=old_FK.device)
    for block in blocks:
        change_GRK, shift_GR = _solved(block, block.mask_GRK, ridge, has_intercept)
        new_FK[block.rows] += change_GRK.flatten(0, 1)
        shift_F[block.rows] = shift_GR.flatten()
    new = from_rows(weight, new_FK.to(parameter.dtype), parameter)
    if has_intercept:
        shift_F = shift(model, place, shift_F)
    change_FK = to_rows(weight, new).to(BOUND_DTYPE) - old_FK  # as rounded
    before, after = _errors(blocks, change_FK, shift_F)
    if not after < before or not bool(torch.isfinite(new).all() & torch.isfinite(shift_F).all()):
        why = "it is exact already" if before == 0 else "no refit was better on held-back inputs"
        return LayerRepair(weight.name, before, before, None, "none", why)
    with torch.no_grad():
        parameter.copy_(new)
    if has_intercept:
        apply_shift(model, place, shift_F)
    return LayerRepair(weight.name, before, after, ridge, place.kind, "")


def _blocks(sums: Sums, mask_FK: Tensor) -> tuple[list[_Block], str]:
    """The blocks of rows, and why they cannot be solved; empty where they can."""
    keys, why = solvable(sums)
    return [_Block(rows_of(key), _grouped(mask_FK, key), sums.fit[key], sums.aside[key]) for key in keys], why


def _grouped(matrix_FK: Tensor, key: Rows) -> Tensor:
    start, n_rows, n_groups = key
    return matrix_FK[start : start + n_rows].unflatten(0, (n_groups, -1))


def _solved(block: _Block, mask_GRK: Tensor, ridge: float, has_intercept: bool) -> tuple[Tensor, Tensor]:
    """The changes of weights, and the intercepts beside them (zeros where there can be none)."""
    fit = block.fit
    xx_GKK, dx_GRK = fit.centred() if has_intercept else (fit.xx_GKK, fit.dx_GRK)
    change_GRK = solve_rows(xx_GKK, dx_GRK, mask_GRK, ridge)
    return change_GRK, fit.intercept(change_GRK) if has_intercept else torch.zeros_like(fit.d_GR)


def _best_ridge(trials: list[_Block], has_intercept: bool) -> float:
    """The ridge of the least error on the points kept aside: from the middle one on, as long as it falls."""
    at = len(RIDGES) // 2
    least = _trial(trials, RIDGES[at], has_intercept)
    for step in (1, -1):
        start = at
        while 0 <= at + step < len(RIDGES):
            error = _trial(trials, RIDGES[at + step], has_intercept)
            if not error < least and math.isfinite(least):  # where there is no number yet, a larger ridge may give one
                break
            at, least = at + step, error
        if at != start:  # it fell on this side, so it rises on the other
            break
    return RIDGES[at]


def _trial(trials: list[_Block], ridge: float, has_intercept: bool) -> float:
    """The squared error of some rows on the points kept aside with this ridge; infinite where it is no number."""
    total = 0.0
    for trial in trials:
        change_GRK, shift_GR = _solved(trial, trial.mask_GRK, ridge, has_intercept)
        total += float(trial.aside.error(change_GRK, shift_GR).sum())
    return total if math.isfinite(total) else math.inf


def _some_rows(block: _Block) -> _Block:
    """The block with some of its rows, evenly spread: of one group, or of each where there are many small ones."""
    n_groups, n_rows, _ = block.mask_GRK.shape
    n_taken = min(n_rows, max(1, N_TRIAL_ROWS // n_groups))
    at = torch.linspace(0, n_rows - 1, n_taken, dtype=BOUND_DTYPE, device=block.mask_GRK.device).round().long()

    return _Block(block.rows, block.mask_GRK[:, at], block.fit.rows(at), block.aside.rows(at))


def _errors(blocks: list[_Block], change_FK: Tensor, shift_F: Tensor) -> tuple[float, float]:
    """The gap to the dense layer's output on the points kept aside, by that output's norm: before, and changed so."""
    before = after = size = 0.0
    for block in blocks:
        shape = block.aside.d_GR.shape
        changed_GR = block.aside.error(change_FK[block.rows].unflatten(0, shape), shift_F[block.rows].view(shape))
        before += float(block.aside.dd_GR.sum())
        after += float(changed_GR.sum())
        size += float(block.aside.yy_GR.sum())
    if size == 0:
        return before, after
    return math.sqrt(before / size), math.sqrt(after / size)
