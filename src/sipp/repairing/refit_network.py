"""Refits the kept weights of a pruned network to the dense one, layer by layer; the masks stay as they are.

The ridge of each weight is chosen, and its refit judged, on validation points. Then steps of Adam polish the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs.blocks import find_blocks
from sipp.inputs.capture import Forms
from sipp.inputs.distance import output_error
from sipp.inputs.restore import copy_of
from sipp.progress import Advance, fit_cost, progress_bar
from sipp.records.network_hash import tensors_of
from sipp.records.numerics import BOUND_DTYPE, device_of
from sipp.records.options import ChunkBytes, Scoring
from sipp.records.pruned import Repaired, not_zero
from sipp.records.ranking import Weight, from_rows, to_rows
from sipp.records.repair import LayerRepair, Polish, Repair
from sipp.repairing.data_split import DataSplit, held_out_error
from sipp.repairing.gathering import Gatherer, RowBlock, Targets, WeightMoments, slice_of, solvable, stretches
from sipp.repairing.intercepts import Place, apply_shift, find_places, shift
from sipp.repairing.moments import Moments
from sipp.repairing.polishing import LEARNING_RATE, polish
from sipp.repairing.solving import solve_rows
from sipp.repairing.stages import dense_and_pruned, usage_of
from sipp.scoring.sensitivities import chunk_of

# Shares of a feature's own square that a change of its weight costs: the larger, the nearer to the weights as they are.
# The error on new points falls and then rises along them.
RIDGES = (1e-8, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
N_TRIAL_ROWS = 32  # spread over the weight, that choose the ridge; then all rows are solved once


def refit_network(
    dense: nn.Module,
    given: nn.Module,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    *,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    blocks: str | None = None,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = False,
) -> Repaired:
    """A copy of the `given` network whose kept weights are fitted to the dense one, layer by layer, then by `steps`."""
    check_same_tensors(dense, given, masks)
    repaired, n_bytes = copy_of(given), chunk_of(Scoring(chunk_bytes=chunk_bytes).chunk_bytes, device_of(dense))
    at_first, before = output_error(dense, given, split.validation), held_out_error(dense, given, split)
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    with progress_bar("repairing", cost, shown=progress, in_percent=True) as advance:
        layers = _refit_all(dense, repaired, masks, split, blocks, n_bytes, advance)
    at_last, refitted = output_error(dense, repaired, split.validation), held_out_error(dense, repaired, split)
    polished = None
    if steps > 0:
        polished, at_last = polish(
            dense,
            repaired,
            masks,
            split,
            steps=steps,
            learning_rate=learning_rate,
            seed=seed,
            progress=progress,
        )
    judged = (before, refitted, held_out_error(dense, repaired, split))
    done = _record(split, layers, polished, (at_first, at_last), judged)
    return Repaired(copy_of(given) if done.undone else repaired, dict(masks), done, split.keys)


def _refit_all(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    blocks: str | None,
    chunk_bytes: int,
    advance: Advance,
) -> tuple[LayerRepair, ...]:
    """Refits all weights of `repaired` in place, in the order of execution."""
    pair = dense_and_pruned(
        dense,
        repaired,
        masks,
        split,
        usage_of(dense, masks, split, Forms()),
        blocks=find_blocks(dense, split.batches[0], blocks),
        chunk_bytes=chunk_bytes,
        dtype=BOUND_DTYPE,
    )
    weights = {weight.name: weight for layer in pair.dense_layers for weight in layer.weights.values()}
    places = find_places(dense, pair.dense_layers, split.batches[0])
    done = []
    for stage in pair.stages():
        gatherer = stage.gatherer
        for stretch, fits in stretches(gatherer.usage, device_of(dense)):
            all_names = [name for group in stretch for name in group]
            kept = [gatherer.targets(all_names, i)[0] for i in range(len(split.batches))] if fits else None
            for group in stretch:
                targets_of = partial(_targets, gatherer, group) if kept is None else kept.__getitem__
                sums = gatherer.gather(group, targets_of)
                for name in group:
                    done.append(refit(repaired, weights[name], masks[name], sums[name], places[name]))
                    advance(fit_cost(masks[name].shape))
    met = {layer.name for layer in done}
    unmet = [LayerRepair(name, None, None, None, "none", "no inputs reach it") for name in weights if name not in met]
    return (*done, *unmet)


def _targets(gatherer: Gatherer, names: Sequence[str], i: int) -> Targets:
    return gatherer.targets(names, i)[0]


def check_same_tensors(dense: nn.Module, given: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raises unless both models hold the same tensors by name and shape, and the masks are those of the zeros."""
    ours, theirs = tensors_of(dense), tensors_of(given)
    odd = ours.keys() ^ theirs.keys() or {name for name in ours if ours[name].shape != theirs[name].shape}
    if odd:
        raise ModelError(
            f"{min(odd)} is not the same tensor in the dense and the pruned model", fix="give the model that was pruned"
        )
    if device_of(dense) != device_of(given):
        raise ModelError(
            f"the dense model lies on {device_of(dense)}, the pruned one on {device_of(given)}", fix="move one of them"
        )
    parameters = dict(given.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != mask.shape:
            raise ModelError(
                f"the mask of {name} fits no parameter of the pruned model", fix="give the record as it was"
            )
    if name := not_zero(given, masks):
        raise ModelError(f"{name} is not zero everywhere off its mask", fix="give the record as it was, or prune again")


def _record(
    split: DataSplit,
    layers: tuple[LayerRepair, ...],
    polished: Polish | None,
    chosen: tuple[float | None, float | None],
    judged: tuple[float | None, float | None, float | None],
) -> Repair:
    """The record of a repair, undone if it is worse, by the output's errors: on the points that choose, before and at
    the end; on those that judge, before, after the refit and at the end."""
    at_first, at_last = chosen
    before, refitted, after = judged
    is_worse = at_first is not None and at_last is not None and not at_last <= at_first
    return Repair(
        layers=layers,
        n_points=sum(batch.n_points for batch in split.fit),
        n_aside=sum(batch.n_points for batch in split.validation),
        n_judged=sum(batch.n_points for batch in split.test),
        output_before=before,
        output_refit=refitted,
        output_after=before if is_worse else after,
        output_chosen=at_first if is_worse else at_last,
        polish=polished,
        undone="the output was no closer to the dense one on held-back inputs" if is_worse else "",
    )


# --- One weight -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Rows of a weight that meet the same patches, group by group."""

    rows: slice
    mask_GRK: Tensor
    fit: Moments
    validation: Moments


def refit(model: nn.Module, weight: Weight, mask: Tensor, sums: WeightMoments, place: Place) -> LayerRepair:
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


def _blocks(sums: WeightMoments, mask_FK: Tensor) -> tuple[list[_Block], str]:
    """The blocks of rows, and why they cannot be solved; empty where they can."""
    keys, why = solvable(sums)
    return [_Block(slice_of(key), _grouped(mask_FK, key), sums.fit[key], sums.validation[key]) for key in keys], why


def _grouped(matrix_FK: Tensor, key: RowBlock) -> Tensor:
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
        total += float(trial.validation.error(change_GRK, shift_GR).sum())
    return total if math.isfinite(total) else math.inf


def _some_rows(block: _Block) -> _Block:
    """The block with some of its rows, evenly spread: of one group, or of each where there are many small ones."""
    n_groups, n_rows, _ = block.mask_GRK.shape
    n_taken = min(n_rows, max(1, N_TRIAL_ROWS // n_groups))
    at = torch.linspace(0, n_rows - 1, n_taken, dtype=BOUND_DTYPE, device=block.mask_GRK.device).round().long()

    return _Block(block.rows, block.mask_GRK[:, at], block.fit.rows(at), block.validation.rows(at))


def _errors(blocks: list[_Block], change_FK: Tensor, shift_F: Tensor) -> tuple[float, float]:
    """The gap to the dense layer's output on the points kept aside, by that output's norm: before, and changed so."""
    before = after = size = 0.0
    for block in blocks:
        shape = block.validation.d_GR.shape
        changed_GR = block.validation.error(change_FK[block.rows].unflatten(0, shape), shift_F[block.rows].view(shape))
        before += float(block.validation.dd_GR.sum())
        after += float(changed_GR.sum())
        size += float(block.validation.yy_GR.sum())
    if size == 0:
        return before, after
    return math.sqrt(before / size), math.sqrt(after / size)
