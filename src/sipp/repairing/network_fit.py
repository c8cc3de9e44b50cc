"""Fits the layers of a network in the order of execution, each to its target (T21). No labels, no training.

Each layer gets the inputs x of the network pruned so far. Its target is  W x + a (dense output - W x), where a is the
error feedback: a = 0 repeats the dense layer W on its new inputs, a = 1 compensates the whole error of earlier layers.
At the end of a residual block, the error of the residual stream is compensated too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sipp.inputs.blocks import Blocks
from sipp.inputs.capture import Probes
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.restore import copy_of
from sipp.native.memory import give_back_freed
from sipp.progress import Advance, fit_cost
from sipp.records.batches import Batch
from sipp.records.numerics import device_of
from sipp.records.options import Pattern
from sipp.records.ranking import MOST_WEIGHTS_OF_SMALL, Weight
from sipp.records.repair import FittedLayer
from sipp.repairing.data_split import DataSplit
from sipp.repairing.gathering import layers_with, masked_layers
from sipp.repairing.intercepts import Place, find_places
from sipp.repairing.layer_fit import LayerTask, fit_layer, leave_unfitted
from sipp.repairing.layer_targets import (
    LayerTargets,
    ResidualLayer,
    find_residual_layers,
    refuse_residual,
    residual_layers,
)
from sipp.repairing.layer_usage import stretches
from sipp.repairing.repair_options import LARGE_ERROR_FEEDBACKS, LARGE_RIDGES
from sipp.repairing.stages import DenseAndPruned, NetworkStage, usage_of

Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class NetworkTask:
    """What all fits of a network share."""

    dense: nn.Module  # whose outputs are the targets
    start: nn.Module  # its weights are fitted, and the ridge pulls towards them: the dense network, or the one to refit
    layers: tuple[PrunableLayer, ...]  # of the dense network; those with masked weights
    weights: Mapping[str, Weight]
    places: Mapping[str, Place]  # of the weights' intercepts
    layer: LayerTask
    residuals: Collection[str] | None  # weights at the ends of residual blocks; None: they are found
    blocks: Blocks | None
    chunk_bytes: int
    allow_tf32: bool  # in passes and sums on a GPU; masks and values are always found exactly
    forms: Probes = field(default_factory=Probes)  # of batches that were checked already
    # by the weights of a stage: those that correct a residual stream, the same in every fit
    corrected: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        dense: nn.Module,
        masks: Masks,
        batch: Batch,
        layer: LayerTask,
        *,
        chunk_bytes: int,
        start: nn.Module | None = None,
        residuals: Collection[str] | None = None,
        blocks: Blocks | None = None,
    ) -> NetworkTask:
        """The task of fitting the masked weights; `batch` shows where their intercepts can go."""
        layers = masked_layers(dense, masks)
        weights = {weight.name: weight for layer in layers for weight in layer.weights.values()}
        return cls(
            dense=dense,
            start=dense if start is None else start,
            layers=layers,
            weights=weights,
            places=find_places(dense, layers, batch),
            layer=layer,
            residuals=residuals,
            blocks=blocks,
            chunk_bytes=chunk_bytes,
            allow_tf32=_is_half(dense, weights),
        )


@dataclass(frozen=True)
class NetworkFit:
    """A fitted network, its masks, and what was done to its layers, in the order of execution."""

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[FittedLayer, ...]


def _is_half(model: nn.Module, weights: Mapping[str, Weight]) -> bool:
    """Whether all weights are in half precision, which rounds more than TF32 does.

    A network in float32 is fitted exactly: SmolLM2 loses 1 to 2 % of its perplexity by TF32, for 10 of 40 s.
    """
    return all(model.get_parameter(name).dtype in (torch.float16, torch.bfloat16) for name in weights)


def fit_block(
    dense: nn.Module,
    masks: Masks,
    split: DataSplit,
    pruned_inputs: Sequence[Batch],
    *,
    pattern: Pattern | None = None,
    follows: bool,
    chunk_bytes: int,
) -> NetworkFit:
    """Fits one block of a large network, mask and weights together.

    `split` holds the block's inputs in the dense network, `pruned_inputs` those in the network pruned so far.
    """
    layer = LayerTask("joint", LARGE_ERROR_FEEDBACKS[0], LARGE_RIDGES, pattern, keeps_rows=False)
    task = NetworkTask.of(dense, masks, split.batches[0], layer, chunk_bytes=chunk_bytes)
    return fit_network(task, masks, split, pruned_inputs=pruned_inputs, follows=follows)


def fit_network(
    task: NetworkTask,
    first_masks: Masks,
    split: DataSplit,
    *,
    decided: Mapping[str, FittedLayer] | None = None,
    pruned_inputs: Sequence[Batch] | None = None,
    follows: bool = False,
    advance: Advance = lambda n: None,
) -> NetworkFit:
    """A copy of the network with all its layers fitted; with `decided`, validated choices are repeated on all points.

    `pruned_inputs` are the inputs of the pruned network, if they differ; with `follows`, because of earlier layers.
    `advance` is called with the cost of each weight.
    """
    layers_here = layers_with(task.layers, first_masks)
    usage = usage_of(task.dense, layers_here, split, task.forms)
    give_back_freed()
    pruned = copy_of(task.start)
    pair = DenseAndPruned(
        task.dense,
        pruned,
        layers_here,
        split,
        usage,
        blocks=task.blocks,
        chunk_bytes=task.chunk_bytes,
        allow_tf32=task.allow_tf32,
        pruned_batches=pruned_inputs,
    )
    _check_residuals(task.residuals, usage.order)
    masks, layers = dict(first_masks), list[FittedLayer]()
    for stage in pair.stages():
        stage = replace(stage, follows=follows or stage.follows)
        for mask, layer in _fit_stage(task, stage, first_masks, split, decided or {}):
            masks[layer.name] = mask
            layers.append(layer)
            advance(fit_cost(mask.shape))
    reached = {layer.name for layer in layers}
    for name in (name for name in first_masks if name not in reached):
        advance(fit_cost(first_masks[name].shape))
        layers.append(leave_unfitted(pruned, task.weights[name], first_masks[name], "no inputs reach it"))
    return NetworkFit(pruned, masks, tuple(layers))


def _fit_stage(
    task: NetworkTask,
    stage: NetworkStage,
    first_masks: Masks,
    split: DataSplit,
    decided: Mapping[str, FittedLayer],
) -> Iterator[tuple[Tensor, FittedLayer]]:
    """Fits the weights of a stage one after the other; yields their masks and what was done."""
    gatherer = stage.gatherer
    corrected = _corrected(task, stage)
    device = device_of(task.dense)
    # returning memory costs a small network more than it saves, and on a GPU there is none to return
    is_large = sum(mask.numel() for mask in first_masks.values()) > MOST_WEIGHTS_OF_SMALL and device.type == "cpu"
    for stretch, fits in stretches(gatherer.usage, device):
        names = [name for group in stretch for name in group]
        targets = LayerTargets(gatherer, corrected, names, fits, split.dense_outputs)
        for group in stretch:
            if is_large:
                give_back_freed()
            sums = targets.pop(group).moments()
            for name in group:
                mask, layer = fit_layer(
                    task.layer,
                    gatherer.pruned.model,
                    task.weights[name],
                    first_masks[name],
                    sums.pop(name),
                    task.places[name],
                    decided.get(name),
                )
                yield mask, replace(layer, corrects=name in corrected)
        del targets  # before those of the next stretch are made


def _corrected(task: NetworkTask, stage: NetworkStage) -> dict[str, ResidualLayer]:
    """The weights of a stage that correct a residual stream; searched for once."""
    key = tuple(stage.names)
    if key in task.corrected:
        return residual_layers(stage.gatherer, task.corrected[key])
    residuals = None if task.residuals is None else [name for name in task.residuals if name in key]
    found = find_residual_layers(stage.gatherer, residuals, follows=stage.follows)
    task.corrected[key] = tuple(found)
    return found


def _check_residuals(residuals: Collection[str] | None, order: Sequence[Sequence[str]]) -> None:
    for name in residuals or ():
        if not any(name in group for group in order):
            refuse_residual(name)
