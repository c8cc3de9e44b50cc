"""A network in parts, each of which is run by itself: a block, and what lies between it and the block before.

A part begins with what the last finished block gave, which is kept for each batch. The whole network is run, but its
finished blocks only return what is kept, and the run ends with the block of the part. So the masks and positions that
blocks are given are always those of the batch. What comes before all blocks, such as an embedding, is run each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sipp.inputs import Batch, ModelMap, read_uses
from sipp.native import pytree
from sipp.results import numerics

STATES_SHARE = 1 / 8  # of a GPU's free memory: the outputs of one network stay there if they take at most this

Groups = tuple[tuple[str, ...], ...]  # names of weights in the order of execution, those with the same input together


class StopForward(BaseException):
    """Ends a forward pass early. Not an Exception, so that no model catches it."""


@dataclass(frozen=True)
class Part:
    """What is run between the end of one block and the end of the next."""

    number: int
    finished: tuple[str, ...]  # the blocks before it, in the order of execution
    end: str  # the block that it ends with; "": it ends with the network
    groups: Groups  # of the weights that are used in it

    def run(self, model: nn.Module, kept: Any, run: Callable[[], Any]) -> Any:
        """The output of its block in a run of the model, which ends there; None if the run is stopped before.

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

        finished = [model.get_submodule(name) for name in self.finished]
        device = next(p.device for p in model.parameters() if not p.is_meta)
        last, unread = (_copied(kept, device) for _ in range(2))  # what follows may write to them
        forwards = [(block, _constant(last if block is finished[-1] else unread)) for block in finished]
        with ExitStack() as stack:
            if self.end:
                block = model.get_submodule(self.end)
                forwards.append((block, ending(block.forward)))
                stack.callback(block.register_forward_hook(stop).remove)  # when the block's other hooks have run
            stack.enter_context(suppress(StopForward))
            stack.enter_context(_replaced_forwards(forwards))
            run()
        return outputs[0] if outputs else None


def groups_in(found: ModelMap, names: Collection[str]) -> Groups:
    """The groups of those weights that are named."""
    groups = (tuple(name for name in group if name in names) for group in found.same_input)
    return tuple(group for group in groups if group)


def parts_in(found: ModelMap, names: Collection[str]) -> list[Part]:
    """The parts of a network with those of its weights that are named; one part if a weight is used in several."""
    blocks, ends = ((), ()) if found.blocks is None else (found.blocks.names, found.blocks.ends)
    stops = [found.recording.calls_of[name][0].stop for name in ends]
    numbers = {
        name: {bisect_right(stops, found.recording.calls[call].start) for call in calls}
        for name, calls in found.uses.items()
    }
    if any(len(numbers[name]) > 1 for name in names if name in numbers):
        ends, numbers = (), {name: {0} for name in numbers}
    groups = groups_in(found, names)
    return [
        Part(
            i,
            tuple(blocks[: blocks.index(ends[i - 1]) + 1]) if i else (),
            (*ends, "")[i],
            tuple(group for group in groups if numbers[group[0]] == {i}),
        )
        for i in range(len(ends) + 1)
    ]


@contextmanager
def _replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """A context in which these modules run the given functions instead of their own forward."""
    before = []
    try:
        for module, forward in forwards:
            before.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _copied(output: Any, device: torch.device) -> Any:
    """A copy of an output with its tensors on a device."""
    return pytree.tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, output)


class States(Protocol):
    """What the last block before a part gave, batch by batch: in memory, or in files (`prune_on_disk`)."""

    def read(self, part: int, batch: int) -> Any: ...

    def write(self, part: int, batch: int, output: Any) -> None: ...


class StatesInMemory:
    """Those before one part; on a GPU they stay there if all of them fit, otherwise they wait on the CPU."""

    def __init__(self, n_batches: int) -> None:
        self.outputs: list[Any] = [None] * n_batches

    def read(self, part: int, batch: int) -> Any:
        return self.outputs[batch]

    def write(self, part: int, batch: int, output: Any) -> None:
        n_bytes = sum(leaf.nbytes for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_cuda)
        if n_bytes and n_bytes * len(self.outputs) > STATES_SHARE * torch.cuda.mem_get_info()[0]:
            output = _copied(output, torch.device("cpu"))
        self.outputs[batch] = output


@dataclass(frozen=True)
class Side:
    """One of the two networks, the batches, and what its finished blocks gave."""

    model: nn.Module
    batches: Sequence[Batch]
    states: States

    @property
    def allow_tf32(self) -> bool:
        """Whether passes and sums on a GPU may use TF32: if all weights are in half precision, which rounds more.

        A network in float32 is fitted exactly: SmolLM2 loses 1 to 2 % of its perplexity by TF32, for 10 of 40 s.
        """
        return all(p.element_size() < numerics.SCORE_DTYPE.itemsize for p in self.model.parameters() if p.ndim > 1)

    def run(self, part: Part, i: int, read: Callable[[Batch], Any]) -> Any:
        """Runs a part on batch i by `read`: the output of its block, or None if it was stopped or ends the network."""
        kept = self.states.read(part.number, i) if part.finished else None
        with numerics.float32_products(allow_tf32=self.allow_tf32):
            return part.run(self.model, kept, lambda: read(self.batches[i]))

    def pass_on(self, part: Part) -> None:
        """Keeps what the block of a part gives, which is finished, for the next part."""
        for i in range(len(self.batches)):
            output = self.run(part, i, lambda batch: read_uses(self.model, (), batch, _ignored))
            self.states.write(part.number + 1, i, output)


def _ignored(*_: Any) -> None:
    pass
