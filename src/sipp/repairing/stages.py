"""Goes through the dense and the pruned network together, block by block if they have blocks.

Between two blocks, only the states of all points are kept, for both networks. So each pass runs one block instead of
the whole network, and earlier blocks are never run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import fresh
from sipp.inputs.blocks import Blocks, Entered, enter
from sipp.inputs.capture import Probes, run_batch, scoring_mode
from sipp.inputs.layers import PrunableLayer
from sipp.records.batches import Batch
from sipp.records.numerics import device_of, float32_products
from sipp.repairing.data_split import DataSplit
from sipp.repairing.gathering import Gatherer, Side
from sipp.repairing.layer_usage import LayerUsage, layer_usage
from sipp.repairing.replaying import Replay

STATES_SHARE = 1 / 8  # of a GPU's free memory: the states of one network stay there if they take at most this


@dataclass(frozen=True)
class NetworkStage:
    """A part of both networks, whose weights are all fitted, in the order of execution, before the next stage."""

    gatherer: Gatherer
    follows: bool  # earlier weights have changed, so its inputs have too

    @property
    def names(self) -> list[str]:
        return [name for group in self.gatherer.usage.order for name in group]


@dataclass(frozen=True)
class DenseAndPruned:
    """The dense network, the copy of it that is pruned, the points, and what is known about both."""

    dense: nn.Module
    pruned: nn.Module
    dense_layers: tuple[PrunableLayer, ...]  # that hold masked weights
    split: DataSplit
    usage: LayerUsage
    blocks: Blocks | None
    chunk_bytes: int
    allow_tf32: bool
    pruned_batches: Sequence[Batch] | None = None  # if they are not those of the split: both are parts of networks

    @cached_property
    def pruned_layers(self) -> tuple[PrunableLayer, ...]:
        return tuple(replace(one, module=self.pruned.get_submodule(one.module_name)) for one in self.dense_layers)

    @property
    def batches(self) -> Sequence[Batch]:
        return self.split.batches

    def stages(self) -> Iterator[NetworkStage]:
        """The parts of both networks with masked weights, each made when the previous one is finished."""
        before, within, after = self._places()
        entered = self._entered() if any(within) else None
        if self.blocks is None or entered is None:
            yield self._whole(self.usage.order, follows=False)
            return
        if before:
            yield self._whole(before, follows=False)
        there = entered if not before else self._entered_pruned()
        device = device_of(self.dense)
        states = [
            _States(self.blocks, self.batches, list(some), device, self.allow_tf32, [[] for _ in some])
            for some in (entered, there)
        ]
        del entered, there  # the states before the first block, which `states` now owns
        yield from self._within(self.blocks, within, states, follows=bool(before))
        del states
        if after:
            yield self._whole(after, follows=True)

    def _within(
        self, chain: Blocks, within: list[Any], states: list[_States], *, follows: bool
    ) -> Iterator[NetworkStage]:
        """The stages of the blocks that hold weights; `states` are those of both networks before the first block."""
        n_left, can_replay, is_trusted = sum(map(bool, within)), True, False
        for i, (name, order) in enumerate(zip(chain.names, within)):
            if n_left == 0:
                break
            blocks = self.dense.get_submodule(name), self.pruned.get_submodule(name)
            replays = tuple(Replay(is_off=not can_replay, is_trusted=is_trusted, is_checked=is_trusted) for _ in blocks)
            if order:
                gatherer = self._gatherer(order, blocks, (states[0].at(i), states[1].at(i)), replays)
                yield NetworkStage(gatherer, follows=follows or any(within[:i]))
                n_left -= 1
                can_replay, is_trusted = not gatherer.replay.is_off, gatherer.replay.is_checked
            finished = None if is_trusted else Replay(is_off=True)  # without a check, everything is recomputed
            for states_of_one, block, replay in zip(states, blocks, replays) if n_left else ():
                states_of_one.pass_through(block, i, finished or replay)

    def _whole(self, order: tuple[tuple[str, ...], ...], *, follows: bool) -> NetworkStage:
        batches = self.batches, self.batches if self.pruned_batches is None else self.pruned_batches
        replays = Replay(is_off=True), Replay()
        return NetworkStage(self._gatherer(order, (self.dense, self.pruned), batches, replays), follows)

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
            Side(self.dense, run[0], wanted[0], batches[0]),
            Side(self.pruned, run[1], wanted[1], batches[1]),
            self.split.is_validation,
            replace(self.usage, order=order),
            self.chunk_bytes,
            allow_tf32=self.allow_tf32,
            replay=replays[1],
            dense_replay=replays[0],
        )

    def _places(self) -> tuple[Any, list[Any], Any]:
        """The groups of weights before the blocks, in each block, and after them."""
        names = () if self.blocks is None else self.blocks.names
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
        assert self.blocks is not None
        try:
            return [_stored(enter(self.dense, self.blocks, b), len(self.batches)) for b in self.batches]
        except (DataError, ModelError):
            return None

    def _entered_pruned(self) -> list[Entered]:
        assert self.blocks is not None
        return [_stored(enter(self.pruned, self.blocks, b), len(self.batches)) for b in self.batches]


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
