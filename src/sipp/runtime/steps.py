"""What a network is compiled to: a plan of steps, one for each operation of its graph, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sipp.native import pytree
from sipp.runtime.activations import BY_TORCH, NONE
from sipp.runtime.graph import ATEN, ATTENTION, CONV, LINEAR, Graph, Op, Slot

Values = dict[int, Any]  # by the numbers of a graph


@dataclass(frozen=True)
class Step:
    """One operation of a plan. `run` reads and writes values; most other fields are for the table."""

    name: str
    by: Literal["torch", "dense", "ours"]  # torch's operation; torch's layer, in its faster format; a kernel of ours
    run: Callable[[Values], None]
    out: int
    kernel: str = ""  # ours, in words
    is_watched: bool = False  # whether what is not finite in its result has been noticed: its result needs no check
    keep: float | None = None  # share of weights that are not zero
    n_dense_bytes: int = 0  # of its weights
    seconds: float | None = None
    dense_seconds: float | None = None
    note: str = ""
    held: tuple[Tensor, ...] = ()  # weights that it reads, packed or dense, perhaps shared with other steps
    reads: tuple[int, ...] | None = None  # values it reads in later calls; None: all that its operation does

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights as they are in memory: packed, or torch's."""
        return sum(tensor.nbytes for tensor in self.held) or self.n_dense_bytes


@dataclass(frozen=True)
class Plan:
    """The steps of a network, and the constants that they read from the values."""

    graph: Graph  # without constants
    steps: list[Step]
    constants: Values

    def run(self, inputs: list[Any]) -> list[Any]:
        """The flat outputs, which may share memory with inputs, constants and buffers."""
        values = self.constants | dict(zip(self.graph.inputs, inputs))
        for step in self.steps:
            step.run(values)
        return [values[ref.value] if isinstance(ref, Slot) else ref for ref in self.graph.outputs]


def plan_of(graph: Graph, steps: list[Step]) -> Plan:
    """The plan of these steps; weights that they hold themselves are not kept a second time."""
    used = {n for op, step in zip(graph.ops, steps) for n in (op.reads() if step.reads is None else step.reads)}
    used |= {ref.value for ref in graph.outputs if isinstance(ref, Slot)}
    constants = {n: value for n, value in graph.constants.items() if n in used}
    return Plan(replace(graph, constants={}), steps, constants)


@dataclass(frozen=True)
class Compiled:
    """How inputs of one kind are run: step by step, or by torch as a whole if that is faster."""

    steps: list[Step]  # of what was tried, without weights, if torch runs the network
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    is_dense: bool
    how: str  # in words
    seconds: float  # of a call
    dense_seconds: float
    speed: str  # in words, against torch, when it was compiled
    one_thread_seconds: float | None = None  # of a call on one thread; None: there is only one, or torch runs it
    chunk: int | None = None  # inputs per run of the steps; None: all at once
    tensors: Sequence[Tensor] = ()  # weights that it holds; others and the model may share them


def bytes_in_memory(tensors: Iterable[Tensor]) -> int:
    """The bytes of these tensors' memory, where several share it counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def left_to_torch(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any], how: str, seconds: float, tried: Sequence[Step] = ()
) -> Compiled:
    """A network that torch runs as it is called, perhaps after these steps were tried."""
    return Compiled(without_weights(tried), run, True, how, seconds, seconds, "run by torch: nothing gained")


def without_weights(steps: Sequence[Step]) -> list[Step]:
    """The steps of a network that torch runs as a whole: they can be printed but not run."""

    def run(values: Values) -> None:
        raise AssertionError("torch runs this network")

    return [replace(step, run=run, held=()) for step in steps]


def kept_share(weight: Tensor) -> float:
    """The share of weights that are not zero."""
    return float((weight != 0).sum()) / max(1, weight.numel())


def constant_weights(op: Op, constants: Values) -> list[Tensor] | None:
    """The weight of a product and its bias, if it has one; None if they are not constants, or it has other options."""
    refs = [ref for ref in op.args[1:3] if ref is not None]
    if op.kwargs or not all(isinstance(ref, Slot) and ref.value in constants for ref in refs):
        return None
    return [constants[ref.value] for ref in refs]


def fold_constants(graph: Graph) -> Graph:
    """Evaluates operations on constants alone, except random ones, and makes their results constants."""
    constants, ops = dict(graph.constants), []
    for op in graph.ops:
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
        if not is_drawn and op.target not in (CONV, LINEAR) and all(n in constants for n in op.reads()):
            torch_step(op).run(constants)
        else:
            ops.append(op)
    return replace(graph, ops=ops, constants=constants)


def arguments_of(values: Values, template: Any) -> Any:
    """The arguments with each `Slot` replaced by its value."""
    return pytree.tree_map(lambda leaf: values[leaf.value] if isinstance(leaf, Slot) else leaf, template)


def apply_epilogue(values: Values, op: Op, result: Tensor) -> Tensor:
    """Adds the addend and applies the activation of a product, with torch."""
    if op.addend is not None:
        result = result + values[op.addend]
    return BY_TORCH[op.act](result)


def torch_step(op: Op, note: str = "") -> Step:
    """The operation as torch runs it."""
    is_view = op.target in (ATEN.view.default, ATEN._unsafe_view.default)
    target: Any = ATEN.reshape.default if is_view else op.target  # any strides
    target = {
        ATTENTION: _attention, ATEN.view_as_complex.default: _complex, ATEN.view_as_real.default: _pairs,
    }.get(op.target, target)  # fmt: skip
    flat = [arg.value if isinstance(arg, Slot) else None for arg in op.args]
    inside = pytree.tree_leaves([arg for arg in op.args if isinstance(arg, (list, tuple, dict))])
    is_flat = not op.kwargs and not any(isinstance(leaf, Slot) for leaf in inside)

    def run_step(values: Values) -> None:
        if is_flat:  # most operations: this is faster
            result = target(*[arg if n is None else values[n] for arg, n in zip(op.args, flat)])
        else:
            result = target(*arguments_of(values, op.args), **arguments_of(values, op.kwargs))
        values[op.out] = result if op.addend is None and op.act == NONE else apply_epilogue(values, op, result)

    return Step(op.name, "torch", run_step, op.out, note=note)


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Tensor:
    """torch's attention on contiguous heads: with other strides it is slow on the CPU."""
    q, k, v = (x.contiguous() if x.is_cpu else x for x in (q, k, v))
    return ATTENTION(q, k, v, *options, **named)


def _complex(x: Tensor) -> Tensor:
    """view_as_complex, which needs adjacent pairs."""
    return torch.view_as_complex(x.contiguous())


def _pairs(x: Tensor) -> Tensor:
    """view_as_real, which needs conjugates in memory; the graph leaves out the copies that wrote them there."""
    return torch.view_as_real(x.resolve_conj())
