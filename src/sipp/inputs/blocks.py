"""The repeated blocks of a network (the layers of a transformer), and what each of them is called with.

Blocks are modules of one class that are called one after the other, each on the output of the last: they pass a state
along. Their other arguments (masks, positions) must not depend on what the blocks compute. Then a network can be run
block by block, with only the states of all points between two blocks in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import fresh, points_at
from sipp.inputs.probing import first_and_last
from sipp.inputs.restore import StopForward, replaced_forwards
from sipp.results.batches import Batch
from sipp.results.numerics import same_tensor

FEWEST_BLOCKS = 2
MOST_LISTS = 4  # named in an error
SAME = 1e-3  # how closely a block run by itself must reproduce a state, relative to its largest number

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, by position and by name


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

    def split(self, call: Call) -> tuple[Any, Call]:
        """The state of a call, and the call without it."""
        args, kwargs = call
        if isinstance(self.at, str):
            return kwargs[self.at], (args, {name: value for name, value in kwargs.items() if name != self.at})
        return args[self.at], ((*args[: self.at], None, *args[self.at + 1 :]), kwargs)

    def joined(self, batch: Batch, call: Call, state: Tensor) -> Batch:
        """The batch with the arguments of a block, the state among them."""
        args, kwargs = call
        if isinstance(self.at, str):
            return replace(batch, args=args, kwargs=kwargs | {self.at: state}, labels=None)
        args = (*args[: self.at], state, *args[self.at + 1 :])
        return replace(batch, args=args, kwargs=dict(kwargs), labels=None)


@dataclass(frozen=True)
class Entered:
    """A batch as it enters the first block: the state there, and the other arguments of each block."""

    state: Tensor
    calls: tuple[Call, ...]


def find_blocks(model: nn.Module, batch: Batch, named: str | Sequence[str] | None = None) -> Blocks | None:
    """The longest such chain of modules, found by running a few points of the batch; None if there is none.

    Modules that are `named`, by their list or one by one, must be such a chain; if not, an OptionError says why.
    """
    names = block_names(model, named) if isinstance(named, str) else named
    few = points_at(batch, first_and_last(batch.n_points))
    seen = _seen_calls(model, few, names)
    found = _longest(seen, names)
    if found is not None and not _walks_the_same(model, *found, few, {one.name: one.output for one in seen}):
        found = None
    if found is None and names is not None:
        raise OptionError(
            f"blocks={', '.join(names)!r:.80} do not pass a state from one to the next: {_why_not(seen, names)}",
            fix="name a list of modules that are called one after the other, or leave it to be found",
            option="blocks",
        )
    return None if found is None else found[0]


def block_names(model: nn.Module, named: str) -> tuple[str, ...]:
    """The names of the modules in a list of the model; if it is not one, an OptionError names the lists there are."""
    module = dict(model.named_modules()).get(named)
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= FEWEST_BLOCKS:
        return tuple(f"{named}.{name}" for name in module._modules)
    what = "not a module of the network" if module is None else f"a {type(module).__name__}"
    if isinstance(module, nn.ModuleList | nn.Sequential):
        what += f" of {len(module)}"
    lists = [
        f"{name} ({len(one)})"
        for name, one in model.named_modules()
        if name and isinstance(one, nn.ModuleList | nn.Sequential) and len(one) >= FEWEST_BLOCKS
    ]
    raise OptionError(
        f"blocks={named!r:.80} is {what}, and must be a list of modules",
        fix=f"the network has {', '.join(lists[:MOST_LISTS])}" if lists else "the network has none: leave it out",
        option="blocks",
    )


def enter(model: nn.Module, blocks: Blocks, batch: Batch) -> Entered:
    """Runs the part of the model before the blocks; the blocks themselves only pass the state on."""
    calls: list[Call] = []

    def note(call: Call) -> Tensor:
        state, rest = blocks.split(call)
        calls.append(rest)
        if len(calls) == 1:
            first.append(state.detach().clone())
        if len(calls) == len(blocks.names):
            raise StopForward
        return first[0].clone()

    first: list[Tensor] = []
    with suppress(StopForward), scoring_mode(model, "running"), _instead(model, blocks, note):
        run_batch(model, fresh(batch))
    if len(calls) != len(blocks.names):
        raise ModelError(f"{batch.where} does not pass all of its {len(blocks.names)} blocks")
    return Entered(first[0], tuple(calls))


def _instead(model: nn.Module, blocks: Blocks, note: Callable[[Call], Tensor]) -> AbstractContextManager[None]:
    """A context in which blocks call `note` and pass on the state that it returns."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return blocks.as_output(note((args, kwargs)))

    return replaced_forwards((model.get_submodule(name), forward) for name in blocks.names)


@dataclass(frozen=True)
class _SeenCall:
    """One call of a module, with its tensors kept alive so that an id stands for one."""

    name: str
    kind: type
    call: Call
    output: Any


def _seen_calls(model: nn.Module, batch: Batch, names: Sequence[str] | None) -> list[_SeenCall]:
    """The calls of all modules that could be blocks: those named, or those with children whose class occurs again."""
    kinds = Counter(type(module) for module in model.modules())
    found: list[_SeenCall] = []

    def hook(name: str) -> Callable[..., None]:
        def noted(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            kind = type(module) if names is None else nn.Module  # named modules may be of several classes
            found.append(_SeenCall(name, kind, (args, kwargs), output))

        return noted

    with ExitStack() as stack:
        stack.enter_context(scoring_mode(model, "running"))
        for name, module in model.named_modules():
            is_plain = not isinstance(module, torch.jit.ScriptModule | nn.ModuleList | nn.Sequential)
            is_one = kinds[type(module)] >= FEWEST_BLOCKS and is_plain and next(module.children(), None) is not None
            if (name and is_one) if names is None else name in names:
                stack.callback(module.register_forward_hook(hook(name), with_kwargs=True).remove)
        run_batch(model, fresh(batch))
    return found


def _longest(seen: Sequence[_SeenCall], names: Sequence[str] | None) -> tuple[Blocks, tuple[Call, ...]] | None:
    """The longest chain, the outermost of equally long ones, and its calls."""
    n_calls = Counter(one.name for one in seen)
    once = {one.name: one for one in seen if n_calls[one.name] == 1 and (names is None or one.name in names)}
    by_state = {(id(state), one.kind): one for one in once.values() if (state := _state(one.output)) is not None}
    before: dict[str, tuple[str, int | str]] = {}  # by module: the one before it, and where the state goes in
    for one in once.values():
        args, kwargs = one.call
        given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        for at, value in given.items():
            source = by_state.get((id(value), one.kind)) if isinstance(value, Tensor) else None
            if source is not None and source.name != one.name and not _is_nested(source.name, one.name):
                before.setdefault(one.name, (source.name, at))
    best: list[str] = []
    for last in before:
        chain, places = [last], set[int | str]()
        while chain[0] in before and before[chain[0]][0] not in chain:
            source_name, at = before[chain[0]]
            if places and at not in places:
                break
            places.add(at)
            chain.insert(0, source_name)
        if len(chain) > len(best):
            best, best_at = chain, next(iter(places))
    if len(best) < FEWEST_BLOCKS or (names is not None and list(names) != best):
        return None
    output = once[best[0]].output
    blocks = Blocks(tuple(best), best_at, None if isinstance(output, Tensor) else len(output) - 1)
    try:
        calls = tuple(blocks.split(once[name].call)[1] for name in best)
    except (IndexError, KeyError):  # the first block takes its state elsewhere
        return None
    return blocks, calls


def _why_not(seen: Sequence[_SeenCall], names: Sequence[str]) -> str:
    """Why the named modules are not a chain."""
    n_calls = Counter(one.name for one in seen)
    for name in names:
        if n_calls[name] != 1:
            return f"{name} is called {n_calls[name]} times for a batch"
    by_name = {one.name: one for one in seen}
    for name in names:
        if _state(by_name[name].output) is None:
            return f"{name} returns a {type(by_name[name].output).__name__}, not one tensor"
    for first, second in pairwise(names):
        state, (args, kwargs) = _state(by_name[first].output), by_name[second].call
        if not any(value is state for value in (*args, *kwargs.values())):
            return f"{second} is not called with the output of {first}"
    return "run by themselves, one after the other, they give other outputs than inside the network"


def _state(output: Any) -> Tensor | None:
    """The only tensor of an output: by itself, or first in a tuple whose other entries are None."""
    if isinstance(output, tuple) and output and all(value is None for value in output[1:]):
        output = output[0]
    return output if isinstance(output, Tensor) else None


def _is_nested(a: str, b: str) -> bool:
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _walks_the_same(
    model: nn.Module, blocks: Blocks, calls: Sequence[Call], batch: Batch, outputs: Mapping[str, Any]
) -> bool:
    """Whether the blocks, run one by one, get the same arguments and give the same states as inside the network.

    Otherwise they share information outside the state.
    """
    try:
        entered = enter(model, blocks, batch)
        if not all(map(same_arguments, calls, entered.calls)):
            return False
        state = entered.state
        for name, call in zip(blocks.names, entered.calls):
            block, wanted = model.get_submodule(name), blocks.state_of(outputs[name])
            with scoring_mode(block, "running"):
                state = blocks.state_of(run_batch(block, fresh(blocks.joined(batch, call, state))))
            if state.shape != wanted.shape or not bool((state - wanted).abs().max() <= SAME * wanted.abs().max()):
                return False
    except (DataError, ModelError):
        return False
    return True


def same_arguments(a: Any, b: Any) -> bool:
    """Whether two arguments are equal. Other objects must be identical: a new cache may hold what blocks computed."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same_tensor(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_arguments(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_arguments, a, b))
    if isinstance(a, str | int | float | None) or isinstance(b, str | int | float | None):
        return type(a) is type(b) and a == b
    return a is b
