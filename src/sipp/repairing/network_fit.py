"""Fits the layers of a network in the order of execution, each to its target (T21). No labels, no training.

Each layer gets the inputs x of the network pruned so far. Its target is  W x + a (dense output - W x), where a is the
error feedback: a = 0 repeats the dense layer W on its new inputs, a = 1 compensates the whole error of earlier layers.
At the end of a residual block, the error of the residual stream is compensated too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.blocks import Blocks, Entered, enter
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import fresh
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.probing import Probes
from sipp.inputs.restore import copy_of
from sipp.native.memory import give_back_freed
from sipp.progress import Advance, fit_cost
from sipp.records.batches import Batch
from sipp.records.numerics import device_of, float32_products
from sipp.records.options import Pattern
from sipp.records.ranking import MOST_WEIGHTS_OF_SMALL, Weight
from sipp.records.repair import FittedLayer
from sipp.repairing.data_split import DataSplit
from sipp.repairing.gathering import Gatherer, Side, layers_with, masked_layers
from sipp.repairing.intercepts import Place, find_places
from sipp.repairing.layer_fit import LayerTask, fit_layer, leave_unfitted
from sipp.repairing.layer_targets import (
    LayerTargets,
    ResidualLayer,
    find_residual_layers,
    refuse_residual,
    residual_layers,
)
from sipp.repairing.layer_usage import LayerUsage, layer_usage, stretches
from sipp.repairing.repair_options import LARGE_ERROR_FEEDBACKS, LARGE_RIDGES
from sipp.repairing.replaying import Replay

Masks = Mapping[str, Tensor]

STATES_SHARE = 1 / 8  # of a GPU's free memory: the states of one network stay there if they take at most this


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
    both = _BothNetworks(task, pruned, layers_here, split, usage, pruned_inputs)
    _check_residuals(task.residuals, usage.order)
    masks, layers = dict(first_masks), list[FittedLayer]()
    for stage in both.stages():
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
    stage: _Stage,
    first_masks: Masks,
    split: DataSplit,
    decided: Mapping[str, FittedLayer],
) -> Iterator[tuple[Tensor, FittedLayer]]:
    """Fits the weights of a stage one after the other; yields their masks and what was done."""
    gatherer = stage.gatherer
    corrected = _corrected(task, stage)
    # returning memory costs a small network more than it saves, and on a GPU there is none to return
    is_large = sum(mask.numel() for mask in first_masks.values()) > MOST_WEIGHTS_OF_SMALL
    gives_back = is_large and task.device.type == "cpu"
    for stretch, fits in stretches(gatherer.usage, task.device):
        names = [name for group in stretch for name in group]
        targets = LayerTargets(gatherer, corrected, names, fits, split.dense_outputs)
        for group in stretch:
            if gives_back:
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


def _corrected(task: NetworkTask, stage: _Stage) -> dict[str, ResidualLayer]:
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


@dataclass(frozen=True)
class _Stage:
    """A part of both networks, whose weights are all fitted, in the order of execution, before the next stage."""

    gatherer: Gatherer
    follows: bool  # earlier weights have changed, so its inputs have too

    @property
    def names(self) -> list[str]:
        return [name for group in self.gatherer.usage.order for name in group]


@dataclass(frozen=True)
class _BothNetworks:
    """The dense network and the copy of it that is pruned, gone through together, block by block if they have blocks.

    Between two blocks, only the states of all points are kept, for both networks. So each pass runs one block instead
    of the whole network, and earlier blocks are never run again.
    """

    task: NetworkTask
    pruned: nn.Module
    dense_layers: tuple[PrunableLayer, ...]  # that hold masked weights
    split: DataSplit
    usage: LayerUsage
    pruned_batches: Sequence[Batch] | None = None  # if they are not those of the split: both are parts of networks

    @cached_property
    def pruned_layers(self) -> tuple[PrunableLayer, ...]:
        return tuple(replace(one, module=self.pruned.get_submodule(one.module_name)) for one in self.dense_layers)

    @property
    def batches(self) -> Sequence[Batch]:
        return self.split.batches

    def stages(self) -> Iterator[_Stage]:
        """The parts of both networks with masked weights, each made when the previous one is finished."""
        before, within, after = self._places()
        entered = self._entered() if any(within) else None
        if self.task.blocks is None or entered is None:
            yield self._whole(self.usage.order, follows=False)
            return
        if before:
            yield self._whole(before, follows=False)
        there = entered if not before else self._entered_pruned()
        states = [
            _States(
                self.task.blocks, self.batches, list(some), self.task.device, self.task.allow_tf32, [[] for _ in some]
            )
            for some in (entered, there)
        ]
        del entered, there  # the states before the first block, which `states` now owns
        yield from self._within(self.task.blocks, within, states, follows=bool(before))
        del states
        if after:
            yield self._whole(after, follows=True)

    def _within(self, chain: Blocks, within: list[Any], states: list[_States], *, follows: bool) -> Iterator[_Stage]:
        """The stages of the blocks that hold weights; `states` are those of both networks before the first block."""
        n_left, can_replay, is_trusted = sum(map(bool, within)), True, False
        for i, (name, order) in enumerate(zip(chain.names, within)):
            if n_left == 0:
                break
            blocks = self.task.dense.get_submodule(name), self.pruned.get_submodule(name)
            replays = tuple(Replay(is_off=not can_replay, is_trusted=is_trusted, is_checked=is_trusted) for _ in blocks)
            if order:
                gatherer = self._gatherer(order, blocks, (states[0].at(i), states[1].at(i)), replays)
                yield _Stage(gatherer, follows=follows or any(within[:i]))
                n_left -= 1
                can_replay, is_trusted = not gatherer.replay.is_off, gatherer.replay.is_checked
            finished = None if is_trusted else Replay(is_off=True)  # without a check, everything is recomputed
            for states_of_one, block, replay in zip(states, blocks, replays) if n_left else ():
                states_of_one.pass_through(block, i, finished or replay)

    def _whole(self, order: tuple[tuple[str, ...], ...], *, follows: bool) -> _Stage:
        batches = self.batches, self.batches if self.pruned_batches is None else self.pruned_batches
        replays = Replay(is_off=True), Replay()
        return _Stage(self._gatherer(order, (self.task.dense, self.pruned), batches, replays), follows)

    def _gatherer(
        self,
        order: tuple[tuple[str, ...], ...],
        run: tuple[nn.Module, nn.Module],
        batches: tuple[Sequence[Batch], Sequence[Batch]],
        replays: tuple[Replay, ...],
    ) -> Gatherer:
        names = {name for group in order for name in group}
        wanted = [
            tuple(layer for layer in layers if any(weight.name in names for weight in layer.weights.values()))
            for layers in (self.dense_layers, self.pruned_layers)
        ]
        return Gatherer(
            Side(self.task.dense, run[0], wanted[0], batches[0]),
            Side(self.pruned, run[1], wanted[1], batches[1]),
            self.split.is_validation,
            replace(self.usage, order=order),
            self.task.chunk_bytes,
            allow_tf32=self.task.allow_tf32,
            replay=replays[1],
            dense_replay=replays[0],
        )

    def _places(self) -> tuple[Any, list[Any], Any]:
        """The groups of weights before the blocks, in each block, and after them."""
        names = () if self.task.blocks is None else self.task.blocks.names
        homes = {
            weight.name: i
            for layer in self.dense_layers
            for weight in layer.weights.values()
            for i, name in enumerate(names)
            if layer.module_name == name or layer.module_name.startswith(f"{name}.")
        }
        places = [next((homes[name] for name in group if name in homes), None) for group in self.usage.order]
        known = [at for at in places if at is not None]
        first = next((i for i, at in enumerate(places) if at is not None), 0)
        is_in_order = known == sorted(known)
        before, within, after = list[Any](), [list[Any]() for _ in names], list[Any]()
        for i, (group, at) in enumerate(zip(self.usage.order, places)):
            (within[at] if at is not None else before if i < first else after).append(group)
        if not is_in_order:
            return tuple(self.usage.order), [], ()
        return tuple(before), [tuple(groups) for groups in within], tuple(after)

    def _entered(self) -> list[Entered] | None:
        """All batches at the first block of the dense network; None if one does not pass the blocks in order."""
        assert self.task.blocks is not None
        try:
            return [_stored(enter(self.task.dense, self.task.blocks, b), len(self.batches)) for b in self.batches]
        except (DataError, ModelError):
            return None

    def _entered_pruned(self) -> list[Entered]:
        assert self.task.blocks is not None
        return [_stored(enter(self.pruned, self.task.blocks, b), len(self.batches)) for b in self.batches]


def usage_of(dense: nn.Module, layers: tuple[PrunableLayer, ...], split: DataSplit, forms: Probes) -> LayerUsage:
    """The usage of the dense network on all batches, found once; best before it is copied, as full passes take memory.

    `forms` are those of batches that were checked already.
    """
    usages = {} if split.dense_outputs is None else split.dense_outputs.usages
    names = tuple(weight.name for layer in layers for weight in layer.weights.values())
    if names not in usages:
        usages[names] = layer_usage(dense, layers, split.batches, forms)
    return usages[names]


@dataclass
class _States:
    """The states of one network before a block, batch by batch."""

    blocks: Blocks
    batches: Sequence[Batch]
    entered: list[Entered]
    device: torch.device
    allow_tf32: bool
    ahead: list[list[tuple[int, nn.Module]]]  # by batch: finished blocks that its state has yet to pass

    def at(self, block: int) -> Sequence[Batch]:
        """The batches as this block gets them, valid until the states move on."""
        return _Entering(self, block)

    def pass_through(self, block: nn.Module, i: int, replay: Replay) -> None:
        """Moves all states past block i, which is finished, and frees the outputs kept in it.

        If no output was kept, a state moves only when it is needed; dense states are not if their targets are known.
        """
        for j in range(len(self.entered)):
            if replay.kept.get(j):
                self._catch_up(j)
                self._move(j, i, block, replay)
                del replay.kept[j]
            else:
                self.ahead[j].append((i, block))

    def _catch_up(self, j: int) -> None:
        for i, block in self.ahead[j]:
            self._move(j, i, block, Replay(is_off=True))
        self.ahead[j].clear()

    def _move(self, j: int, i: int, block: nn.Module, replay: Replay) -> None:
        """Moves the state of batch j past block i."""
        batch, exact = self._joined(j, i), float32_products(allow_tf32=self.allow_tf32)
        with scoring_mode(block, "running"), exact, replay.running(block, j, ()):
            state = self.blocks.state_of(run_batch(block, fresh(batch)))
        self.entered[j] = replace(self.entered[j], state=state.to(self.entered[j].state.device))

    def batch(self, j: int, i: int) -> Batch:
        """Batch j as the block with number i gets it."""
        self._catch_up(j)
        return self._joined(j, i)

    def _joined(self, j: int, i: int) -> Batch:
        entered = self.entered[j]
        return self.blocks.joined(self.batches[j], entered.calls[i], entered.state.to(self.device))


@dataclass(frozen=True)
class _Entering(Sequence[Batch]):
    """A network's batches as one of its blocks gets them, on the network's device."""

    states: _States
    block: int

    def __len__(self) -> int:
        return len(self.states.batches)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.states.batch(i, self.block)


def _stored(entered: Entered, n_batches: int) -> Entered:
    """The batch with its state on the GPU if the states of all batches fit there, otherwise on the CPU."""
    if entered.state.device.type != "cuda":
        return entered
    free, _ = torch.cuda.mem_get_info(entered.state.device)
    n_bytes = n_batches * entered.state.numel() * entered.state.element_size()
    return entered if n_bytes <= STATES_SHARE * free else replace(entered, state=entered.state.cpu())
