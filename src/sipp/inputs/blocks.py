"""The repeated blocks of a network (the layers of a transformer), and what each of them is called with.

Blocks are modules of one class that are called one after the other, each on the output of the last: they pass a state
along. Their other arguments (masks, positions) must not depend on what the blocks compute. Then a network can be run
block by block, with only the states of all points between two blocks in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sipp.inputs.recording import ModuleCall, Recording, Ref, refs_in

FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class Blocks:
    """Which modules repeat, in the order in which they are called, and how the state goes in and comes out."""

    names: tuple[str, ...]
    at: int | str  # the argument that is the state: its position, or its name
    n_none: int | None  # the output is a tuple of the state and this many None; None: it is the state itself

    def state_of(self, output: Any) -> Tensor:
        """The state in a block's output."""
        state: Tensor = output if self.n_none is None else output[0]
        return state

    def as_output(self, state: Tensor) -> Any:
        """A block's output with this state."""
        return state if self.n_none is None else (state, *[None] * self.n_none)


def find_blocks(model: nn.Module, run: Recording) -> Blocks | None:
    """The longest such chain of modules in a watched run of the model, the outermost of equally long ones, or None."""
    found = _longest(_called_once(model, run))
    return found if found is not None and _run_by_themselves(run, found) else None


def _called_once(model: nn.Module, run: Recording) -> list[ModuleCall]:
    """The calls of modules that could be blocks: those with children whose class occurs again, called once."""
    kinds = Counter(type(module) for module in model.modules())
    could_be = {
        name
        for name, module in model.named_modules()
        if name and kinds[type(module)] >= FEWEST_BLOCKS and next(module.children(), None) is not None
        if not isinstance(module, nn.ModuleList | nn.Sequential)
    }
    return [call for call in run.calls if call.module in could_be and len(run.calls_of[call.module]) == 1]


def _longest(calls: Sequence[ModuleCall]) -> Blocks | None:
    """The longest chain of modules of one class."""
    once = {call.module: call for call in calls}
    by_state = {(state, call.kind): name for name, call in once.items() if (state := _state(call)) is not None}
    before: dict[str, tuple[str, int | str]] = {}  # by module: the one before it, and where the state goes in
    for name, call in once.items():
        for at, value in call.arguments.items():
            source = by_state.get((value, call.kind)) if isinstance(value, Ref) else None
            if source is not None and source != name and not _is_nested(source, name):
                before.setdefault(name, (source, at))
    best: list[str] = []
    best_at: int | str = 0
    for last in before:
        chain, places = [last], set[int | str]()
        while chain[0] in before and before[chain[0]][0] not in chain:
            source, at = before[chain[0]]
            if places and at not in places:
                break
            places.add(at)
            chain.insert(0, source)
        if len(chain) > len(best):
            best, best_at = chain, next(iter(places))
    if len(best) < FEWEST_BLOCKS:
        return None
    first = once[best[0]]
    if not isinstance(first.arguments.get(best_at), Ref):  # the first block takes its state elsewhere
        return None
    return Blocks(tuple(best), best_at, None if isinstance(first.output, Ref) else len(first.output) - 1)


def _run_by_themselves(run: Recording, blocks: Blocks) -> bool:
    """Whether the blocks can be run one by one: they share nothing of what they compute but the state."""
    calls = [run.calls_of[name][0] for name in blocks.names]
    of_blocks = {
        made for call in calls for operation in run.operations[call.start : call.stop] for made in operation.makes
    }
    for operation in run.operations:  # and what is computed from them
        if not of_blocks.isdisjoint(operation.reads):
            of_blocks.update(operation.makes)
    for call in calls:
        others = {at: value for at, value in call.arguments.items() if at != blocks.at}
        if any(_is_opaque(leaf) for leaf in tree_leaves(others)):
            return False
        given = set(refs_in(others))
        if not given.isdisjoint(of_blocks):
            return False
        known = given | set(refs_in(call.arguments[blocks.at]))
        for operation in run.operations[call.start : call.stop]:
            for read in operation.reads:
                is_constant = read not in run.maker and not run.values[read].of_inputs
                if read not in known and not is_constant:
                    return False
            known.update(operation.makes)
    return True


def _is_opaque(leaf: Any) -> bool:
    """Whether it stands for an object that was not looked into: the watch notes its type (see `Recorder`)."""
    return isinstance(leaf, type) and not issubclass(leaf, nn.Module)


def _state(call: ModuleCall) -> int | None:
    """The only tensor of an output: by itself, or first in a tuple whose other entries are None."""
    output = call.output
    if isinstance(output, tuple) and output and all(value is None for value in output[1:]):
        output = output[0]
    return output if isinstance(output, Ref) else None


def _is_nested(a: str, b: str) -> bool:
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")
