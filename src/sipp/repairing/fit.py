"""Finds the mask and weights of one layer that best reproduce its target, from its sums alone (T21).

`joint` searches the mask by alternating directions (`search.py`) and takes exact least squares on it (`solving.py`);
`refit` takes the least squares on the first mask. Where that is no better than the unfitted weights under the first
mask, on the validation points, these stay. `alps` and `sparsegpt` are the peers by their definitions: they compare with
nothing and move no intercept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sipp.inputs import Place, Weight
from sipp.repairing.search import ALPS_GROWTHS, DAMPING, GROWTHS, WIDE, LeastSquares, MaskRule, search
from sipp.repairing.solving import solve_rows
from sipp.repairing.sparsegpt import sparsegpt
from sipp.repairing.sums import Moments, WeightSums
from sipp.results import FittedLayer, Pattern, RepairMethod, numerics

PEERS: tuple[RepairMethod, ...] = ("alps", "sparsegpt")  # methods of others, by their definitions

ERROR_FEEDBACK = 1.0  # a of T21; on ResNet20 and on digits 0.25 costs one to three points
# a = 1 repeats in each block what earlier ones lost, which a deep network of linear layers does not bear (SmolLM2 at
# half of its weights: perplexity 20.9 with 1, 20.5 with this)
LARGE_ERROR_FEEDBACK = 0.25
# Shares of the mean diagonal, towards the dense weights. The mask of a score needs a larger one than a searched mask;
# trying several for each layer on the validation points was no better (ResNet20, 200 and 1,000 images).
RIDGE: dict[RepairMethod, float] = {"joint": 1e-3, "refit": 1e-2, "alps": DAMPING}

MaskOrigin = Literal["searched", "first", "unfitted"]


@dataclass(frozen=True)
class FitTask:
    """How every layer is fitted."""

    method: RepairMethod
    error_feedback: float  # how much of the error of earlier layers is compensated: a of T21
    pattern: Pattern | None
    keeps_rows: bool  # a row with a weight in the first mask keeps at least one


def fit_task(method: RepairMethod, pattern: Pattern | None, *, is_large_linear: bool, keeps_rows: bool) -> FitTask:
    """How the layers of a network are fitted."""
    a = 0.0 if method in PEERS else LARGE_ERROR_FEEDBACK if is_large_linear else ERROR_FEEDBACK
    return FitTask(method, a, pattern, keeps_rows)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a weight, which share their patches; gaps are from the weights' output to the target."""

    at: slice  # of all rows of the weight
    fit: Moments
    validation: Moments
    problem: LeastSquares


@dataclass(frozen=True)
class _Candidate:
    """A mask, and the values that a method found on it, in float64."""

    origin: MaskOrigin
    mask_FK: Tensor
    values_FK: Tensor
    ridge: float | None = None  # None: they are no least squares


@dataclass(frozen=True)
class _Fit:
    """A mask with its values, rounded to the model's dtype, and its error on the validation points."""

    origin: MaskOrigin
    mask_FK: Tensor
    new: Tensor
    shift_F: Tensor
    error: float  # infinite if a value is not finite


def fit_layer(
    task: FitTask, model: nn.Module, weight: Weight, first_mask: Tensor, sums: WeightSums, place: Place
) -> tuple[Tensor, FittedLayer]:
    """Writes the best values into the model; returns their mask and what was done."""
    keys, obstacle = sums.solvable()
    if obstacle:
        return first_mask, leave_unfitted(model, weight.name, first_mask, obstacle)
    is_peer = task.method in PEERS
    place = replace(place, kind="none") if is_peer else place
    parameter = model.get_parameter(weight.name)
    before_FK, first_FK = weight.rows(parameter.detach()).to(numerics.BOUND_DTYPE), weight.rows(first_mask)
    some = [_rows(task, sums, key, before_FK, has_intercept=place.kind != "none") for key in keys]

    def rounded(one: _Candidate, shift_F: Tensor) -> _Fit:
        new = weight.shaped(one.values_FK.to(parameter.dtype), parameter)
        return _Fit(one.origin, one.mask_FK, new, shift_F, _error(some, weight.rows(new) - before_FK, shift_F))

    unfitted = _Candidate("unfitted", first_FK, torch.where(first_FK, before_FK, 0.0))
    before = rounded(unfitted, torch.zeros_like(before_FK[:, 0]))
    candidate = METHODS[task.method](task, some, unfitted)
    found = rounded(candidate, _shift(model, place, some, candidate.values_FK))
    # a peer's values are taken whatever they give, as long as they are numbers
    is_better = found.error < before.error or (is_peer and math.isfinite(found.error))
    best = found if is_better else before
    with torch.no_grad():
        parameter.copy_(best.new)
        if place.kind != "none":
            target = _target(model, place, len(best.shift_F))
            target.copy_(target.to(best.shift_F) + place.sign * best.shift_F)
    mask = weight.shaped(best.mask_FK, first_mask)
    why = "it is exact already" if before.error == 0 else "no refit was better on validation inputs"
    return mask, FittedLayer(
        name=weight.name,
        mask_origin=best.origin,
        kept=int(mask.sum()),
        ridge=candidate.ridge if is_better else None,
        error_before=before.error,
        error_after=best.error,
        intercept=place.kind if is_better else "none",
        left_alone="" if is_better else why,
    )


def leave_unfitted(model: nn.Module, name: str, mask: Tensor, why: str) -> FittedLayer:
    """Applies the first mask to a weight in the model and leaves its values; returns the record."""
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.copy_(torch.where(mask, parameter, 0.0))
    return FittedLayer(name, "unfitted", int(mask.sum()), left_alone=why)


def _rows(
    task: FitTask, sums: WeightSums, key: tuple[int, int, int], before_FK: Tensor, *, has_intercept: bool
) -> _Rows:
    """Some rows with their gaps scaled by the error feedback, and their least squares: X't is W xx + dx."""
    at, fit = slice(key[0], key[0] + key[1]), sums.fit[key].aimed(task.error_feedback)
    xx_GKK, dx_GRK = fit.centred() if has_intercept else (fit.xx_GKK, fit.dx_GRK)
    before_GRK = before_FK[at].view(dx_GRK.shape)
    problem = LeastSquares(xx_GKK, torch.baddbmm(dx_GRK, before_GRK, xx_GKK), before_GRK, fit.n)
    return _Rows(at, fit, sums.validation[key].aimed(task.error_feedback), problem)


# --- The methods ------------------------------------------------------------------------------------------------------

# Rows without patches keep the mask and the values that they have unfitted.


def _refitted(task: FitTask, some: Sequence[_Rows], unfitted: _Candidate) -> _Candidate:
    """Least squares on the first mask."""
    return _on_mask("first", unfitted.mask_FK, some, unfitted, RIDGE[task.method])


def _searched(task: FitTask, some: Sequence[_Rows], unfitted: _Candidate) -> _Candidate:
    """Least squares on the mask that a search finds."""
    rule, start_FK = _rule(task, some, unfitted.mask_FK)
    is_fast = task.method == "alps" or start_FK.shape[1] >= WIDE
    with numerics.exact_matmul():  # rounding the factors to TF32 costs 1 to 3 %
        found_FK, _ = search([one.problem for one in some], start_FK, rule, ALPS_GROWTHS if is_fast else GROWTHS)
    mask_FK = _with_rows(unfitted.mask_FK, some, found_FK)
    return _on_mask("searched", mask_FK, some, unfitted, RIDGE[task.method])


def _by_sparsegpt(task: FitTask, some: Sequence[_Rows], unfitted: _Candidate) -> _Candidate:
    """The mask and the values of SparseGPT."""
    rule, _ = _rule(task, some, unfitted.mask_FK)
    mask_FK, values_FK = sparsegpt([one.problem for one in some], rule)
    mask_FK = _with_rows(unfitted.mask_FK, some, mask_FK)
    return _Candidate("searched", mask_FK, _with_rows(unfitted.values_FK, some, values_FK))


METHODS: dict[RepairMethod, Callable[[FitTask, Sequence[_Rows], _Candidate], _Candidate]] = {
    "joint": _searched,
    "refit": _refitted,
    "alps": _searched,
    "sparsegpt": _by_sparsegpt,
}


def _rule(task: FitTask, some: Sequence[_Rows], first_FK: Tensor) -> tuple[MaskRule, Tensor]:
    """Which masks may be found for the rows with patches, those of one range below the other, and the first one."""
    start_FK = torch.cat([first_FK[one.at] for one in some])
    before_FK = torch.cat([one.problem.before_GRK.flatten(0, 1) for one in some])
    may_FK = (before_FK != 0) | start_FK
    n_kept, n_may = torch.stack([start_FK.sum(), may_FK.sum()]).tolist()
    lives_F = start_FK.any(1) if task.keeps_rows else None
    return MaskRule(n_kept, None if n_may == may_FK.numel() else may_FK, lives_F, task.pattern), start_FK


def _of_rows(one: _Rows, whole_FK: Tensor) -> Tensor:
    """These rows of the whole (G x R x K)."""
    return whole_FK[one.at].view(one.problem.before_GRK.shape)


def _with_rows(whole_FK: Tensor, some: Sequence[_Rows], found_FK: Tensor) -> Tensor:
    """The whole with some rows as found, those of one range below the other."""
    if len(found_FK) == len(whole_FK):
        return found_FK
    whole_FK = whole_FK.clone()
    for one, rows_FK in zip(some, found_FK.split([one.at.stop - one.at.start for one in some])):
        whole_FK[one.at] = rows_FK
    return whole_FK


def _on_mask(
    origin: MaskOrigin, mask_FK: Tensor, some: Sequence[_Rows], unfitted: _Candidate, ridge: float
) -> _Candidate:
    """The least squares on a mask."""
    solved = [_least_squares(one.problem, _of_rows(one, mask_FK), ridge).flatten(0, 1) for one in some]
    values_FK = solved[0] if len(solved) == 1 else torch.cat(solved)  # wide layers are large: no copy
    return _Candidate(origin, mask_FK, _with_rows(unfitted.values_FK, some, values_FK), ridge)


def _least_squares(problem: LeastSquares, mask_GRK: Tensor, ridge: float) -> Tensor:
    """The least squares of some rows on their masks, solved for the change of the weights, which is small.

    The ridge pulls the change to 0, so it does not appear on the right-hand side.
    """
    bare_GRK = torch.where(mask_GRK, problem.before_GRK, 0.0)
    lost_GRK = torch.baddbmm(problem.wanted_GRK, bare_GRK, problem.xx_GKK, alpha=-1)
    return solve_rows(problem.xx_GKK, lost_GRK, mask_GRK, problem.ridge(ridge)).add_(bare_GRK)


def _error(some: Sequence[_Rows], change_FK: Tensor, shift_F: Tensor) -> float:
    """The validation error of changed weights: the gap to the target, relative to the norm of the dense output.

    Infinite if a change is not finite.
    """
    sums = list[Tensor]()
    for one in some:
        shape = one.validation.d_GR.shape
        far_GR = one.validation.error(_of_rows(one, change_FK), shift_F[one.at].view(shape))
        sums.append(torch.stack([far_GR.sum(), one.validation.yy_GR.sum()]))
    far, size = torch.stack(sums).sum(0).tolist()
    error = math.sqrt(far / size) if 0 < size < math.inf else math.sqrt(far)
    return error if math.isfinite(error) else math.inf


# --- Intercepts -------------------------------------------------------------------------------------------------------


def _shift(model: nn.Module, place: Place, some: Sequence[_Rows], new_FK: Tensor) -> Tensor:
    """The best intercepts for new values, as they are after rounding to the dtype of their tensor (float64)."""
    shift_F = torch.zeros_like(new_FK[:, 0])
    if place.kind == "none":
        return shift_F
    for one in some:
        change_GRK = _of_rows(one, new_FK) - one.problem.before_GRK
        shift_F[one.at] = one.fit.intercept(change_GRK).flatten()
    current = _target(model, place, len(shift_F))
    moved = (current.to(shift_F) + place.sign * shift_F).to(current.dtype)
    return place.sign * (moved.to(shift_F) - current.to(shift_F))


def _target(model: nn.Module, place: Place, n_rows: int) -> Tensor:
    """The tensor that takes the intercepts."""
    owner, _, local = place.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), local)
    return tensor.detach()[place.start : place.start + n_rows]
