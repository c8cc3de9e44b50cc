"""The walk of a repair: fits the layers of a pruned network to the dense one, in the order of execution (T21).

    for each part of the network (a block; the whole network, if it has no blocks):          parts.py
        for each group of weights with the same input (query, key and value):
            run both networks on the same points, and sum all that least squares needs       sums.py, streams.py
            fit mask and values of each weight from its sums                                 layer_fit.py
        keep what the part gives in each network: there the next one begins

What is what in the network, the map says (`inputs/trace.py`). Each layer gets the inputs x of the network pruned so
far. Its target is  W x + a (dense output - W x), where a is the error feedback: a = 0 repeats the dense layer W on its
new inputs, a = 1 compensates the whole error of earlier layers. Where the output is added to a residual stream, the
error of the stream is compensated too. No labels, no training.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.inputs import Batch, ModelMap, PrunableLayer, Weight, copy_of, find_prunable_layers, trace_layers
from sipp.native import memory
from sipp.progress import Advance, fit_cost
from sipp.pruning import MOST_WEIGHTS_OF_SMALL
from sipp.repairing.layer_fit import LayerTask, fit_layer, leave_unfitted
from sipp.repairing.parts import Part, Side, States, StatesInMemory, parts_of
from sipp.repairing.streams import Stream, streams_in
from sipp.repairing.sums import Both, sums_of
from sipp.results import FittedLayer, numerics

Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class NetworkTask:
    """What all fits of a network share."""

    dense: nn.Module  # whose outputs are the targets
    start: nn.Module  # its weights are fitted, and the ridge pulls towards them: the dense network, or the one to refit
    layers: tuple[PrunableLayer, ...]  # of the dense network; those with masked weights
    map: ModelMap
    blocks: tuple[str, ...]
    streams: Mapping[str, Stream]  # that are corrected, by weight
    chunk_bytes: int

    @property
    def weights(self) -> dict[str, Weight]:
        """The masked weights by name."""
        return {weight.name: weight for layer in self.layers for weight in layer.weights.values()}

    @property
    def allow_tf32(self) -> bool:
        """Whether passes and sums on a GPU may use TF32: if all weights are in half precision, which rounds more.

        A network in float32 is fitted exactly: SmolLM2 loses 1 to 2 % of its perplexity by TF32, for 10 of 40 s.
        """
        halves = (torch.float16, torch.bfloat16)
        return all(self.dense.get_parameter(name).dtype in halves for name in self.weights)


def task_for(
    dense: nn.Module,
    masks: Masks,
    batch: Batch,
    *,
    chunk_bytes: int,
    start: nn.Module | None = None,
    corrects: bool = True,
    inputs_differ: bool = False,
) -> NetworkTask:
    """The task of fitting the masked weights, with a map of the dense network on a few points of the batch.

    `corrects`: the ends of residual blocks compensate the error of the stream. `inputs_differ`: earlier blocks have
    made the inputs, so that these streams have an error too.
    """
    layers = masked_layers(dense, masks)
    found = trace_layers(dense, layers, batch)
    names = () if found.blocks is None else found.blocks.names
    streams = streams_in(found, layers, names, inputs_differ=inputs_differ) if corrects else {}
    return NetworkTask(dense, dense if start is None else start, layers, found, names, streams, chunk_bytes)


def masked_layers(model: nn.Module, masks: Masks) -> tuple[PrunableLayer, ...]:
    """The modules that hold masked weights, with only those weights."""
    layers = find_prunable_layers(model, include=[glob.escape(name) for name in masks])
    chosen = (replace(one, weights={l: w for l, w in one.weights.items() if w.name in masks}) for one in layers)
    return tuple(layer for layer in chosen if layer.weights)


@dataclass(frozen=True)
class NetworkFit:
    """A fitted network, its masks, and what was done to its layers, in the order of execution."""

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[FittedLayer, ...]


def fit_network(
    task: NetworkTask,
    layer_task: LayerTask,
    first_masks: Masks,
    batches: Sequence[Batch],
    n_fit_batches: int,
    *,
    advance: Advance = lambda n: None,
) -> NetworkFit:
    """A copy of the network with the layers of these masks fitted to the first batches, validated on the others.

    `advance` is called with the cost of each weight.
    """
    pruned = copy_of(task.start)
    dense, other = (
        side_of(task, model, first_masks, batches, StatesInMemory(len(batches))) for model in (task.dense, pruned)
    )
    parts = parts_of(task.map, task.blocks, first_masks.keys())
    return fit_parts(task, layer_task, both_of(task, dense, other, n_fit_batches), parts, first_masks, advance)


def fit_parts(
    task: NetworkTask,
    layer_task: LayerTask,
    both: Both,
    parts: Sequence[Part],
    first_masks: Masks,
    advance: Advance = lambda n: None,
) -> NetworkFit:
    """The pruned one of both networks with the weights of these parts fitted in place, part by part."""
    masks, fitted = dict(first_masks), list[FittedLayer]()
    n_left = sum(len(part.groups) for part in parts)
    for part in parts:
        for mask, layer in fit_part(task, layer_task, both, part, first_masks):
            masks[layer.name] = mask
            fitted.append(layer)
            advance(fit_cost(mask.shape))
        n_left -= len(part.groups)
        for side in (both.dense, both.pruned) if n_left else ():
            side.pass_on(part)
    reached = {layer.name for layer in fitted}
    for name in (name for name in first_masks if name not in reached):
        advance(fit_cost(first_masks[name].shape))
        fitted.append(leave_unfitted(both.pruned.model, task.weights[name], first_masks[name], "no inputs reach it"))
    return NetworkFit(both.pruned.model, masks, tuple(fitted))


def side_of(task: NetworkTask, model: nn.Module, masks: Masks, batches: Sequence[Batch], states: States) -> Side:
    """One of the two networks, with the layers of these masks."""
    chosen = (replace(one, weights={l: w for l, w in one.weights.items() if w.name in masks}) for one in task.layers)
    layers = (replace(layer, module=model.get_submodule(layer.module_name)) for layer in chosen if layer.weights)
    return Side(model, task.map, tuple(layers), batches, states, task.allow_tf32)


def both_of(task: NetworkTask, dense: Side, pruned: Side, n_fit_batches: int) -> Both:
    """Both networks, with what the map says of their weights."""
    is_same_for_all = not task.map.depends_on_values
    n_uses = {name: n for name, n in task.map.n_uses.items() if n == 1 and is_same_for_all}
    return Both(dense, pruned, task.weights, n_uses, task.streams, n_fit_batches, task.chunk_bytes)


def fit_part(
    task: NetworkTask, layer_task: LayerTask, both: Both, part: Part, first_masks: Masks
) -> Iterator[tuple[Tensor, FittedLayer]]:
    """Fits the weights of a part one after the other; yields their masks and what was done."""
    # returning memory costs a small network more than it saves, and on a GPU there is none to return
    is_large = sum(mask.numel() for mask in first_masks.values()) > MOST_WEIGHTS_OF_SMALL
    gives_back = is_large and numerics.device_of(task.dense).type == "cpu"
    for group in part.groups:
        if gives_back:
            memory.give_back_freed()
        sums = sums_of(both, part, group)
        for name in group:
            weight, place = task.weights[name], task.map.places[name]
            mask, layer = fit_layer(layer_task, both.pruned.model, weight, first_masks[name], sums.pop(name), place)
            yield mask, replace(layer, corrects=name in both.streams)
