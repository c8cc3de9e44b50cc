"""Finds the mask and weights of one layer that best reproduce its target (T21).

Three ways to find them: `joint` searches the mask by alternating directions, takes exact least squares on it, and keeps
whichever of the first mask and the new one is better on points kept aside; `given` refits the first mask; `alps` and
`sparsegpt` are the peers by their definitions, which compare with nothing and move no intercept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sipp.records.numerics import BOUND_DTYPE, exact_matmul
from sipp.records.options import Fitting, Pattern
from sipp.records.ranking import Weight, from_rows, to_rows
from sipp.records.repair import Intercept
from sipp.repairing.gathering import WeightMoments, slice_of, solvable
from sipp.repairing.intercepts import NOWHERE, Place, apply_shift, shift
from sipp.repairing.layer_search import DAMPING, Bases, LeastSquares, MaskRule, search
from sipp.repairing.moments import Moments
from sipp.repairing.solving import solve_rows
from sipp.repairing.sparsegpt import sparsegpt

RIDGE_NOISE = 0.01  # relative, of squared errors: those that are closer are the same
N_TRIAL_ROWS = 64  # spread over the weight, that choose the ridge; then all rows are solved
# So few rows, of weights with several times as many, tell whether the first mask is worth solving: where the squared
# error of the new one is below this share of its own there, it is not
N_CLEAR_ROWS, CLEAR = 16, 0.95

Way = Literal["joint", "given"] | Fitting
PEERS: tuple[Fitting, ...] = get_args(Fitting)
Support = Literal["joint", "given", "none"]  # whose mask was taken; none: the weights are the dense ones under the mask


@dataclass(frozen=True)
class JointLayer:
    """What became of one weight. Errors are on points kept aside: the gap to the layer's target, by its norm."""

    name: str
    support: Support
    kept: int
    moved: int  # weights that are kept and were not in the first mask
    ridge: float | None  # a share of the mean square of the inputs; None where nothing was refitted with one
    error_before: float | None  # of the first mask with the dense weights; None where it could not be compared
    error_given: float | None  # of the first mask, refitted; None also where some rows showed that it is worse
    error_joint: float | None  # of the mask that was found, refitted
    error: float | None  # of what was taken
    rounds: int  # of the search
    corrects: bool  # the residual stream that its output is added to
    intercept: Intercept
    why: str  # the weights are the dense ones under the mask; empty where they are refitted


@dataclass(frozen=True)
class LayerTask:
    """How the layers are fitted, the same for all."""

    way: Way
    error_feedback: float  # how much of what earlier layers lost is made up for: a of T21
    ridges: tuple[float, ...]  # shares of the mean diagonal, towards the dense weights; a later one has to be better
    pattern: Pattern | None
    keeps_rows: bool  # no row dies that has a weight in the first mask
    allow_tf32: bool = False  # in passes and sums on a GPU; masks and values are always found exactly


@dataclass(frozen=True)
class _Block:
    """Rows of a weight that meet the same patches; gaps are from the dense weights' output there to the target."""

    rows: slice
    fit: Moments
    validation: Moments | None  # None: nothing is kept aside


@dataclass(frozen=True)
class _Fit:
    """A mask with its values, as the model can hold them, and its error on the points kept aside."""

    support: Support
    mask_FK: Tensor
    new: Tensor
    shift_F: Tensor
    error: float | None  # None: no points are kept aside; infinite where the values are no numbers


def fit_layer(
    task: LayerTask,
    model: nn.Module,
    weight: Weight,
    given: Tensor,
    sums: WeightMoments,
    place: Place,
    decided: JointLayer | None,
    bases: Bases | None = None,
) -> tuple[Tensor, JointLayer]:
    """The mask that was taken, with its values written into the model, and what was done.

    `decided` is what points kept aside have chosen before: its support and ridge are taken then. `bases` are those of
    the layers before, which may meet the same inputs.
    """
    blocks, obstacle = _blocks(sums, task.error_feedback, judged=decided is None)
    if decided is not None and decided.support == "none":
        obstacle = obstacle or decided.why
    if obstacle:
        return given, left_as_given(model, weight, given, obstacle)
    place = NOWHERE if task.way in PEERS else place
    mask_FK = to_rows(weight, given)
    dense_FK = to_rows(weight, model.get_parameter(weight.name).detach()).to(BOUND_DTYPE)
    rows = [_rows(block, dense_FK, place.kind != "none") for block in blocks]
    supports = _supports(task, decided)
    found_FK, values_FK, n_rounds = mask_FK, None, 0
    if "joint" in supports:
        at = [block.rows for block in blocks]
        found_FK, values_FK, n_rounds = _searched(task, rows, at, dense_FK, mask_FK, bases)
    ridge = None if values_FK is not None else _ridge(task, blocks, rows, found_FK, decided)
    if ridge is not None and len(supports) > 1 and weight.n_rows > 2 * N_CLEAR_ROWS:
        at_first, at_last = (_trial_error(blocks, rows, one_FK, ridge, N_CLEAR_ROWS) for one_FK in (mask_FK, found_FK))
        supports = ("joint",) if at_last < CLEAR * at_first < math.inf else supports
    fits: dict[Support, _Fit] = {}
    for support in supports:
        this_FK = found_FK if support == "joint" else mask_FK
        new_FK = values_FK if ridge is None else _solved(blocks, rows, this_FK, dense_FK, ridge)
        assert new_FK is not None
        fits[support] = _rounded(model, weight, blocks, rows, this_FK, new_FK, place, support)
    bare_FK = torch.where(mask_FK, dense_FK, 0.0)
    bare = _Fit("none", mask_FK, from_rows(weight, bare_FK, given), torch.zeros_like(dense_FK[:, 0]), None)
    bare = replace(bare, error=_error(blocks, bare_FK - dense_FK, bare.shift_F))
    best = _taken(task, fits, bare, decided)
    with torch.no_grad():
        model.get_parameter(weight.name).copy_(best.new)
    if place.kind != "none":
        apply_shift(model, place, best.shift_F)
    mask = from_rows(weight, best.mask_FK, given)
    is_refitted = best.support != "none"
    layer = JointLayer(
        name=weight.name,
        support=best.support,
        kept=int(mask.sum()),
        moved=int((mask & ~given).sum()),
        ridge=ridge if is_refitted else None,
        error_before=bare.error,
        error_given=fits["given"].error if "given" in fits else None,
        error_joint=fits["joint"].error if "joint" in fits else None,
        error=best.error,
        rounds=n_rounds,
        corrects=False,
        intercept=place.kind if is_refitted else "none",
        why="" if is_refitted else "no refit was better on held-back inputs",
    )
    return mask, layer


def left_as_given(model: nn.Module, weight: Weight, mask: Tensor, why: str) -> JointLayer:
    """The record of a weight that keeps its dense values under the first mask, written into the model."""
    parameter = model.get_parameter(weight.name)
    with torch.no_grad():
        parameter.copy_(torch.where(mask, parameter, 0.0))
    errors = (None, None, None, None, None)
    return JointLayer(weight.name, "none", int(mask.sum()), 0, *errors, 0, False, "none", why)


def _supports(task: LayerTask, decided: JointLayer | None) -> tuple[Support, ...]:
    """Whose masks are fitted: both, where points kept aside are to choose."""
    if task.way == "given":
        return ("given",)
    if task.way in PEERS:
        return ("joint",)
    return ("given", "joint") if decided is None else (decided.support,)


def _taken(task: LayerTask, fits: dict[Support, _Fit], bare: _Fit, decided: JointLayer | None) -> _Fit:
    """The best on the points kept aside; a peer's own, and what was decided, unless those are no numbers."""
    if decided is not None or task.way in PEERS:
        only = next(iter(fits.values()))
        is_finite = bool(torch.isfinite(only.new).all() & torch.isfinite(only.shift_F).all())
        return only if is_finite else bare
    return min((*fits.values(), bare), key=lambda fit: math.inf if fit.error is None else fit.error)


def _blocks(sums: WeightMoments, a: float, *, judged: bool) -> tuple[list[_Block], str]:
    """The blocks of rows with their gaps times a, and why they cannot be solved; empty where they can."""
    keys, why = solvable(sums, judged=judged)
    found = []
    for key in keys:
        aside = _towards(sums.validation[key], a) if judged else None
        found.append(_Block(slice_of(key), _towards(sums.fit[key], a), aside))
    return found, why


def _towards(sums: Moments, a: float) -> Moments:
    return replace(sums, dx_GRK=a * sums.dx_GRK, d_GR=a * sums.d_GR, dd_GR=a * a * sums.dd_GR)


def _rows(block: _Block, dense_FK: Tensor, has_intercept: bool) -> LeastSquares:
    """The system of least squares of the block's rows: inputs with targets are W xx + dx."""
    fit = block.fit
    xx_GKK, dx_GRK = fit.centred() if has_intercept else (fit.xx_GKK, fit.dx_GRK)
    dense_GRK = dense_FK[block.rows].view(dx_GRK.shape)
    return LeastSquares(xx_GKK, dense_GRK @ xx_GKK + dx_GRK, dense_GRK, fit.n, has_intercept)


def _searched(
    task: LayerTask,
    rows: Sequence[LeastSquares],
    places: Sequence[slice],
    dense_FK: Tensor,
    mask_FK: Tensor,
    bases: Bases | None,
) -> tuple[Tensor, Tensor | None, int]:
    """The mask that the search finds, its values where the search gives them, and its rounds.

    Rows that meet no patches keep their mask.
    """
    at = torch.cat([torch.arange(p.start, p.stop, dtype=torch.int64, device=mask_FK.device) for p in places])
    start_FK = mask_FK[at]
    may_FK = (dense_FK[at] != 0) | start_FK
    lives_F = start_FK.any(1) if task.keeps_rows else None
    rule = MaskRule(int(start_FK.sum()), may_FK, lives_F, task.pattern)
    if task.way == "sparsegpt":
        found_FK, values_FK = sparsegpt(rows, rule)
        whole_FK = torch.where(mask_FK, dense_FK, 0.0).index_copy(0, at, values_FK)
        return mask_FK.index_copy(0, at, found_FK), whole_FK, 0
    try:
        with exact_matmul():  # rounds divide by rho what lies far from what they keep: rounded factors cost 1 to 3 %
            found_FK, n_rounds = search(rows, start_FK, rule, bases)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # the first mask stays
        found_FK, n_rounds = start_FK, 0
    return mask_FK.index_copy(0, at, found_FK), None, n_rounds


def _ridge(
    task: LayerTask, blocks: Sequence[_Block], rows: Sequence[LeastSquares], mask_FK: Tensor, decided: JointLayer | None
) -> float:
    """The ridge of the least error on the points kept aside, of some rows; the first that is nearly as good."""
    if task.way == "alps":
        return DAMPING
    if decided is not None and decided.ridge is not None:
        return decided.ridge
    tried = task.ridges if len(task.ridges) > 1 else ()
    errors = [_trial_error(blocks, rows, mask_FK, ridge, N_TRIAL_ROWS) for ridge in tried]
    least = min(errors, default=0.0)
    return next((r for r, error in zip(task.ridges, errors) if error <= (1 + RIDGE_NOISE) * least), task.ridges[0])


def _trial_error(
    blocks: Sequence[_Block], rows: Sequence[LeastSquares], mask_FK: Tensor, ridge: float, most: int
) -> float:
    """The squared error on the points kept aside of at most so many rows, spread over the weight."""
    total = 0.0
    for block, one in zip(blocks, rows):
        assert block.validation is not None
        n_groups, n_rows, _ = one.dense_GRK.shape
        n_taken = min(n_rows, max(1, most // n_groups))
        at = torch.linspace(0, n_rows - 1, n_taken, dtype=BOUND_DTYPE, device=mask_FK.device).round().long()
        few = replace(one, wanted_GRK=one.wanted_GRK[:, at], dense_GRK=one.dense_GRK[:, at])
        mask_GRK = mask_FK[block.rows].view(one.dense_GRK.shape)[:, at]
        change_GRK = _refitted(few, mask_GRK, ridge) - few.dense_GRK
        fit = block.fit.rows(at)
        shift_GR = fit.intercept(change_GRK) if one.is_centred else torch.zeros_like(fit.d_GR)
        total += float(block.validation.rows(at).error(change_GRK, shift_GR).sum())
    return total if math.isfinite(total) else math.inf


def _solved(
    blocks: Sequence[_Block], rows: Sequence[LeastSquares], mask_FK: Tensor, dense_FK: Tensor, ridge: float
) -> Tensor:
    """The least squares on a mask; rows that meet no patches keep their dense weights."""
    new_FK = torch.where(mask_FK, dense_FK, 0.0)
    for block, one in zip(blocks, rows):
        mask_GRK = mask_FK[block.rows].view(one.dense_GRK.shape)
        new_FK[block.rows] = _refitted(one, mask_GRK, ridge).flatten(0, 1)
    return new_FK


def _refitted(rows: LeastSquares, mask_GRK: Tensor, ridge: float) -> Tensor:
    """The least squares of some rows on their masks: a change of the dense weights there, which is small.

    The ridge draws the change to 0, so the right side knows nothing of it.
    """
    bare_GRK = torch.where(mask_GRK, rows.dense_GRK, 0.0)
    lost_GRK = torch.baddbmm(rows.wanted_GRK, bare_GRK, rows.xx_GKK, alpha=-1)
    return solve_rows(rows.xx_GKK, lost_GRK, mask_GRK, 0.0, rows.ridge(ridge)).add_(bare_GRK)


def _rounded(
    model: nn.Module,
    weight: Weight,
    blocks: Sequence[_Block],
    rows: Sequence[LeastSquares],
    mask_FK: Tensor,
    new_FK: Tensor,
    place: Place,
    support: Support,
) -> _Fit:
    """The values and their intercepts as the model can hold them; an infinite error where they are no numbers."""
    parameter = model.get_parameter(weight.name)
    dense_FK = to_rows(weight, parameter.detach()).to(BOUND_DTYPE)
    shift_F = torch.zeros_like(dense_FK[:, 0])
    if place.kind != "none":
        for block, one in zip(blocks, rows):
            change_GRK = new_FK[block.rows].view(one.dense_GRK.shape) - one.dense_GRK
            shift_F[block.rows] = block.fit.intercept(change_GRK).flatten()
        shift_F = shift(model, place, shift_F)
    new = from_rows(weight, new_FK.to(parameter.dtype), parameter)
    is_finite = bool(torch.isfinite(new).all() & torch.isfinite(shift_F).all())
    change_FK = to_rows(weight, new).to(BOUND_DTYPE) - dense_FK  # as rounded
    error = _error(blocks, change_FK, shift_F) if is_finite else math.inf
    return _Fit(support, mask_FK, new, shift_F, error)


def _error(blocks: Sequence[_Block], change_FK: Tensor, shift_F: Tensor) -> float | None:
    """The gap to the target on the points kept aside, by the dense output's norm, of the dense weights so changed."""
    far = size = 0.0
    for block in blocks:
        if block.validation is None:
            return None
        shape = block.validation.d_GR.shape
        change_GRK = change_FK[block.rows].unflatten(0, shape)
        far += float(block.validation.error(change_GRK, shift_F[block.rows].view(shape)).sum())
        size += float(block.validation.yy_GR.sum())
    error = math.sqrt(far / size) if size > 0 else math.sqrt(far)
    return error if math.isfinite(error) else math.inf
