"""Repairs a pruned network: chooses, fits, validates, fits all points, polishes, and records.

All repair methods share this code: the search for mask and weights (T21), the refit under fixed masks, and the methods
of others. `RepairOptions` says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sipp.inputs.blocks import find_blocks
from sipp.inputs.outputs import output_error
from sipp.inputs.restore import copy_of
from sipp.native.memory import give_back_freed
from sipp.progress import Advance, fit_cost, progress_bar
from sipp.pruning.spared_rows import restore_spared, spared_by_name
from sipp.records.batches import Batch
from sipp.records.network_hash import tensors_of
from sipp.records.numerics import device_of
from sipp.records.options import RepairMethod
from sipp.records.pruned import Repaired
from sipp.records.ranking import MOST_WEIGHTS_OF_SMALL, Ranking
from sipp.records.repair import LayerRepair, Repair
from sipp.repairing.choosing import Choice, choose
from sipp.repairing.data_split import DataSplit, held_out_error, in_large_batches
from sipp.repairing.layer_fit import LayerTask, leave_unfitted, with_errors_of
from sipp.repairing.network_fit import Masks, NetworkFit, NetworkTask, fit_network
from sipp.repairing.polishing import polish
from sipp.repairing.repair_options import PEERS, RepairOptions, candidates_for
from sipp.scoring.sensitivities import chunk_bytes_on

UNDONE = "the output was no closer to the dense one on inputs that were not fitted"


def apply_repairs(
    ranking: Ranking,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    repairs: Sequence[RepairMethod],
    options: RepairOptions,
    *,
    start: nn.Module | None = None,
) -> Repaired:
    """Runs the repairs one after the other (see `repairs_of`) and returns the result of the last one.

    It keeps as many weights as `masks` do. `start` is the pruned network; None means the dense weights under the
    masks. Method, floor and pattern of `options` are set here. Only the last repair may fit the test points too.
    """
    dense, model, masks = ranking.model, start, dict(masks)
    for i, method in enumerate(repairs):
        is_last = i == len(repairs) - 1
        chosen = replace(
            options,
            method=method,
            floor=ranking.floor,
            pattern=ranking.pattern,
            fits_all=options.fits_all and is_last,
        )
        spared = spared_by_name(ranking, masks)
        own = None if model is None else own_weights(dense, model, masks)
        fitted = {name: mask & ~spared[name] if name in spared else mask for name, mask in masks.items()}
        repaired = repair_network(dense, fitted, split, chosen, own)
        model, masks = repaired.model, restore_spared(repaired.model, dense, repaired.masks, spared)
    return replace(repaired, masks=masks)


def repair_network(
    dense: nn.Module,
    masks: Masks,
    split: DataSplit,
    options: RepairOptions,
    pruned: nn.Module | None = None,
) -> Repaired:
    """A copy of the dense network with as many weights as the masks keep, fitted to it on the points of the split.

    `pruned` is the pruned network if it has values of its own (see `own_weights`); None: it has the dense values. A
    refit starts from it. The result is compared with it on the validation points, and undone if it is no better.
    Weights that are 0 in the dense network and not in the masks stay 0.
    """
    if options.method == "refit" and pruned is None:
        pruned = _under_masks(dense, masks)
    # a large network is not fitted twice: the held-back tenth of the points would add next to nothing
    is_small = sum(mask.numel() for mask in masks.values()) <= MOST_WEIGHTS_OF_SMALL
    fits_all = options.fits_all and options.method != "refit" and not options.steps and is_small
    options = replace(options, fits_all=fits_all)
    give_back_freed()
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    title = "repairing" if options.method == "refit" else "finding masks and weights"
    with progress_bar(title, (1 + fits_all) * cost, shown=options.progress, in_percent=True) as advance:
        found = _fitted_and_validated(dense, masks, in_large_batches(split, _widest(masks)), options, pruned, advance)
    record = found.record
    if options.steps and not record.undone:
        polished, chosen = polish(
            dense,
            found.model,
            found.masks,
            split,
            steps=options.steps,
            learning_rate=options.learning_rate,
            seed=options.seed,
            progress=options.progress,
        )
        after = held_out_error(dense, found.model, split)
        record = replace(record, polish=polished, output_after=after, output_chosen=chosen)
    if (
        options.method != "refit" and pruned is not None
    ):  # those errors are of dense values, which it did not start from
        record = replace(record, layers=tuple(replace(layer, error_before=None) for layer in record.layers))
    return replace(found, record=record)


def _fitted_and_validated(
    dense: nn.Module, masks: Masks, split: DataSplit, options: RepairOptions, pruned: nn.Module | None, advance: Advance
) -> Repaired:
    """The network before any polish; the pruned one, unchanged, if that is closer to the dense one."""
    is_peer = options.method in PEERS
    start = pruned if options.method == "refit" else None
    task, choice = _task_and_choice(dense, masks, split, options, start)
    network_before = _under_masks(dense, masks) if pruned is None else pruned
    at_first, before = _errors(dense, network_before, split)
    del network_before  # freed before the fit makes its copy
    validated = fit_network(task, choice.masks, split, advance=advance)
    give_back_freed()
    at_last, after = _errors(dense, validated.model, split)
    is_worse = not is_peer and at_first is not None and at_last is not None and not at_last <= at_first
    if is_worse:
        is_known = choice.budgets == "given" and (pruned is None or start is not None)
        fit, choice = _undone(task, masks, validated, pruned, knows_errors=is_known), replace(choice, budgets="given")
    elif options.fits_all:
        decided = {layer.name: layer for layer in validated.layers}
        everything = in_large_batches(_all_points(split), _widest(masks))
        fit = fit_network(task, choice.masks, everything, decided=decided, advance=advance)
    else:
        fit = validated
    n_fit, n_validation, n_test = map(_n_points, (split.fit, split.validation, split.test))
    record = Repair(
        layers=_layer_records(fit, masks),
        n_points=n_fit if fit is validated or is_worse else n_fit + n_validation + n_test,
        n_aside=n_validation,
        n_judged=n_test,
        output_before=before,
        output_refit=before if is_worse else after,
        output_after=before if is_worse else after,
        output_chosen=at_first if is_worse else at_last,
        polish=None,
        undone=UNDONE if is_worse else "",
        way=options.method,
        error_feedback=choice.error_feedback,
        budgets=choice.budgets,
        n_judged_fit=n_fit,
    )
    return Repaired(fit.model, fit.masks, record, split.keys, fit.layers, choice.trials)


def _task_and_choice(
    dense: nn.Module, masks: Masks, split: DataSplit, options: RepairOptions, start: nn.Module | None
) -> tuple[NetworkTask, Choice]:
    """How all layers are fitted, with the chosen error feedback, and the rest of the choice."""
    layer = LayerTask(options.method, 0.0, (), options.pattern, keeps_rows=options.floor is not None)
    task = NetworkTask.of(
        dense,
        masks,
        split.batches[0],
        layer,
        chunk_bytes=chunk_bytes_on(options.chunk_bytes, device_of(dense)),
        start=start,
        residuals=() if options.method in PEERS else options.residuals,
        blocks=find_blocks(dense, split.batches[0], options.blocks),
    )
    candidates = candidates_for(options, task.weights, masks)
    task = replace(task, layer=replace(layer, ridges=candidates.ridges))
    choice = choose(task, masks, split, candidates, options.floor)
    return replace(task, layer=replace(task.layer, error_feedback=choice.error_feedback)), choice


def _errors(dense: nn.Module, model: nn.Module, split: DataSplit) -> tuple[float | None, float | None]:
    """How far its output is from the dense one, on the validation points and on the test points."""
    return output_error(dense, model, split.validation), held_out_error(dense, model, split)


def _under_masks(dense: nn.Module, masks: Masks) -> nn.Module:
    """A copy of the dense network with the weights off the masks set to 0."""
    model = copy_of(dense)
    with torch.no_grad():
        for name, mask in masks.items():
            parameter = model.get_parameter(name)
            parameter.copy_(torch.where(mask, parameter, 0.0))
    return model


def _undone(
    task: NetworkTask, masks: Masks, fit: NetworkFit, pruned: nn.Module | None, *, knows_errors: bool
) -> NetworkFit:
    """The network as it was before the fit, with the errors of its layers if they are known."""
    model = copy_of(task.dense if pruned is None else pruned)
    layers = []
    for layer in fit.layers:
        left = leave_unfitted(model, task.weights[layer.name], masks[layer.name], "undone")
        if knows_errors:
            left = replace(with_errors_of(left, layer), error=layer.error_before)
        layers.append(left)
    return NetworkFit(model, dict(masks), tuple(layers))


def _all_points(split: DataSplit) -> DataSplit:
    """The split with all points in the fit."""
    batches = (*split.batches, *split.test)
    return replace(split, batches=batches, is_validation=(False,) * len(batches), test=(), dense_outputs=None)


def _widest(masks: Masks) -> int:
    """The largest number of inputs or outputs of a weight."""
    return max((max(len(mask), mask[0].numel()) for mask in masks.values()), default=1)


def _n_points(batches: Sequence[Batch]) -> int:
    return sum(batch.n_points for batch in batches)


def _layer_records(fit: NetworkFit, masks: Masks) -> tuple[LayerRepair, ...]:
    """The records of the weights; moves are counted from the given masks, not from those the search began with."""
    moved = [(fit.masks[layer.name] & ~masks[layer.name]).sum() for layer in fit.layers]
    counts = torch.stack(moved).tolist() if moved else []
    return tuple(
        LayerRepair(layer.name, layer.error_before, layer.error, layer.ridge, layer.intercept, layer.left_alone, n)
        for layer, n in zip(fit.layers, counts)
    )


def own_weights(dense: nn.Module, pruned: nn.Module, masks: Masks) -> nn.Module | None:
    """The pruned network, if it is not just the dense one under these masks: sampled, fitted or trained."""
    theirs = tensors_of(pruned)
    is_dense = all(
        torch.equal(theirs[name], torch.where(masks[name], value, 0.0) if name in masks else value)
        for name, value in tensors_of(dense).items()
    )
    return None if is_dense else pruned
