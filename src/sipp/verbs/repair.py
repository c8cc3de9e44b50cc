"""`repair`: refits the kept weights of a pruned network to the dense one."""

from __future__ import annotations

import glob
from dataclasses import replace

import torch
from torch import Tensor, nn

from sipp.bounds import check_same_architecture
from sipp.errors import ModelError, OptionError
from sipp.inputs import AnyData, data_of, find_prunable_layers, unwrap
from sipp.repairing import polish, repair_network, split_data
from sipp.results import (
    Pattern,
    Pruned,
    PrunedLayer,
    check,
    hashing,
    inputs_seen,
    numerics,
)

MOST_STEPS = 10_000_000  # a larger number is taken for a mistake
UNSTATED = "repair gave the kept weights new values; sipp.assess(model, repaired.model, data) bounds their error"


@torch.inference_mode(False)
def repair(
    model: nn.Module,
    pruned: Pruned,
    data: AnyData,
    *,
    moves_mask: bool = False,
    steps: int = 0,
    learning_rate: float = 2e-3,
    progress: bool = True,
) -> Pruned:
    """Refits the kept weights of a pruned network to the dense `model`, without labels; the masks stay as they are.

    With `moves_mask`, masks and values are found together. The network keeps as many weights, but a layer may keep
    more or fewer.

    Layers are fitted in the order of execution. Least squares fits each row's kept weights and its intercept to the
    dense layer's outputs, on the inputs that the layer gets in the repaired network. Then `steps` of Adam bring the
    outputs of the whole network closer to the dense ones. One input in ten is held back from the fit for
    validation: a layer that does not improve on these inputs is left alone, and training stops when it no longer
    helps. With about 75 inputs or more, half of the held-back inputs only measure the result; with fewer, the record
    has no error estimate. The record's `repair` lists what was done. All inputs are held in memory. Neither model is
    changed.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> points = torch.rand(200, 8)
        >>> fixed = sipp.repair(net, sipp.prune(net, points, keep=0.5, method="magnitude"), points)
        >>> fixed.repair.output_after < fixed.repair.output_before
        True
    """
    steps = check.whole("steps", steps, least=0, most=MOST_STEPS)
    check.number("learning_rate", learning_rate, above=0)
    check.flag("progress", progress)
    check.flag("moves_mask", moves_mask)
    if not isinstance(pruned, Pruned):
        what = f"pruned is a {type(pruned).__name__}, not the record of a pruning"
        raise OptionError(what, fix="give the result of sipp.prune or sipp.assess")
    dense, given = unwrap(model), unwrap(pruned.model)
    check_same_architecture(dense, given)
    if numerics.device_of(dense) != numerics.device_of(given):
        where = f"{numerics.device_of(dense)} and {numerics.device_of(given)}"
        raise ModelError(f"the dense and the pruned network are on {where}", fix="move both to one device")
    if name := pruned.regrown:
        raise ModelError("a pruned weight is not zero", where=name, fix="set it to zero, or prune it again")
    split = split_data(data_of(data, device=numerics.device_of(dense)))
    has_dead_rows = any(layer.dead_rows for layer in pruned.layers)  # otherwise none is to die
    result = repair_network(
        dense,
        pruned.masks,
        split,
        "joint" if moves_mask else "refit",
        pattern=None if pruned.pattern is None else Pattern.of(pruned.pattern),
        keeps_rows=not has_dead_rows,
        start=given,
        progress=progress,
    )
    if steps and not result.record.undone:
        done, error = polish(
            dense, result.model, result.masks, split, steps=steps, learning_rate=learning_rate, progress=progress
        )
        at_the_end = split.test_error(dense, result.model)
        record = replace(result.record, polish=done, output_after=at_the_end, output_validation=error)
        result = replace(result, record=record)
    undescribed = pruned.without_statements(UNSTATED)  # what was promised spoke of the old values
    return replace(
        undescribed,
        model=result.model,
        masks=result.masks,
        layers=_recounted(undescribed.layers, dense, result.masks) if moves_mask else undescribed.layers,
        described_hash=hashing.of_model(result.model),
        repair=result.record,
        moved=result.moved,
        seen=inputs_seen(pruned) | result.seen,
    )


def _recounted(layers: tuple[PrunedLayer, ...], dense: nn.Module, masks: dict[str, Tensor]) -> tuple[PrunedLayer, ...]:
    """The layers with kept weights and dead rows counted again for new masks."""
    modules = find_prunable_layers(dense, include=[glob.escape(name) for name in masks])
    weights = {weight.name: weight for module in modules for weight in module.weights.values()}
    recounted = []
    for layer in layers:
        mask_FK, dense_FK = (
            weights[layer.name].rows(tensor.detach()).cpu()
            for tensor in (masks[layer.name], dense.get_parameter(layer.name))
        )
        recounted.append(replace(layer, kept=int(mask_FK.sum()), dead_rows=numerics.dead_rows(dense_FK, mask_FK)))
    return tuple(recounted)
