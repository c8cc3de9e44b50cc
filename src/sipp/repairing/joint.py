"""Mask and weights found together, layer by layer in the order of execution (T21). No labels, no training.

Each layer meets the inputs x of the network pruned so far, and aims at  W x + a (dense output - W x):  a = 0 repeats
the dense layer W on what it meets now, a = 1 makes up for what the layers before it have lost. At the end of a residual
block what the stream has lost is made up for as well. A search moves the mask within its budget; exact least squares
on the mask that is given and on the one that is found decide, on points kept aside, which of both is taken.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp.inputs.capture import Forms
from sipp.inputs.distance import output_error
from sipp.inputs.restore import copy_of
from sipp.progress import Advance
from sipp.records.numerics import BOUND_DTYPE
from sipp.records.pattern import Pattern
from sipp.records.repair import Intercept
from sipp.records.weights import Weight, from_rows, to_rows
from sipp.repairing.aims import Aims, find_corrected
from sipp.repairing.gathering import Gatherer, Sums, rows_of, solvable, stretches, take_census
from sipp.repairing.intercepts import Place, apply_shift, find_places, shift
from sipp.repairing.layer_by_layer import Parts, _masked_layers
from sipp.repairing.moments import Moments
from sipp.repairing.searching import Rows, Rule, search
from sipp.repairing.solving import solve_rows

AIMS = (1.0, 0.25, 0.0)  # candidates for a, tried in this order: a later one has to be better
TRIED_OF, FEWEST_TRIED = 4, 256  # a is tried with one in so many points, and not fewer than this
RIDGE = 1e-3  # of the mean diagonal, towards the dense weights

Support = Literal["joint", "given", "none"]  # whose mask was taken; none: the weights are the dense ones under the mask


@dataclass(frozen=True)
class JointLayer:
    """What became of one weight. Errors are on points kept aside: the gap to the layer's target, by its norm."""

    name: str
    support: Support
    kept: int
    moved: int  # weights that are kept and were not in the given mask
    error_given: float | None  # of the given mask, refitted; None where it could not be compared
    error_joint: float | None  # of the mask that was found, refitted; None where none was looked for
    error: float | None  # of what was taken
    rounds: int  # of the search
    corrects: bool  # the residual stream that its output is added to
    intercept: Intercept
    why: str  # the weights are the dense ones under the mask; empty where they are refitted


@dataclass(frozen=True)
class Joint:
    """The network with the masks and weights that were found, and what was done. `model` is a copy."""

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[JointLayer, ...]  # in the order of execution
    a: float
    ridge: float
    tried: dict[float, float | None]  # by a: the output's error on the points kept aside, after a fit to fewer points
    output_error: float | None  # of this network, there
    n_points: int
    n_aside: int


@dataclass(frozen=True)
class _Task:
    """What all layers share."""

    dense: nn.Module
    masks: Mapping[str, Tensor]
    parts: Parts
    residuals: Collection[str] | None
    ridge: float
    pattern: Pattern | None
    keeps_rows: bool
    searches: bool
    chunk_bytes: int


def joint(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    parts: Parts,
    *,
    a: float | Sequence[float] = AIMS,
    ridge: float = RIDGE,
    residuals: Collection[str] | None = None,
    pattern: Pattern | None = None,
    keeps_rows: bool = False,
    searches: bool = True,
    chunk_bytes: int,
    advance: Advance = lambda n: None,
) -> Joint:
    """The dense network pruned within the budgets of the given masks: as many weights of each layer, or the pattern.

    Of several a, the one is taken whose network, fitted to fewer points, is nearest to the dense one on the points
    kept aside. `residuals` are the weights at the ends of residual blocks; None: they are found. With `keeps_rows` no
    row dies that has a weight in the given masks. Weights that are 0 in the dense network and not in the given mask
    stay 0.
    """
    task = _Task(model, masks, parts, residuals, ridge, pattern, keeps_rows, searches, chunk_bytes)
    candidates = (float(a),) if isinstance(a, int | float) else tuple(a)
    if not candidates or not all(0 <= one <= 1 for one in candidates):
        raise OptionError(f"a={a!r} is not in [0, 1]", fix="give one number, or several to choose from", option="a")
    if len(candidates) == 1:
        return _pruned(task, candidates[0], advance)
    few = replace(task, parts=_few(parts))
    found, tried = None, dict[float, float | None]()
    for candidate in candidates:
        trial = _pruned(few, candidate, advance)
        tried[candidate] = trial.output_error
        if found is None or _is_less(trial.output_error, found.output_error):
            found = trial
    assert found is not None
    if few.parts is not parts:
        found = _pruned(task, found.a, advance)
    return replace(found, tried=tried)


def _few(parts: Parts) -> Parts:
    """Some of the batches that are fitted, with a quarter of the points at least, and all points kept aside."""
    n_points = sum(batch.n_points for batch in parts.fitted)
    wanted = max(FEWEST_TRIED, n_points // TRIED_OF)
    if n_points <= wanted:
        return parts
    step = max(1, n_points // wanted)
    fitted = parts.fitted[::step]
    return replace(
        parts,
        batches=(*fitted, *parts.aside),
        is_aside=(False,) * len(fitted) + (True,) * len(parts.aside),
    )


def _is_less(error: float | None, other: float | None) -> bool:
    return error is not None and other is not None and error < other


def _pruned(task: _Task, a: float, advance: Advance) -> Joint:
    """The network for one a."""
    dense, parts, forms = task.dense, task.parts, Forms()
    pruned = copy_of(dense)
    dense_layers = _masked_layers(dense, task.masks)
    weights = {weight.name: weight for layer in dense_layers for weight in layer.weights.values()}
    census = take_census(dense, dense_layers, parts.batches, forms)
    twin_layers = _masked_layers(pruned, task.masks)
    gatherer = Gatherer(
        dense, pruned, dense_layers, twin_layers, parts.batches, parts.is_aside, census, forms, task.chunk_bytes
    )
    corrected = find_corrected(gatherer, task.residuals)
    places = find_places(dense, dense_layers, parts.batches[0])
    masks, layers = dict(task.masks), []
    for stretch, fits in stretches(census):
        aims = Aims(gatherer, corrected, [name for group in stretch for name in group], fits)
        for group in stretch:
            sums = gatherer.gather(group, aims.of(group))
            for name in group:
                mask, layer = _one_layer(task, pruned, weights[name], sums[name], places[name], a)
                masks[name] = mask
                layers.append(replace(layer, corrects=name in corrected))
                advance(1)
    for name in weights.keys() - {layer.name for layer in layers}:
        layers.append(_as_given(pruned, weights[name], task.masks[name], "it meets no patches"))
    error = output_error(dense, pruned, parts.aside)
    n_aside = sum(batch.n_points for batch in parts.aside)
    n_points = sum(batch.n_points for batch in parts.fitted)
    return Joint(pruned, masks, tuple(layers), a, task.ridge, {}, error, n_points, n_aside)


@dataclass(frozen=True)
class _Block:
    """Rows of a weight that meet the same patches; gaps are from the dense weights' output there to the target."""

    rows: slice
    fit: Moments
    aside: Moments


@dataclass(frozen=True)
class _Fit:
    """A mask with its least squares, as the model can hold them, and its error on the points kept aside."""

    support: Support
    mask_FK: Tensor
    new: Tensor
    shift_F: Tensor
    error: float


def _one_layer(
    task: _Task, model: nn.Module, weight: Weight, sums: Sums, place: Place, a: float
) -> tuple[Tensor, JointLayer]:
    """The mask that was taken, with its values written into the model, and what was done."""
    given = task.masks[weight.name]
    blocks, obstacle = _blocks(sums, a)
    if obstacle:
        return given, _as_given(model, weight, given, obstacle)
    mask_FK = to_rows(weight, given)
    dense_FK = to_rows(weight, model.get_parameter(weight.name).detach()).to(BOUND_DTYPE)
    has_intercept = place.kind != "none"
    rows = [_rows(block, dense_FK, has_intercept) for block in blocks]
    fits = [_fitted(task, model, weight, blocks, rows, mask_FK, place, "given")]
    n_rounds = 0
    if task.searches:
        found_FK, n_rounds = _searched(task, rows, [block.rows for block in blocks], dense_FK, mask_FK)
        fits.append(_fitted(task, model, weight, blocks, rows, found_FK, place, "joint"))
    bare_FK = torch.where(mask_FK, dense_FK, 0.0)
    bare = _Fit("none", mask_FK, from_rows(weight, bare_FK, given), torch.zeros_like(dense_FK[:, 0]), 0.0)
    fits.append(replace(bare, error=_error(blocks, bare_FK - dense_FK, bare.shift_F)))
    best = min(fits, key=lambda fit: fit.error)
    with torch.no_grad():
        model.get_parameter(weight.name).copy_(best.new)
    if has_intercept:
        apply_shift(model, place, best.shift_F)
    mask = from_rows(weight, best.mask_FK, given)
    layer = JointLayer(
        name=weight.name,
        support=best.support,
        kept=int(mask.sum()),
        moved=int((mask & ~given).sum()),
        error_given=fits[0].error,
        error_joint=fits[1].error if task.searches else None,
        error=best.error,
        rounds=n_rounds,
        corrects=False,
        intercept=place.kind if best.support != "none" else "none",
        why="" if best.support != "none" else "no refit is better on the points kept aside",
    )
    return mask, layer


def _as_given(model: nn.Module, weight: Weight, mask: Tensor, why: str) -> JointLayer:
    """The weight under the given mask, written into the model."""
    parameter = model.get_parameter(weight.name)
    with torch.no_grad():
        parameter.copy_(torch.where(mask, parameter, 0.0))
    return JointLayer(weight.name, "none", int(mask.sum()), 0, None, None, None, 0, False, "none", why)


def _blocks(sums: Sums, a: float) -> tuple[list[_Block], str]:
    """The blocks of rows with their gaps times a, and why they cannot be solved; empty where they can."""
    keys, why = solvable(sums)
    return [_Block(rows_of(key), _towards(sums.fit[key], a), _towards(sums.aside[key], a)) for key in keys], why


def _towards(sums: Moments, a: float) -> Moments:
    return replace(sums, dx_GRK=a * sums.dx_GRK, d_GR=a * sums.d_GR, dd_GR=a * a * sums.dd_GR)


def _rows(block: _Block, dense_FK: Tensor, has_intercept: bool) -> Rows:
    """The system of least squares of the block's rows: inputs with targets are W xx + dx."""
    fit = block.fit
    xx_GKK, dx_GRK = fit.centred() if has_intercept else (fit.xx_GKK, fit.dx_GRK)
    dense_GRK = dense_FK[block.rows].view(dx_GRK.shape)
    return Rows(xx_GKK, dense_GRK @ xx_GKK + dx_GRK, dense_GRK, fit.n)


def _searched(
    task: _Task, rows: Sequence[Rows], places: Sequence[slice], dense_FK: Tensor, mask_FK: Tensor
) -> tuple[Tensor, int]:
    """The mask that the search finds, and its rounds; rows that meet no patches keep theirs."""
    at = torch.cat([torch.arange(p.start, p.stop, dtype=torch.int64, device=mask_FK.device) for p in places])
    start_FK = mask_FK[at]
    may_FK = (dense_FK[at] != 0) | start_FK
    lives_F = start_FK.any(1) if task.keeps_rows else torch.zeros_like(start_FK[:, 0])
    found_FK, n_rounds = search(rows, start_FK, Rule(int(start_FK.sum()), may_FK, lives_F, task.pattern))
    return mask_FK.index_copy(0, at, found_FK), n_rounds


def _fitted(
    task: _Task,
    model: nn.Module,
    weight: Weight,
    blocks: Sequence[_Block],
    rows: Sequence[Rows],
    mask_FK: Tensor,
    place: Place,
    support: Support,
) -> _Fit:
    """The least squares on a mask, rounded to what the model holds; an infinite error where they are no numbers."""
    parameter = model.get_parameter(weight.name)
    dense_FK = to_rows(weight, parameter.detach()).to(BOUND_DTYPE)
    new_FK, shift_F = torch.where(mask_FK, dense_FK, 0.0), torch.zeros_like(dense_FK[:, 0])
    for block, one in zip(blocks, rows):
        shape = one.dense_GRK.shape
        new_GRK = solve_rows(*one.drawn(task.ridge), mask_FK[block.rows].view(shape), 0.0)
        new_FK[block.rows] = new_GRK.flatten(0, 1)
        if place.kind != "none":
            shift_F[block.rows] = block.fit.intercept(new_GRK - one.dense_GRK).flatten()
    new = from_rows(weight, new_FK.to(parameter.dtype), parameter)
    if place.kind != "none":
        shift_F = shift(model, place, shift_F)
    is_finite = bool(torch.isfinite(new).all() & torch.isfinite(shift_F).all())
    change_FK = to_rows(weight, new).to(BOUND_DTYPE) - dense_FK  # as rounded
    error = _error(blocks, change_FK, shift_F) if is_finite else math.inf
    return _Fit(support, mask_FK, new, shift_F, error if math.isfinite(error) else math.inf)


def _error(blocks: Sequence[_Block], change_FK: Tensor, shift_F: Tensor) -> float:
    """The gap to the target on the points kept aside, by the dense output's norm, of the dense weights so changed."""
    far = size = 0.0
    for block in blocks:
        shape = block.aside.d_GR.shape
        change_GRK = change_FK[block.rows].unflatten(0, shape)
        far += float(block.aside.error(change_GRK, shift_F[block.rows].view(shape)).sum())
        size += float(block.aside.yy_GR.sum())
    return math.sqrt(far / size) if size > 0 else math.sqrt(far)
