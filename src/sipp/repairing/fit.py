"""Finds the mask and weights of one layer that best reproduce its target, from its sums alone (T21).

`joint` searches the mask by alternating directions (`search.py`) and takes exact least squares on it (`solving.py`);
`refit` takes the least squares on the first mask. Where that is no better than the unfitted weights under the first
mask, on the validation points, these stay. `alps` and `sparsegpt` are the peers by their definitions: they compare with
nothing and move no intercept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def fit_task(method: RepairMethod, pattern: Pattern | None, *, is_large: bool, keeps_rows: bool) -> FitTask:
    """How the layers of a network are fitted; `is_large`: it is like a language model."""
    a = 0.0 if method in PEERS else LARGE_ERROR_FEEDBACK if is_large else ERROR_FEEDBACK
    return FitTask(method, a, pattern, keeps_rows)


@dataclass(frozen=True)
class _Block:
    """Rows of a weight that share their patches; gaps are from the weights' output to the target."""

    rows: slice
    fit: Moments
    validation: Moments
    system: LeastSquares


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
    blocks = [_block(task, sums, key, before_FK, has_intercept=place.kind != "none") for key in keys]

    def rounded(origin: MaskOrigin, mask_FK: Tensor, new_FK: Tensor, shift_F: Tensor) -> _Fit:
        new = weight.shaped(new_FK.to(parameter.dtype), parameter)
        return _Fit(origin, mask_FK, new, shift_F, _error(blocks, weight.rows(new) - before_FK, shift_F))

    bare_FK = torch.where(first_FK, before_FK, 0.0)
    before = rounded("unfitted", first_FK, bare_FK, torch.zeros_like(before_FK[:, 0]))
    origin, mask_FK, new_FK, ridge, n_rounds = _found(task, blocks, first_FK, bare_FK)
    found = rounded(origin, mask_FK, new_FK, _shift(model, place, blocks, new_FK))
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
        ridge=ridge if is_better else None,
        error_before=before.error,
        error_after=best.error,
        rounds=n_rounds,
        intercept=place.kind if is_better else "none",
        left_alone="" if is_better else why,
    )


def leave_unfitted(model: nn.Module, name: str, mask: Tensor, why: str) -> FittedLayer:
    """Applies the first mask to a weight in the model and leaves its values; returns the record."""
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.copy_(torch.where(mask, parameter, 0.0))
    return FittedLayer(name, "unfitted", int(mask.sum()), left_alone=why)


def _block(
    task: FitTask, sums: WeightSums, key: tuple[int, int, int], before_FK: Tensor, *, has_intercept: bool
) -> _Block:
    """A block of rows with its gaps scaled by the error feedback, and its least squares: X't is W xx + dx."""
    rows, fit = slice(key[0], key[0] + key[1]), sums.fit[key].aimed(task.error_feedback)
    xx_GKK, dx_GRK = fit.centred() if has_intercept else (fit.xx_GKK, fit.dx_GRK)
    before_GRK = before_FK[rows].view(dx_GRK.shape)
    system = LeastSquares(xx_GKK, torch.baddbmm(dx_GRK, before_GRK, xx_GKK), before_GRK, fit.n)
    return _Block(rows, fit, sums.validation[key].aimed(task.error_feedback), system)


def _found(
    task: FitTask, blocks: Sequence[_Block], first_FK: Tensor, bare_FK: Tensor
) -> tuple[MaskOrigin, Tensor, Tensor, float | None, int]:
    """The mask, the values on it, their ridge if they are least squares, and the rounds of the search.

    Rows without patches keep their mask and weights.
    """
    origin: MaskOrigin = "first" if task.method == "refit" else "searched"
    mask_FK, n_rounds, systems = first_FK, 0, [block.system for block in blocks]
    if origin == "searched":
        rule, start_FK = _rule(task, blocks, first_FK)
        if task.method == "sparsegpt":
            found_FK, values_FK = sparsegpt(systems, rule)
            return origin, _with_rows(first_FK, blocks, found_FK), _with_rows(bare_FK, blocks, values_FK), None, 0
        is_fast = task.method == "alps" or first_FK.shape[1] >= WIDE
        with numerics.exact_matmul():  # rounding the factors to TF32 costs 1 to 3 %
            found_FK, n_rounds = search(systems, start_FK, rule, ALPS_GROWTHS if is_fast else GROWTHS)
        mask_FK = _with_rows(first_FK, blocks, found_FK)
    ridge = RIDGE[task.method]
    solved = [_refitted(block.system, _rows_of(block, mask_FK), ridge).flatten(0, 1) for block in blocks]
    values_FK = solved[0] if len(solved) == 1 else torch.cat(solved)  # wide layers are large: no copy
    return origin, mask_FK, _with_rows(bare_FK, blocks, values_FK), ridge, n_rounds


def _rule(task: FitTask, blocks: Sequence[_Block], first_FK: Tensor) -> tuple[MaskRule, Tensor]:
    """Which masks the search may find for the rows with patches, one block below the other, and where it begins."""
    start_FK = torch.cat([first_FK[block.rows] for block in blocks])
    dense_FK = torch.cat([block.system.dense_GRK.flatten(0, 1) for block in blocks])
    may_FK = (dense_FK != 0) | start_FK
    n_kept, n_may = torch.stack([start_FK.sum(), may_FK.sum()]).tolist()
    lives_F = start_FK.any(1) if task.keeps_rows else None
    return MaskRule(n_kept, None if n_may == may_FK.numel() else may_FK, lives_F, task.pattern), start_FK


def _rows_of(block: _Block, whole_FK: Tensor) -> Tensor:
    """The rows of a block (G x R x K)."""
    return whole_FK[block.rows].view(block.system.dense_GRK.shape)


def _with_rows(whole_FK: Tensor, blocks: Sequence[_Block], found_FK: Tensor) -> Tensor:
    """The whole with the rows of the blocks as found, one block below the other."""
    if len(found_FK) == len(whole_FK):
        return found_FK
    whole_FK = whole_FK.clone()
    for block, rows_FK in zip(blocks, found_FK.split([block.rows.stop - block.rows.start for block in blocks])):
        whole_FK[block.rows] = rows_FK
    return whole_FK


def _refitted(rows: LeastSquares, mask_GRK: Tensor, ridge: float) -> Tensor:
    """The least squares of some rows on their masks, solved for the change of the weights, which is small.

    The ridge pulls the change to 0, so it does not appear on the right-hand side.
    """
    bare_GRK = torch.where(mask_GRK, rows.dense_GRK, 0.0)
    lost_GRK = torch.baddbmm(rows.wanted_GRK, bare_GRK, rows.xx_GKK, alpha=-1)
    return solve_rows(rows.xx_GKK, lost_GRK, mask_GRK, rows.ridge(ridge)).add_(bare_GRK)


def _error(blocks: Sequence[_Block], change_FK: Tensor, shift_F: Tensor) -> float:
    """The validation error of changed weights: the gap to the target, relative to the norm of the dense output.

    Infinite if a change is not finite.
    """
    sums = list[Tensor]()
    for block in blocks:
        shape = block.validation.d_GR.shape
        far_GR = block.validation.error(_rows_of(block, change_FK), shift_F[block.rows].view(shape))
        sums.append(torch.stack([far_GR.sum(), block.validation.yy_GR.sum()]))
    far, size = torch.stack(sums).sum(0).tolist()
    error = math.sqrt(far / size) if 0 < size < math.inf else math.sqrt(far)
    return error if math.isfinite(error) else math.inf


# --- Intercepts -------------------------------------------------------------------------------------------------------


def _shift(model: nn.Module, place: Place, blocks: Sequence[_Block], new_FK: Tensor) -> Tensor:
    """The best intercepts for new values, as they are after rounding to the dtype of their tensor (float64)."""
    shift_F = torch.zeros_like(new_FK[:, 0])
    if place.kind == "none":
        return shift_F
    for block in blocks:
        change_GRK = _rows_of(block, new_FK) - block.system.dense_GRK
        shift_F[block.rows] = block.fit.intercept(change_GRK).flatten()
    current = _target(model, place, len(shift_F))
    moved = (current.to(shift_F) + place.sign * shift_F).to(current.dtype)
    return place.sign * (moved.to(shift_F) - current.to(shift_F))


def _target(model: nn.Module, place: Place, n_rows: int) -> Tensor:
    """The tensor that takes the intercepts."""
    owner, _, local = place.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), local)
    return tensor.detach()[place.start : place.start + n_rows]
