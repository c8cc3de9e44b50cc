"""Fits the layers of a network in the order of execution, each to its target (T21). No labels, no training.

Each layer gets the inputs x of the network pruned so far. Its target is  W x + a (dense output - W x), where a is the
error feedback: a = 0 repeats the dense layer W on its new inputs, a = 1 compensates the whole error of earlier layers.
At the end of a residual block, the error of the residual stream is compensated too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from sipp.inputs.blocks import Blocks
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.restore import copy_of
from sipp.inputs.trace import Maps
from sipp.native.memory import give_back_freed
from sipp.progress import Advance, fit_cost
from sipp.repairing.both_networks import BothNetworks
from sipp.repairing.data_split import DataSplit
from sipp.repairing.intercepts import Place, find_places
from sipp.repairing.layer_fit import LayerTask, fit_layer, leave_unfitted
from sipp.repairing.layer_targets import (
    ResidualLayer,
    dense_targets_of_all,
    find_residual_layers,
    moments_to_targets,
    refuse_residual,
    residual_layers,
)
from sipp.repairing.layer_usage import Groups, LayerUsage, dense_passes, layer_usage, layers_with, masked_layers
from sipp.repairing.network_pair import NetworkPair
from sipp.repairing.repair_options import LARGE_ERROR_FEEDBACKS, LARGE_RIDGES
from sipp.results.batches import Batch
from sipp.results.numerics import device_of
from sipp.results.options import Pattern
from sipp.results.ranking import MOST_WEIGHTS_OF_SMALL, Weight
from sipp.results.repair import FittedLayer

Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class NetworkTask:
    """What all fits of a network share."""

    dense: nn.Module  # whose outputs are the targets
    start: nn.Module  # its weights are fitted, and the ridge pulls towards them: the dense network, or the one to refit
    layers: tuple[PrunableLayer, ...]  # of the dense network; those with masked weights
    weights: Mapping[str, Weight]
    places: Mapping[str, Place]  # of the weights' intercepts
    residuals: Collection[str] | None  # weights at the ends of residual blocks; None: they are found
    blocks: Blocks | None
    chunk_bytes: int
    allow_tf32: bool  # in passes and sums on a GPU; masks and values are always found exactly
    forms: Maps = field(default_factory=Maps)  # of batches that were checked already
    # by the weights of a pair: those that correct a residual stream, the same in every fit
    corrected: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def device(self) -> torch.device:
        """The device of both networks."""
        return device_of(self.dense)

    @classmethod
    def of(
        cls,
        dense: nn.Module,
        masks: Masks,
        batch: Batch,
        *,
        chunk_bytes: int,
        start: nn.Module | None = None,
        residuals: Collection[str] | None = None,
        blocks: Blocks | None = None,
    ) -> NetworkTask:
        """The task of fitting the masked weights; `batch` shows where their intercepts can go."""
        layers = masked_layers(dense, masks)
        weights = {weight.name: weight for layer in layers for weight in layer.weights.values()}
        for name in residuals or ():
            if name not in weights:
                refuse_residual(name)
        return cls(
            dense=dense,
            start=dense if start is None else start,
            layers=layers,
            weights=weights,
            places=find_places(dense, layers, batch),
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
    pruned_inputs: Sequence[Batch] | None,
    *,
    pattern: Pattern | None = None,
    chunk_bytes: int,
) -> NetworkFit:
    """Fits one block of a large network, mask and weights together.

    `split` holds the block's inputs in the dense network, `pruned_inputs` those in the network pruned so far; None:
    they are the same, because no earlier block is pruned.
    """
    task = NetworkTask.of(dense, masks, split.batches[0], chunk_bytes=chunk_bytes)
    layer_task = LayerTask("joint", LARGE_ERROR_FEEDBACKS[0], LARGE_RIDGES, pattern, keeps_rows=False)
    return fit_network(task, layer_task, masks, split, pruned_inputs=pruned_inputs)


def fit_network(
    task: NetworkTask,
    layer_task: LayerTask,
    first_masks: Masks,
    split: DataSplit,
    *,
    pruned_inputs: Sequence[Batch] | None = None,
    advance: Advance = lambda n: None,
) -> NetworkFit:
    """A copy of the network with all its layers fitted.

    `pruned_inputs` are the inputs of the pruned network, if they differ because of earlier layers. `advance` is called
    with the cost of each weight.
    """
    layers = layers_with(task.layers, first_masks)
    usage = usage_of(task.dense, layers, split, task.forms)
    _check_residuals(task.residuals, first_masks, usage.groups)
    give_back_freed()
    pruned = copy_of(task.start)
    both = BothNetworks(
        task.dense, pruned, layers, usage, task.blocks, split, pruned_inputs, task.chunk_bytes, task.allow_tf32
    )
    masks, fitted = dict(first_masks), list[FittedLayer]()
    for pair in both.pairs():
        for mask, layer in _fit_pair(task, layer_task, pair, first_masks, split):
            masks[layer.name] = mask
            fitted.append(layer)
            advance(fit_cost(mask.shape))
    reached = {layer.name for layer in fitted}
    for name in (name for name in first_masks if name not in reached):
        advance(fit_cost(first_masks[name].shape))
        fitted.append(leave_unfitted(pruned, task.weights[name], first_masks[name], "no inputs reach it"))
    return NetworkFit(pruned, masks, tuple(fitted))


def _fit_pair(
    task: NetworkTask,
    layer_task: LayerTask,
    pair: NetworkPair,
    first_masks: Masks,
    split: DataSplit,
) -> Iterator[tuple[Tensor, FittedLayer]]:
    """Fits the weights of a pair one after the other; yields their masks and what was done."""
    corrected = _corrected(task, pair)
    # returning memory costs a small network more than it saves, and on a GPU there is none to return
    is_large = sum(mask.numel() for mask in first_masks.values()) > MOST_WEIGHTS_OF_SMALL
    gives_back = is_large and task.device.type == "cpu"
    for groups, fits_in_memory in dense_passes(pair.usage, task.device):
        names = [name for group in groups for name in group]
        shared = split.dense_outputs
        targets = dense_targets_of_all(pair, corrected, names, shared) if fits_in_memory else None
        for group in groups:
            if gives_back:
                give_back_freed()
            sums = moments_to_targets(pair, corrected, group, targets)
            for name in group:
                mask, layer = fit_layer(
                    layer_task,
                    pair.pruned.model,
                    task.weights[name],
                    first_masks[name],
                    sums.pop(name),
                    task.places[name],
                )
                yield mask, replace(layer, corrects=name in corrected)


def _corrected(task: NetworkTask, pair: NetworkPair) -> dict[str, ResidualLayer]:
    """The weights of a pair that correct a residual stream; searched for once."""
    if pair.names in task.corrected:
        return residual_layers(pair, task.corrected[pair.names])
    residuals = None if task.residuals is None else [name for name in task.residuals if name in pair.names]
    found = find_residual_layers(pair, residuals)
    task.corrected[pair.names] = tuple(found)
    return found


def _check_residuals(residuals: Collection[str] | None, masks: Masks, groups: Groups) -> None:
    """Raises if a weight was named as the end of a residual block, but is not used; without a mask it is not fitted."""
    for name in residuals or ():
        if name in masks and not any(name in group for group in groups):
            refuse_residual(name)


def usage_of(dense: nn.Module, layers: tuple[PrunableLayer, ...], split: DataSplit, forms: Maps) -> LayerUsage:
    """The usage of the dense network on all batches, found once; best before it is copied, as full passes take memory.

    `forms` are those of batches that were checked already.
    """
    usages = {} if split.dense_outputs is None else split.dense_outputs.usages
    names = tuple(weight.name for layer in layers for weight in layer.weights.values())
    if names not in usages:
        usages[names] = layer_usage(dense, layers, split.batches, forms)
    return usages[names]
