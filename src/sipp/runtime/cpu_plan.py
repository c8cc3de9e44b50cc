"""Compiles a traced graph for the CPU: for each operation the fastest step, chosen by timing on an example."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sipp.native import pytree
from sipp.runtime import steps
from sipp.runtime.attention import attention_step
from sipp.runtime.buffers import Arena
from sipp.runtime.cat_and_pad import CAT_AND_PAD, cat_or_pad_step
from sipp.runtime.graph import ATEN, CONV, LINEAR, Graph, Op, Ref
from sipp.runtime.layers import constant_weights, read_layer
from sipp.runtime.norms import LAYER_NORM, norm_step
from sipp.runtime.plan import Plan, fold_constants, plan_of
from sipp.runtime.pools import POOLS, pool_step
from sipp.runtime.products import image_step, token_step
from sipp.runtime.recurrent import LSTM, RECURRENT, recurrent_step
from sipp.runtime.steps import ATTENTION, Step, Values, torch_step
from sipp.runtime.vector_kernel import MOST_COLUMNS, vector_step

# Operations whose results are finite if their inputs are
_SAFE = {
    ATEN.view.default, ATEN.reshape.default, ATEN.transpose.int, ATEN.permute.default, ATEN.slice.Tensor,
    ATEN.select.int, ATEN.unsqueeze.default, ATEN.squeeze.dim, ATEN.squeeze.default, ATEN.expand.default,
    ATEN.flatten.using_ints, ATEN.relu.default, ATEN.max_pool2d.default, ATEN.cat.default, ATEN.dropout.default,
    ATEN.sigmoid.default, ATEN.tanh.default,
}  # fmt: skip


@dataclass(frozen=True)
class CpuPlan:
    """A plan with the buffers that its steps write to. All calls share them, so one runs at a time."""

    plan: Plan
    arena: Arena
    storages: frozenset[int]  # addresses of the constants

    def run(self, inputs: list[Any]) -> list[Any] | None:
        """The flat outputs; None if a value on the way is not finite (0 times infinity is not 0, so torch must run)."""
        flag = self.arena.flag
        with torch.no_grad(), _without_autocast():
            flag.clear()
            for value in inputs:
                if isinstance(value, Tensor) and value.is_floating_point():
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
        """Dense weights that it holds; other plans and the model may share them."""
        constants = [value for value in self.plan.constants.values() if isinstance(value, Tensor)]
        return [*constants, *(tensor for step in self.plan.steps for tensor in step.held)]

    @property
    def n_packed_bytes(self) -> int:
        """Bytes of the packed weights, which belong to this plan alone."""
        return sum(step.n_bytes for step in self.plan.steps if step.kernel not in ("dense", "torch"))


def make_plan(graph: Graph, inputs: list[Any], *, checks_all: bool = False) -> CpuPlan:
    """The plan for inputs like these: runs every operation in order, trying its possible implementations.

    With `checks_all`, every value must be finite that any operation reads, not only those that our kernels read.
    """
    with torch.no_grad(), _without_autocast():
        graph = fold_constants(graph)
        arena = Arena()
        values: Values = {**graph.constants, **dict(zip(graph.inputs, inputs))}
        last = {n: i for i, op in enumerate(graph.ops) for n in op.reads()}
        kept = {ref.value for ref in graph.outputs if isinstance(ref, Ref)}
        borders = _borders(graph)
        steps = []
        for i, op in enumerate(graph.ops):
            steps.append(_step(op, graph, values, arena, borders.get(op.out, (0, 0))))
            for n in set(op.reads()):
                if last[n] == i and n not in kept and isinstance(values[n], Tensor):
                    arena.release(values[n])
        plan = plan_of(graph, _with_finite_checks(graph, steps, arena, checks_all))
        return CpuPlan(plan, arena, _storages(plan.constants.values()))


def _without_autocast() -> AbstractContextManager[object]:
    """Turns autocast off: its casts are already operations of the graph."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _storages(values: Iterable[Any]) -> frozenset[int]:
    """The addresses of the tensors' storages."""
    return frozenset(value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor))


def _step(op: Op, graph: Graph, values: Values, arena: Arena, border: tuple[int, int]) -> Step:
    """Chooses and runs the step of one operation; its result is added to `values`."""
    if op.target in (CONV, LINEAR) and _can_be_sparse(op, graph, values):
        return _product_step(op, graph, values, arena, border)
    step = None
    if op.target in POOLS:
        step = pool_step(op, values, arena, border)
    elif op.target in CAT_AND_PAD:
        step = cat_or_pad_step(op, values, arena, border)
    elif op.target is LAYER_NORM:
        step = norm_step(op, values, arena, graph.constants)
    elif op.target is ATTENTION:
        step = attention_step(op, values, arena, graph.constants)
    elif op.target is LSTM:
        step = recurrent_step(op, values, arena, graph.constants)
    if step is None:
        step = torch_step(op)
        step.run(values)
        if op.target in RECURRENT:
            step = _with_weights(step, op, graph, values)
        for n in op.reads():
            if isinstance(values[n], Tensor):
                arena.pin(values[n])
    return step


def _with_weights(step: Step, op: Op, graph: Graph, values: Values) -> Step:
    """Adds the size and time of a recurrent layer that torch runs, for its row in the table."""
    weights = [w for n in op.reads() if (w := graph.constants.get(n)) is not None and w.ndim == 2]
    n_weights = sum(w.numel() for w in weights)
    n_bytes, keep = sum(w.nbytes for w in weights), sum(int((w != 0).sum()) for w in weights) / max(1, n_weights)
    seconds = steps.dense_time(lambda: step.run(values), trials=1)
    return replace(step, keep=keep, n_bytes=n_bytes, n_dense_bytes=n_bytes, dense_seconds=seconds)


def _product_step(op: Op, graph: Graph, values: Values, arena: Arena, border: tuple[int, int]) -> Step:
    """The step of a convolution or linear layer with constant weights."""
    layer, weight = read_layer(op, graph.constants)
    if op.target is CONV:
        step = image_step(layer, weight, values, arena, border)
    elif values[op.args[0].value].numel() == weight.shape[1] <= MOST_COLUMNS:
        step = vector_step(layer, weight, values, arena)
    else:
        step = token_step(layer, weight, values, arena)
    return step if layer.bias is None else replace(step, held=(*step.held, layer.bias))


def _can_be_sparse(op: Op, graph: Graph, values: Values) -> bool:
    """Whether a product is float32 on the CPU, with constant weights and a nonempty batch."""
    weights, x = constant_weights(op, graph.constants), values[op.args[0].value]
    if weights is None:
        return False
    tensors = [x, *weights, *([] if op.addend is None else [values[op.addend]])]
    is_float = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    has_points = x.ndim == 4 if op.target is CONV else x.ndim >= 2
    return is_float and has_points and x.numel() > 0


def _borders(graph: Graph) -> dict[int, tuple[int, int]]:
    """For each value, the widest padding of the convolutions that read it."""
    borders: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        if op.target is CONV and len(op.args) > 4:
            rows, columns = (list(op.args[4]) * 2)[:2]
            have = borders.get(op.args[0].value, (0, 0))
            borders[op.args[0].value] = max(rows, have[0]), max(columns, have[1])
    return borders


def _with_finite_checks(graph: Graph, steps: list[Step], arena: Arena, checks_all: bool) -> list[Step]:
    """Adds a check that the result is finite to each step whose result our kernels read and that has no check itself.

    Results that reach our kernels through views and the like count too. A mean may overflow. A dense layer with a
    folded norm is always checked, because it may overflow before the norm.
    """
    ours: set[int] = set()
    for op, step in reversed(list(zip(graph.ops, steps))):
        if checks_all or step.kernel != "torch" or (op.target in _SAFE and step.out in ours):
            ours |= set(op.reads())
    unwatched = [step.kernel in ("torch", "dense") or op.target in POOLS for op, step in zip(graph.ops, steps)]
    return [
        _with_finite_check(step, arena, op.shrunk)
        if is_blind and (step.out in ours or op.shrunk > 1) and op.target not in _SAFE
        else step
        for op, step, is_blind in zip(graph.ops, steps, unwatched)
    ]


def _with_finite_check(step: Step, arena: Arena, limit: float) -> Step:
    """The step, followed by a check that `limit` times its result is finite."""

    def run(values: Values) -> None:
        step.run(values)
        result = values[step.out]
        if isinstance(result, Tensor) and result.is_floating_point():
            arena.flag.check(result, limit)

    return replace(step, run=run)


def flat_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs as a flat list."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]]
    return pytree.tree_leaves((args, kwargs))
