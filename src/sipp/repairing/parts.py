"""A network in parts, each of which is run by itself: a block, and what lies between it and the block before.

A part begins with what the last finished block gave, which is kept for each batch. The whole network is run, but its
finished blocks only return what is kept, and the run ends with the block of the part. So the masks and positions that
blocks are given are always those of the batch. What comes before all blocks, such as an embedding, is run each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sipp.inputs import (
    Batch,
    ModelMap,
    OnUse,
    PrunableLayer,
    Recording,
    StopForward,
    Weight,
    read_uses,
    refs_in,
    replaced_forwards,
)
from sipp.results import numerics

STATES_SHARE = 1 / 8  # of a GPU's free memory: the outputs of one network stay there if they take at most this

Groups = tuple[tuple[str, ...], ...]  # names of weights in the order of execution, those with the same input together


@dataclass(frozen=True)
class Part:
    """What is run between the end of one block and the end of the next."""

    number: int
    finished: tuple[str, ...]  # the blocks before it, in the order of execution
    end: str  # the block that it ends with; "": it ends with the network
    groups: Groups  # of the weights that are used in it


def parts_of(found: ModelMap, blocks: Sequence[str], names: Collection[str]) -> list[Part]:
    """The parts of a network, with those of its weights that are named; one part if a weight is used in several."""
    ends = [name for name in blocks if _is_passed_once(found.run, blocks, name)]
    stops = [found.run.calls_of[name][0].stop for name in ends]
    numbers: dict[str, set[int]] = {}
    for use in found.uses:
        numbers.setdefault(use.weight, set()).add(bisect_right(stops, found.run.calls[use.call].start))
    if any(len(numbers[name]) > 1 for name in names if name in numbers):
        ends, numbers = [], {name: {0} for name in numbers}
    groups = [tuple(name for name in group if name in names) for group in found.same_input]
    return [
        Part(
            i,
            tuple(blocks[: blocks.index(ends[i - 1]) + 1]) if i else (),
            (*ends, "")[i],
            tuple(group for group in groups if group and numbers[group[0]] == {i}),
        )
        for i in range(len(ends) + 1)
    ]


def _is_passed_once(run: Recording, blocks: Sequence[str], last: str) -> bool:
    """Whether what follows a block reads nothing of what this and earlier blocks made but its output."""
    calls = [run.calls_of[name][0] for name in blocks[: blocks.index(last) + 1]]
    stop, made = calls[-1].stop, set[int]()
    for call in calls:
        made.update(number for operation in run.operations[call.start : call.stop] for number in operation.makes)
    for operation in run.operations[calls[0].start : stop]:  # and what was computed from it between the blocks
        if not made.isdisjoint(operation.reads):
            made.update(operation.makes)
    made -= set(refs_in(calls[-1].output))
    return made.isdisjoint(run.outputs) and not any(
        not made.isdisjoint(operation.reads) for operation in run.operations[stop:]
    )


def run_part(model: nn.Module, part: Part, kept: Any, run: Callable[[], Any]) -> Any:
    """The output of a part's block in a run of the model, which ends there; None if the run is stopped before.

    `kept` is what the last finished block gave; the others' output is read by nobody.
    """
    outputs = []

    def ending(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run_block(*args: Any, **kwargs: Any) -> Any:
            outputs.append(forward(*args, **kwargs))
            return outputs[0]

        return run_block

    def stop(*_: Any) -> None:
        raise StopForward

    finished = [model.get_submodule(name) for name in part.finished]
    device = next(p.device for p in model.parameters() if not p.is_meta)
    last, unread = (_moved(kept, device) for _ in range(2))  # copies: what follows may write to them
    forwards = [(block, _constant(last if block is finished[-1] else unread)) for block in finished]
    with ExitStack() as stack:
        if part.end:
            block = model.get_submodule(part.end)
            forwards.append((block, ending(block.forward)))
            stack.callback(block.register_forward_hook(stop).remove)  # when the block's other hooks have run
        stack.enter_context(suppress(StopForward))
        stack.enter_context(replaced_forwards(forwards))
        run()
    return outputs[0] if outputs else None


class States(Protocol):
    """What the last block before a part gave, batch by batch."""

    def read(self, part: int, batch: int) -> Any: ...

    def write(self, part: int, batch: int, output: Any) -> None: ...


class StatesInMemory:
    """Those before one part; on a GPU they stay there if all of them fit, otherwise they wait on the CPU."""

    def __init__(self, n_batches: int) -> None:
        self.outputs: list[Any] = [None] * n_batches

    def read(self, part: int, batch: int) -> Any:
        return self.outputs[batch]

    def write(self, part: int, batch: int, output: Any) -> None:
        n_bytes = 0

        def count(value: Any) -> Any:
            nonlocal n_bytes
            n_bytes += value.nbytes if isinstance(value, Tensor) and value.is_cuda else 0
            return value

        tree_map(count, output)
        if n_bytes and n_bytes * len(self.outputs) > STATES_SHARE * torch.cuda.mem_get_info()[0]:
            output = _moved(output, torch.device("cpu"))
        self.outputs[batch] = output


@dataclass(frozen=True)
class Side:
    """One of the two networks: its layers, its batches, and what its finished blocks gave."""

    model: nn.Module
    map: ModelMap | None  # None: it is only run, and no uses are read
    layers: tuple[PrunableLayer, ...]
    batches: Sequence[Batch]
    states: States
    allow_tf32: bool

    def layers_of(self, names: Collection[str]) -> list[PrunableLayer]:
        """The layers that hold one of these weights."""
        return [layer for layer in self.layers if any(weight.name in names for weight in layer.weights.values())]

    def run(self, part: Part, i: int, layers: Iterable[PrunableLayer], on_use: OnUse) -> Any:
        """Runs a part on batch i: the output of its block, or None if `on_use` stopped it or it ends the network."""
        kept, batch = self.states.read(part.number, i) if part.finished else None, self.batches[i]
        found = None if batch.real_BT is None else self.map  # padding is left out where patches belong to inputs
        with numerics.float32_products(allow_tf32=self.allow_tf32):
            return run_part(self.model, part, kept, lambda: read_uses(self.model, layers, batch, on_use, found))

    def pass_on(self, part: Part) -> None:
        """Keeps what the block of a part gives, which is finished, for the next part."""
        for i in range(len(self.batches)):
            self.states.write(part.number + 1, i, self.run(part, i, (), _ignored))


def _ignored(weight: Weight, use: Any, batch: Batch) -> None:
    pass


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _moved(output: Any, device: torch.device) -> Any:
    """A copy of an output with its tensors on a device."""
    return tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, output)
