"""Finds the mask and weights of one layer that best reproduce its target (T21).

`joint` searches the mask by alternating directions, takes exact least squares on it, and keeps whichever of the first
mask and the new one is better on the validation points; `refit` takes the least squares on the first mask; `alps` and
`sparsegpt` are the peers by their definitions, which compare with nothing and move no intercept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.inputs import NOWHERE, Place, Weight, from_rows, to_rows
from sipp.repairing.layer_search import (
    ALPS_GROWTHS,
    DAMPING,
    GROWTHS,
    WIDE,
    LeastSquares,
    MaskRule,
    search,
)
from sipp.repairing.moments import Moments, RowBlock, WeightMoments, slice_of, solvable
from sipp.repairing.repair_task import PEERS, REFIT_RIDGES
from sipp.repairing.solving import solve_rows
from sipp.repairing.sparsegpt import sparsegpt
from sipp.results import FittedLayer, MaskOrigin, Pattern, RepairMethod, numerics

RIDGE_NOISE = 0.01  # relative, of squared errors: closer ones count as equal
N_TRIAL_ROWS = 64  # spread over the weight: they choose the ridge, and then all rows are solved
# On a CPU, these few rows show whether the first mask is worth solving: not if the squared error of the searched mask,
# on them, is below this share of the error of the first. A GPU solves all rows of both masks with as many launches.
N_PREVIEW_ROWS, CLEARLY_BETTER = 16, 0.95


@dataclass(frozen=True)
class LayerTask:
    """How every layer is fitted."""

    method: RepairMethod
    error_feedback: float  # how much of the error of earlier layers is compensated: a of T21
    ridges: tuple[float, ...]  # shares of the mean diagonal, towards the old weights; tried while the error falls
    pattern: Pattern | None
    keeps_rows: bool  # a row with a weight in the first mask keeps at least one


@dataclass(frozen=True)
class _Block:
    """Rows of a weight that share their patches; gaps are from the weights' output to the target."""

    rows: slice
    fit: Moments
    validation: Moments
    system: LeastSquares


@dataclass(frozen=True)
class _Problem:
    """The weight that is fitted, as it is in the model, and its sums."""

    model: nn.Module
    weight: Weight
    place: Place  # of its intercepts
    before_FK: Tensor
    blocks: list[_Block]


@dataclass(frozen=True)
class _Fit:
    """A mask with its values, rounded to the model's dtype, and its error on the validation points."""

    origin: MaskOrigin
    mask_FK: Tensor
    new: Tensor
    shift_F: Tensor
    error: float | None  # None: not validated; infinite if a value is not finite


def fit_layer(
    task: LayerTask,
    model: nn.Module,
    weight: Weight,
    first_mask: Tensor,
    sums: WeightMoments,
    place: Place,
) -> tuple[Tensor, FittedLayer]:
    """Writes the best values into the model; returns their mask and what was done."""
    keys, obstacle = solvable(sums)
    if obstacle:
        return first_mask, leave_unfitted(model, weight, first_mask, obstacle)
    place = NOWHERE if task.method in PEERS else place
    before_FK, mask_FK = (to_rows(weight, one) for one in (model.get_parameter(weight.name).detach(), first_mask))
    before_FK = before_FK.to(numerics.BOUND_DTYPE)
    blocks = [_block(task, sums, key, before_FK, has_intercept=place.kind != "none") for key in keys]
    problem = _Problem(model, weight, place, before_FK, blocks)
    fits, ridge, n_rounds = _fits(task, problem, mask_FK)
    fits = [_unfitted(problem, mask_FK), *fits]  # the first wins a tie
    if task.method not in PEERS:
        best = min(fits, key=lambda fit: math.inf if fit.error is None else fit.error)
    else:
        best = fits[-1] if _are_finite(fits[-1]) else _unfitted(problem, mask_FK)
    with torch.no_grad():
        model.get_parameter(weight.name).copy_(best.new)
    if place.kind != "none":
        _apply_shift(model, place, best.shift_F)
    mask = from_rows(weight, best.mask_FK, first_mask)
    is_fitted = best.origin != "unfitted"
    errors = {fit.origin: fit.error for fit in fits}
    n_kept, n_moved = torch.stack([mask.sum(), (mask & ~first_mask).sum()]).tolist()
    return mask, FittedLayer(
        name=weight.name,
        mask_origin=best.origin,
        kept=n_kept,
        n_moved=n_moved,
        ridge=ridge if is_fitted else None,
        error_before=errors.get("unfitted"),
        error_first_mask=errors.get("first"),
        error_searched_mask=errors.get("searched"),
        error_after=best.error,
        rounds=n_rounds,
        intercept=place.kind if is_fitted else "none",
        left_alone="" if is_fitted else _why_unfitted(best),
    )


def leave_unfitted(model: nn.Module, weight: Weight, mask: Tensor, why: str) -> FittedLayer:
    """Applies the first mask to a weight in the model and leaves its values; returns the record."""
    parameter = model.get_parameter(weight.name)
    with torch.no_grad():
        parameter.copy_(torch.where(mask, parameter, 0.0))
    return FittedLayer(weight.name, "unfitted", int(mask.sum()), left_alone=why)


def _why_unfitted(fit: _Fit) -> str:
    return "it is exact already" if fit.error == 0 else "no refit was better on validation inputs"


def _are_finite(fit: _Fit) -> bool:
    """Whether all values are finite; one look at a GPU."""
    return math.isfinite(fit.new.sum(dtype=numerics.BOUND_DTYPE) + fit.shift_F.sum())


def _block(
    task: LayerTask,
    sums: WeightMoments,
    key: RowBlock,
    before_FK: Tensor,
    *,
    has_intercept: bool,
) -> _Block:
    """A block of rows with its gaps scaled by the error feedback, and its least squares: X't is W xx + dx."""
    fit = _with_error_feedback(sums.fit[key], task.error_feedback)
    xx_GKK, dx_GRK = fit.centred() if has_intercept else (fit.xx_GKK, fit.dx_GRK)
    before_GRK = before_FK[slice_of(key)].view(dx_GRK.shape)
    system = LeastSquares(xx_GKK, torch.baddbmm(dx_GRK, before_GRK, xx_GKK), before_GRK, fit.n, has_intercept)
    validation = _with_error_feedback(sums.validation[key], task.error_feedback)
    return _Block(slice_of(key), fit, validation, system)


def _with_error_feedback(sums: Moments, a: float) -> Moments:
    """The sums with all gaps scaled by the error feedback a (T21)."""
    return sums if a == 1 else replace(sums, dx_GRK=a * sums.dx_GRK, d_GR=a * sums.d_GR, dd_GR=a * a * sums.dd_GR)


def _fits(task: LayerTask, problem: _Problem, mask_FK: Tensor) -> tuple[list[_Fit], float | None, int]:
    """The fits to choose from: on the first mask, on the searched one, or on both; their ridge, and the rounds."""
    blocks, before_FK = problem.blocks, problem.before_FK
    origins = _origins(task)
    searched_FK, values_FK, n_rounds = mask_FK, None, 0
    if "searched" in origins:
        searched_FK, values_FK, n_rounds = _search_mask(task, blocks, before_FK, mask_FK)
    if values_FK is not None:
        return [_rounded(problem, "searched", searched_FK, values_FK)], None, n_rounds
    ridge = _ridge(task, blocks, searched_FK)
    if len(origins) > 1 and len(mask_FK) > 2 * N_PREVIEW_ROWS and not mask_FK.is_cuda:
        at_first, at_last = (_trial_error(blocks, some_FK, ridge, N_PREVIEW_ROWS) for some_FK in (mask_FK, searched_FK))
        origins = ("searched",) if at_last < CLEARLY_BETTER * at_first < math.inf else origins
    masks = [searched_FK if origin == "searched" else mask_FK for origin in origins]
    solved = _solved(blocks, masks, before_FK, ridge)
    return [_rounded(problem, *fit) for fit in zip(origins, masks, solved)], ridge, n_rounds


def _origins(task: LayerTask) -> tuple[MaskOrigin, ...]:
    """Which masks to fit; both if validation points will choose."""
    if task.method == "refit":
        return ("first",)
    if task.method in PEERS:
        return ("searched",)
    return ("first", "searched")


def _search_mask(
    task: LayerTask, blocks: Sequence[_Block], before_FK: Tensor, mask_FK: Tensor
) -> tuple[Tensor, Tensor | None, int]:
    """The mask that the search finds, its values if the search gives them, and the number of rounds.

    Rows without patches keep their mask.
    """
    start_FK, dense_FK = (torch.cat([some_FK[block.rows] for block in blocks]) for some_FK in (mask_FK, before_FK))
    may_FK, lives_F = (dense_FK != 0) | start_FK, start_FK.any(1)
    n_kept, n_may, n_live = torch.stack([start_FK.sum(), may_FK.sum(), lives_F.sum()]).tolist()
    rule = MaskRule(
        n_kept,
        None if n_may == may_FK.numel() else may_FK,
        lives_F if task.keeps_rows else None,
        task.pattern,
        all_live=n_live == len(lives_F),
    )
    systems = [block.system for block in blocks]
    if task.method == "sparsegpt":
        found_FK, values_FK = sparsegpt(systems, rule)
        bare_FK = torch.where(mask_FK, before_FK, 0.0)
        return _with_rows(mask_FK, blocks, found_FK), _with_rows(bare_FK, blocks, values_FK), 0
    with numerics.exact_matmul():  # rounding the factors to TF32 costs 1 to 3 %
        is_fast = task.method == "alps" or mask_FK.shape[1] >= WIDE
        growths = ALPS_GROWTHS if is_fast else GROWTHS
        found_FK, n_rounds = search(systems, start_FK, rule, growths)
    return _with_rows(mask_FK, blocks, found_FK), None, n_rounds


def _with_rows(whole_FK: Tensor, blocks: Sequence[_Block], found_FK: Tensor) -> Tensor:
    """The whole with the rows of the blocks as found, one block below the other."""
    if len(found_FK) == len(whole_FK):
        return found_FK
    whole_FK = whole_FK.clone()
    for block, rows_FK in zip(blocks, found_FK.split([block.rows.stop - block.rows.start for block in blocks])):
        whole_FK[block.rows] = rows_FK
    return whole_FK


def _ridge(task: LayerTask, blocks: Sequence[_Block], mask_FK: Tensor) -> float:
    """The first ridge whose validation error, on some rows, is nearly the least."""
    if task.method == "alps":
        return DAMPING
    errors = list[float]()
    for ridge in task.ridges if len(task.ridges) > 1 else ():
        errors.append(_trial_error(blocks, mask_FK, ridge, N_TRIAL_ROWS))
        if errors[-1] > min(errors):  # the error falls, then rises
            break
    least = min(errors, default=0.0)
    if math.isinf(least):  # rounding made the system indefinite: a larger ridge helps
        larger = (share for share in reversed(REFIT_RIDGES) if share > max(task.ridges))
        fit = (share for share in larger if math.isfinite(_trial_error(blocks, mask_FK, share, N_TRIAL_ROWS)))
        return next(fit, task.ridges[0])
    return next((r for r, error in zip(task.ridges, errors) if error <= (1 + RIDGE_NOISE) * least), task.ridges[0])


def _trial_error(blocks: Sequence[_Block], mask_FK: Tensor, ridge: float, most: int) -> float:
    """The squared validation error of at most `most` rows, spread over the weight."""
    total = torch.zeros((), dtype=numerics.BOUND_DTYPE, device=mask_FK.device)
    for block in blocks:
        whole = block.system
        n_groups, n_rows, _ = whole.dense_GRK.shape
        n_taken = min(n_rows, max(1, most // n_groups))
        at = torch.linspace(0, n_rows - 1, n_taken, dtype=numerics.BOUND_DTYPE, device=mask_FK.device).round().long()
        few = replace(whole, wanted_GRK=whole.wanted_GRK[:, at], dense_GRK=whole.dense_GRK[:, at])
        mask_GRK = mask_FK[block.rows].view(whole.dense_GRK.shape)[:, at]
        change_GRK = _refitted(few, mask_GRK, ridge) - few.dense_GRK
        fit = block.fit.rows(at)
        shift_GR = fit.intercept(change_GRK) if whole.is_centred else torch.zeros_like(fit.d_GR)
        total = total + block.validation.rows(at).error(change_GRK, shift_GR).sum()
    error = float(total)
    return error if math.isfinite(error) else math.inf


def _solved(blocks: Sequence[_Block], masks: Sequence[Tensor], before_FK: Tensor, ridge: float) -> list[Tensor]:
    """The least squares on each of some masks; rows without patches keep their weights."""
    parts = list[Sequence[Tensor]]()  # by block, of each mask
    for block in blocks:
        rows, n = block.system, len(masks)
        shape = rows.dense_GRK.shape
        if n > 1:
            rows = replace(rows, wanted_GRK=rows.wanted_GRK.repeat(1, n, 1), dense_GRK=rows.dense_GRK.repeat(1, n, 1))
        mask_GRK = torch.cat([mask_FK[block.rows].view(shape) for mask_FK in masks], 1)
        parts.append([part.flatten(0, 1) for part in _refitted(rows, mask_GRK, ridge).split(shape[1], 1)])
    found = [each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts)]  # wide layers are large: no copy
    if len(found[0]) == len(before_FK):
        return found
    return [_with_rows(torch.where(mask_FK, before_FK, 0.0), blocks, new_FK) for mask_FK, new_FK in zip(masks, found)]


def _refitted(rows: LeastSquares, mask_GRK: Tensor, ridge: float) -> Tensor:
    """The least squares of some rows on their masks, solved for the change of the weights, which is small.

    The ridge pulls the change to 0, so it does not appear on the right-hand side.
    """
    bare_GRK = torch.where(mask_GRK, rows.dense_GRK, 0.0)
    lost_GRK = torch.baddbmm(rows.wanted_GRK, bare_GRK, rows.xx_GKK, alpha=-1)
    return solve_rows(rows.xx_GKK, lost_GRK, mask_GRK, 0.0, rows.ridge(ridge)).add_(bare_GRK)


def _unfitted(problem: _Problem, mask_FK: Tensor) -> _Fit:
    """The weights as they were, under the first mask."""
    parameter = problem.model.get_parameter(problem.weight.name)
    unfitted_FK = torch.where(mask_FK, problem.before_FK, 0.0)
    no_shift_F = torch.zeros_like(unfitted_FK[:, 0])
    error = _error(problem.blocks, unfitted_FK - problem.before_FK, no_shift_F)
    new = from_rows(problem.weight, unfitted_FK.to(parameter.dtype), parameter)
    return _Fit("unfitted", mask_FK, new, no_shift_F, error)


def _rounded(problem: _Problem, origin: MaskOrigin, mask_FK: Tensor, new_FK: Tensor) -> _Fit:
    """The values and intercepts, rounded to the model's dtype; the error is infinite if one is not finite."""
    parameter, before_FK = problem.model.get_parameter(problem.weight.name), problem.before_FK
    shift_F = torch.zeros_like(before_FK[:, 0])
    if problem.place.kind != "none":
        for block in problem.blocks:
            before_GRK = block.system.dense_GRK
            change_GRK = new_FK[block.rows].view(before_GRK.shape) - before_GRK
            shift_F[block.rows] = block.fit.intercept(change_GRK).flatten()
        shift_F = _shift(problem.model, problem.place, shift_F)
    new = from_rows(problem.weight, new_FK.to(parameter.dtype), parameter)
    change_FK = to_rows(problem.weight, new).to(numerics.BOUND_DTYPE) - before_FK  # as rounded
    return _Fit(origin, mask_FK, new, shift_F, _error(problem.blocks, change_FK, shift_F))


def _error(blocks: Sequence[_Block], change_FK: Tensor, shift_F: Tensor) -> float | None:
    """The validation error of changed weights: the gap to the target, relative to the norm of the dense output.

    None without validation points; infinite if a change is not finite.
    """
    sums = list[Tensor]()
    for block in blocks:
        shape = block.validation.d_GR.shape
        change_GRK = change_FK[block.rows].unflatten(0, shape)
        far_GR = block.validation.error(change_GRK, shift_F[block.rows].view(shape))
        sums.append(torch.stack([far_GR.sum(), block.validation.yy_GR.sum()]))
    far, size = torch.stack(sums).sum(0).tolist()
    error = math.sqrt(far / size) if 0 < size < math.inf else math.sqrt(far)
    return error if math.isfinite(error) else math.inf


def _shift(model: nn.Module, place: Place, shift_F: Tensor) -> Tensor:
    """What `_apply_shift` really adds, after rounding to the tensor's dtype (float64)."""
    current = _target(model, place, len(shift_F))
    moved = (current.to(shift_F) + place.sign * shift_F).to(current.dtype)
    return place.sign * (moved.to(shift_F) - current.to(shift_F))


def _apply_shift(model: nn.Module, place: Place, shift_F: Tensor) -> None:
    """Adds the intercepts to the tensor in place."""
    current = _target(model, place, len(shift_F))
    with torch.no_grad():
        current.copy_(current.to(shift_F) + place.sign * shift_F)


def _target(model: nn.Module, place: Place, n_rows: int) -> Tensor:
    owner, _, local = place.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), local)
    return tensor.detach()[place.start : place.start + n_rows]
