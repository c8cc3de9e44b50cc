"""Goes through the dense and the pruned network together, block by block if they have blocks.

Each part is a `NetworkPair`: one block of both networks, or what lies before or after the blocks. Its weights are
fitted before the next pair is made. Between two blocks, only the states of all points are kept, for both networks. So
each pass runs one block instead of the whole network, and earlier blocks are never run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sipp.errors import DataError, ModelError
from sipp.inputs.blocks import Blocks, Entered, enter
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import fresh
from sipp.inputs.layers import PrunableLayer
from sipp.repairing.data_split import DataSplit
from sipp.repairing.layer_usage import Groups, LayerUsage
from sipp.repairing.network_pair import NetworkPair, Side
from sipp.repairing.replaying import Replay, ReplayMode
from sipp.results.batches import Batch
from sipp.results.numerics import device_of, float32_products

STATES_SHARE = 1 / 8  # of a GPU's free memory: the states of one network stay there if they take at most this


@dataclass(frozen=True)
class BothNetworks:
    """The dense network, the copy of it that is being pruned, and what all their parts share."""

    dense: nn.Module
    pruned: nn.Module
    layers: tuple[PrunableLayer, ...]  # of the dense network; those with masked weights
    usage: LayerUsage
    blocks: Blocks | None
    split: DataSplit
    pruned_batches: Sequence[Batch] | None  # if they are not those of the split: both are parts of networks
    chunk_bytes: int
    allow_tf32: bool

    @cached_property
    def pruned_layers(self) -> tuple[PrunableLayer, ...]:
        return tuple(replace(layer, module=self.pruned.get_submodule(layer.module_name)) for layer in self.layers)

    def pairs(self) -> Iterator[NetworkPair]:
        """The parts of both networks with masked weights, each made when the previous one is finished."""
        before, within, after = self._places()
        states = list[_States]()  # of the dense and of the pruned network
        if self.blocks is not None and any(within):
            with suppress(DataError, ModelError):  # a batch that does not pass the blocks in order
                states = [self._states_of(self.dense, self.blocks)]
        if self.blocks is None or not states:
            yield self._whole(self.usage.groups)
            return
        if before:
            yield self._whole(before)
            states.append(self._states_of(self.pruned, self.blocks))
        else:
            states.append(states[0].copy())
        yield from self._within(self.blocks, within, states, is_first=not before)
        del states
        if after:
            yield self._whole(after, is_first=False)

    def _within(
        self, chain: Blocks, within: Sequence[Groups], states: Sequence[_States], *, is_first: bool
    ) -> Iterator[NetworkPair]:
        """The blocks that hold weights; `states` are those of both networks before the first block."""
        n_left = sum(map(bool, within))
        mode: ReplayMode = "check"
        for i, (name, groups) in enumerate(zip(chain.names, within)):
            if n_left == 0:
                break
            blocks = self.dense.get_submodule(name), self.pruned.get_submodule(name)
            replays = Replay(mode), Replay(mode)
            if groups:
                batches = states[0].at(i), states[1].at(i)
                yield self._pair(groups, blocks, batches, replays, is_first=is_first)
                n_left, is_first, mode = n_left - 1, False, replays[1].next_mode
            for states_of_one, block, replay in zip(states, blocks, replays) if n_left else ():
                # without a check, everything is recomputed
                states_of_one.pass_through(block, i, replay if mode == "trust" else Replay("off"))

    def _whole(self, groups: Groups, *, is_first: bool = True) -> NetworkPair:
        """Both networks as a whole, to fit these weights."""
        batches = self.split.batches, self.split.batches if self.pruned_batches is None else self.pruned_batches
        return self._pair(groups, (self.dense, self.pruned), batches, (Replay("off"), Replay()), is_first=is_first)

    def _pair(
        self,
        groups: Groups,
        run: tuple[nn.Module, nn.Module],
        batches: tuple[Sequence[Batch], Sequence[Batch]],
        replays: tuple[Replay, Replay],
        *,
        is_first: bool,
    ) -> NetworkPair:
        names = {name for group in groups for name in group}
        return NetworkPair(
            Side(self.dense, run[0], _that_hold(self.layers, names), batches[0], replays[0]),
            Side(self.pruned, run[1], _that_hold(self.pruned_layers, names), batches[1], replays[1]),
            self.split.n_fit_batches,
            replace(self.usage, groups=groups),
            self.chunk_bytes,
            self.allow_tf32,
            inputs_differ=not is_first or self.pruned_batches is not None,
        )

    def _places(self) -> tuple[Groups, Sequence[Groups], Groups]:
        """The groups of weights before the blocks, in each block, and after them."""
        names = () if self.blocks is None else self.blocks.names
        block_of = {
            weight.name: i
            for layer in self.layers
            for weight in layer.weights.values()
            for i, name in enumerate(names)
            if layer.module_name == name or layer.module_name.startswith(f"{name}.")
        }
        groups = self.usage.groups
        places = [next((block_of[name] for name in group if name in block_of), None) for group in groups]
        in_blocks = [place for place in places if place is not None]
        if not in_blocks or in_blocks != sorted(in_blocks):
            return groups, (), ()
        first = places.index(in_blocks[0])
        within = [tuple(group for group, place in zip(groups, places) if place == i) for i in range(len(names))]
        after = tuple(group for group, place in zip(groups[first:], places[first:]) if place is None)
        return groups[:first], within, after

    def _states_of(self, model: nn.Module, blocks: Blocks) -> _States:
        """The states of all batches before the first block of one of the networks."""
        batches = self.split.batches
        entered = [_stored(enter(model, blocks, batch), len(batches)) for batch in batches]
        return _States(blocks, batches, entered, device_of(model), self.allow_tf32, [[] for _ in entered])


def _that_hold(layers: Sequence[PrunableLayer], names: Collection[str]) -> tuple[PrunableLayer, ...]:
    """The layers that hold one of these weights."""
    return tuple(layer for layer in layers if any(weight.name in names for weight in layer.weights.values()))


@dataclass
class _States:
    """The states of one network before a block, batch by batch."""

    blocks: Blocks
    batches: Sequence[Batch]
    entered: list[Entered]
    device: torch.device
    allow_tf32: bool
    waiting: list[list[tuple[int, nn.Module]]]  # by batch: finished blocks that its state has yet to pass

    def copy(self) -> _States:
        """The same states, which move on by themselves."""
        return replace(self, entered=list(self.entered), waiting=[list(blocks) for blocks in self.waiting])

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
                self.waiting[j].append((i, block))

    def _catch_up(self, j: int) -> None:
        for i, block in self.waiting[j]:
            self._move(j, i, block, Replay("off"))
        self.waiting[j].clear()

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
