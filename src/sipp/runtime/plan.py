"""Compiles a traced graph for the CPU: the step of each operation, from one table of what has a kernel of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sipp.native import pytree
from sipp.runtime.attention import attention_step
from sipp.runtime.buffers import Arena, Pair, Work
from sipp.runtime.graph import ATEN, ATTENTION, CONV, LINEAR, LSTM, Graph, Op, Slot
from sipp.runtime.images import CAT, MAX, MEANS, PAD, copies_step, pool_step
from sipp.runtime.norms import norm_step
from sipp.runtime.products import product_step
from sipp.runtime.recurrent import recurrent_step
from sipp.runtime.steps import Plan, Step, Values, fold_constants, plan_of, torch_step

# how an operation becomes a step; the maker gives None for what it leaves to torch
MAKERS: dict[Any, Callable[[Op, Work], Step | None]] = {
    CONV: product_step,
    LINEAR: product_step,
    LSTM: recurrent_step,
    ATTENTION: attention_step,
    ATEN.layer_norm.default: norm_step,
    MAX: pool_step,
    **dict.fromkeys(MEANS, pool_step),
    CAT: copies_step,
    PAD: copies_step,
}


@dataclass(frozen=True)
class CpuPlan:
    """A plan with the buffers that its steps write to. All calls share them, so one runs at a time."""

    plan: Plan
    arena: Arena
    storages: frozenset[int]  # addresses of the constants
    ours: set[int]  # values in which a kernel of ours would not see what is not finite

    def run(self, inputs: list[Any]) -> list[Any] | None:
        """The flat outputs; None if a value on the way is not finite (0 times infinity is not 0, so torch must run)."""
        flag = self.arena.flag
        with torch.no_grad(), _without_autocast():
            flag.clear()
            for number, value in zip(self.plan.graph.inputs, inputs):
                if number in self.ours:
                    flag.check(value)
            if flag.is_raised:
                return None
            outputs = self.plan.run(inputs)
            return None if flag.is_raised else self._owned(outputs, inputs)

    def _owned(self, outputs: list[Any], inputs: list[Any]) -> list[Any]:
        """The outputs, copied where they share memory with a buffer, an input, a constant or another output."""
        shared, owned = {*self.storages, *_storages(inputs)}, []
        for value in outputs:
            if isinstance(value, Tensor):
                is_shared = self.arena.buffer_of(value) or value.untyped_storage().data_ptr() in shared
                value = value.clone(memory_format=torch.contiguous_format) if is_shared else value.contiguous()
                shared.add(value.untyped_storage().data_ptr())
            owned.append(value)
        return owned

    @property
    def tensors(self) -> list[Tensor]:
        """Weights that it holds; other plans and the model may share them."""
        constants = [value for value in self.plan.constants.values() if isinstance(value, Tensor)]
        return [*constants, *(tensor for step in self.plan.steps for tensor in step.held)]


def make_plan(graph: Graph, inputs: list[Any]) -> CpuPlan:
    """The plan for inputs like these: runs every operation in order, trying its possible implementations."""
    with torch.no_grad(), _without_autocast():
        graph = fold_constants(graph)
        arena = Arena()
        values: Values = {**graph.constants, **dict(zip(graph.inputs, inputs))}
        kept = {*graph.constants, *graph.inputs, *(ref.value for ref in graph.outputs if isinstance(ref, Slot))}
        last = {n: i for i, op in enumerate(graph.ops) for n in op.reads()}
        borders, views = _borders(graph), set()
        steps = []
        for i, op in enumerate(graph.ops):
            make = MAKERS.get(op.target)
            step = make and make(op, Work(graph.constants, values, arena, borders.get(op.out, (0, 0))))
            if step is None:
                step = torch_step(op)
                for value in (values[n] for n in op.reads()):
                    if isinstance(value, Tensor):
                        arena.pin(value)
            step.run(values)
            steps.append(step)
            if step.by == "torch" and _storages([values[op.out]]) & _storages(values[n] for n in op.reads()):
                views.add(op.out)
            for n in set(op.reads()) - kept:
                if last[n] == i and isinstance(values[n], Tensor):
                    arena.release(values[n])
        ours = _read_by_ours(graph, steps, views)
        checked = ours - views
        steps = [
            _with_finite_check(step, arena) if step.out in checked and not step.is_watched else step for step in steps
        ]
        plan = plan_of(graph, steps)
        return CpuPlan(plan, arena, _storages(plan.constants.values()), ours)


def _without_autocast() -> AbstractContextManager[object]:
    """Turns autocast off: its casts are already operations of the graph."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _storages(values: Iterable[Any]) -> frozenset[int]:
    """The addresses of the tensors' storages."""
    return frozenset(value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor))


def _borders(graph: Graph) -> dict[int, Pair]:
    """For each value, the widest padding of the convolutions that read it."""
    borders: dict[int, Pair] = {}
    for op in graph.ops:
        if op.target is CONV and len(op.args) > 4:
            rows, columns = (list(op.args[4]) * 2)[:2]
            have = borders.get(op.args[0].value, (0, 0))
            borders[op.args[0].value] = max(rows, have[0]), max(columns, have[1])
    return borders


def _read_by_ours(graph: Graph, steps: list[Step], views: set[int]) -> set[int]:
    """The values that our kernels read, also through views, and that have to be finite for them.

    Masks of attention do not: minus infinity is usual, and anything else makes the results NaN, which are watched.
    """
    ours: set[int] = set()
    for op, step in reversed(list(zip(graph.ops, steps))):
        if step.by != "torch" and op.target is ATTENTION:
            ours |= {ref.value for ref in op.args[:3]}
        elif step.by != "torch" or (step.out in views and step.out in ours):
            ours |= set(op.reads())
    return ours


def _with_finite_check(step: Step, arena: Arena) -> Step:
    """The step, followed by a check that its result is finite."""

    def run(values: Values) -> None:
        step.run(values)
        arena.flag.check(values[step.out])

    return replace(step, run=run)


def flat_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs as a flat list."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]]
    return pytree.tree_leaves((args, kwargs))
