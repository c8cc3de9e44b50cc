"""Repairs a pruned network: brings its output closer to the dense network's, without labels.

1. `data_split.py` has divided the points into fit, validation and test.
2. `budgets.py` says how many weights each layer keeps, if the masks may move.
3. `walk.py` fits all layers in the order of execution, block by block. For each group of weights with the same input,
   `sums.py` runs both networks and sums all that least squares needs, and `layer_fit.py` finds mask and weights from
   these sums alone.
4. The validation points compare the result with the pruned network. It is undone if it is worse.
5. `polished` trains all kept weights together, if `sipp.repair` asks for it.

The search for mask and weights (T21), the refit under fixed masks, and the methods of others share this code;
`RepairTask` says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sipp.inputs import Batch, Weight, copy_of, output_error
from sipp.native import memory
from sipp.progress import fit_cost, progress_bar
from sipp.pruning import Cut, Ranking, cut_as_given, is_like_a_language_model, restore_spared, spared_by_name
from sipp.repairing.budgets import masks_between
from sipp.repairing.data_split import DataSplit, error_on_test_points, in_large_batches
from sipp.repairing.layer_fit import LayerTask, leave_unfitted
from sipp.repairing.polishing import polish
from sipp.repairing.repair_task import (
    ERROR_FEEDBACK,
    LARGE_ERROR_FEEDBACK,
    PEERS,
    REFIT_RIDGES,
    RIDGE,
    RepairTask,
)
from sipp.repairing.walk import Masks, NetworkFit, NetworkTask, fit_network, task_for
from sipp.results import Budgets, FittedLayer, Repair, Repaired, RepairMethod, hashing, numerics
from sipp.scoring import chunk_bytes_on

UNDONE = "the output was no closer to the dense one on inputs that were not fitted"


def repaired_cut(
    ranking: Ranking,
    network_cut: Cut,
    start: nn.Module | None,
    split: DataSplit,
    repairs: Sequence[RepairMethod],
    *,
    progress: bool = False,
) -> tuple[Cut, Repaired]:
    """Repairs a cut on the points of the split: the cut with its new weights, and what the repair did.

    `start` is the network to repair; None: the dense weights under the masks.
    """
    repaired = apply_repairs(ranking, network_cut.masks, split, repairs, start=start, progress=progress)
    budget, seed, choice = network_cut.budget, network_cut.seed, network_cut.choice
    return cut_as_given(ranking, repaired.model, repaired.masks, seed=seed, budget=budget, choice=choice), repaired


def apply_repairs(
    ranking: Ranking,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    repairs: Sequence[RepairMethod],
    *,
    start: nn.Module | None = None,
    progress: bool = False,
) -> Repaired:
    """Runs the repairs one after the other (see `repairs_of`) and returns the result of the last one.

    It keeps as many weights as `masks` do. `start` is the pruned network; None means the dense weights under the
    masks.
    """
    dense, model, masks = ranking.model, start, dict(masks)
    chunk_bytes = ranking.options.scoring.chunk_bytes
    for method in repairs:
        task = RepairTask(method=method, floor=ranking.floor, pattern=ranking.pattern, chunk_bytes=chunk_bytes)
        spared = spared_by_name(ranking, masks)
        fitted = {name: mask & ~spared[name] if name in spared else mask for name, mask in masks.items()}
        has_own_values = model is not None and not is_dense_under_masks(dense, model, masks)
        repaired = repair_network(dense, fitted, split, task, model if has_own_values else None, progress=progress)
        model, masks = repaired.model, restore_spared(repaired.model, dense, repaired.masks, spared)
    return replace(repaired, masks=masks)


def repair_network(
    dense: nn.Module,
    masks: Masks,
    split: DataSplit,
    asked: RepairTask,
    pruned: nn.Module | None = None,
    *,
    progress: bool = False,
) -> Repaired:
    """A copy of the dense network with as many weights as the masks keep, fitted to it on the points of the split.

    `pruned` is the pruned network if it has values of its own; None: the dense values under the masks. A refit starts
    from it. The result is compared with it on the validation points, and undone if it is worse. Weights that are 0
    in the dense network and not in the masks stay 0.
    """
    is_refit = asked.method == "refit"
    if is_refit and pruned is None:
        pruned = _under_masks(dense, masks)
    starts_from_pruned = is_refit or pruned is None  # so the layers' errors before the fit are those of the pruned one
    batches = in_large_batches(split, _widest(masks))
    memory.give_back_freed()
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    title = "repairing" if is_refit else "finding masks and weights"
    with progress_bar(title, cost, shown=progress, in_percent=True) as advance:
        task = task_for(
            dense,
            masks,
            batches.batches[0],
            chunk_bytes=chunk_bytes_on(asked.chunk_bytes, numerics.device_of(dense)),
            start=pruned if is_refit else None,
            corrects=asked.corrects_streams and asked.method not in PEERS,
        )
        layer_task = _layer_task(asked, task.weights, masks)
        first_masks = dict(masks)
        budgets: Budgets = "given"
        if asked.method == "joint" and asked.pattern is None and not asked.keeps_budgets:
            first_masks, budgets = masks_between(task, masks, asked.floor)
        before = _errors(dense, _under_masks(dense, masks) if pruned is None else pruned, batches)
        fit = fit_network(task, layer_task, first_masks, batches.batches, batches.n_fit_batches, advance=advance)
        memory.give_back_freed()
        after = _errors(dense, fit.model, batches)
        is_undone = asked.method not in PEERS and _is_worse(after.validation, before.validation)
        if is_undone:
            knows_errors = starts_from_pruned and budgets == "given"
            fit = _undone(task, masks, fit, pruned, knows_errors=knows_errors)
            after, budgets = before, "given"
    n_fit, n_validation, n_test = map(_n_points, (split.fit, split.validation, split.test))
    record = Repair(
        layers=_layer_records(fit, masks, knows_before=starts_from_pruned),
        n_fit=n_fit,
        n_validation=n_validation,
        n_test=n_test,
        output_before=before.test,
        output_refit=after.test,
        output_after=after.test,
        output_validation=after.validation,
        polish=None,
        undone=UNDONE if is_undone else "",
        way=asked.method,
        error_feedback=layer_task.error_feedback,
        budgets=budgets,
    )
    return Repaired(fit.model, fit.masks, record, split.keys)


def polished(
    dense: nn.Module, repaired: Repaired, split: DataSplit, *, steps: int, learning_rate: float, progress: bool
) -> Repaired:
    """The repaired network after training towards the outputs of the dense one, unless its repair was undone."""
    if not steps or repaired.record.undone:
        return repaired
    model, masks = repaired.model, repaired.masks
    done, error = polish(
        dense, model, masks, split, steps=steps, learning_rate=learning_rate, seed=0, progress=progress
    )
    at_the_end = error_on_test_points(dense, model, split)
    return replace(
        repaired, record=replace(repaired.record, polish=done, output_after=at_the_end, output_validation=error)
    )


def _layer_task(asked: RepairTask, weights: Mapping[str, Weight], masks: Masks) -> LayerTask:
    """How each layer is fitted."""
    is_large = is_like_a_language_model(list(weights.values()), masks)
    a = LARGE_ERROR_FEEDBACK if is_large else ERROR_FEEDBACK
    ridges: tuple[float, ...] = (RIDGE,)
    if asked.method in PEERS:
        a = 0.0
    elif asked.error_feedback is not None:
        a = asked.error_feedback
    if asked.ridges is not None:
        ridges = asked.ridges
    elif asked.method == "refit" and not is_large:
        ridges = REFIT_RIDGES
    return LayerTask(asked.method, a, ridges, asked.pattern, keeps_rows=asked.floor is not None)


class _Errors(NamedTuple):
    """How far a network's output is from the dense one; None if there is nothing to compare."""

    validation: float | None
    test: float | None


def _errors(dense: nn.Module, model: nn.Module, split: DataSplit) -> _Errors:
    return _Errors(output_error(dense, model, split.validation), error_on_test_points(dense, model, split))


def _is_worse(error: float | None, other: float | None) -> bool:
    """Whether both errors are known, and the first is larger."""
    return error is not None and other is not None and not error <= other


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
            left = replace(left, error_before=layer.error_before, error_after=layer.error_before)
        layers.append(left)
    return NetworkFit(model, dict(masks), tuple(layers))


def _widest(masks: Masks) -> int:
    """The largest number of inputs or outputs of a weight."""
    return max((max(len(mask), mask[0].numel()) for mask in masks.values()), default=1)


def _n_points(batches: Sequence[Batch]) -> int:
    return sum(batch.n_points for batch in batches)


def _layer_records(fit: NetworkFit, masks: Masks, *, knows_before: bool) -> tuple[FittedLayer, ...]:
    """The fitted layers, with moves counted from the given masks, not from those the search began with."""
    moved = [(fit.masks[layer.name] & ~masks[layer.name]).sum() for layer in fit.layers]
    counts = torch.stack(moved).tolist() if moved else []
    return tuple(
        replace(layer, n_moved=n, error_before=layer.error_before if knows_before else None)
        for layer, n in zip(fit.layers, counts)
    )


def is_dense_under_masks(dense: nn.Module, pruned: nn.Module, masks: Masks) -> bool:
    """Whether the pruned network is just the dense one under these masks, and was not sampled, fitted or trained."""
    theirs = hashing.tensors(pruned)
    return all(
        torch.equal(theirs[name], torch.where(masks[name], value, 0.0) if name in masks else value)
        for name, value in hashing.tensors(dense).items()
    )
