"""Compiles a traced graph for a GPU: chooses a kernel for each linear layer, leaves the rest to torch.

Linear layers that read the same few tokens (queries, keys and values of an attention) become one sparse product, which
takes a single launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sipp.runtime.gpu.linear import (
    AGREEMENT,
    MOST_TOKENS,
    KernelChoice,
    LinearKernel,
    dense_kernel,
    fastest_kernel,
    kernel_error,
    time_kernel,
    timing_group,
    why_wrong,
)
from sipp.runtime.graph import CONV, LINEAR, Graph, Op
from sipp.runtime.steps import Plan, Step, Values, constant_weights, fold_constants, kept_share, plan_of, torch_step

LEAST_WEIGHTS = 1 << 16  # smaller layers take no longer than their launch
KEEP_BINS = 50  # similar layers whose kept share agrees to 1/50 are timed only once


@dataclass(frozen=True)
class JoinedLayers:
    """Linear layers that read the same tokens, as one product: their weights below one another."""

    ops: list[Op]
    weights: list[Tensor]
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor  # of the example: tokens x columns


Known = dict[Hashable, KernelChoice]  # by what layers that are timed only once have in common


def make_plan(graph: Graph, inputs: list[Any]) -> Plan:
    """The plan for inputs like these: runs every operation in order, and times the kernels of linear layers."""
    graph = fold_constants(graph)
    values: Values = {**graph.constants, **dict(zip(graph.inputs, inputs))}
    known: Known = {}
    steps: dict[int, Step] = {}
    for op in graph.ops:
        if op.out not in steps:
            steps.update((step.out, step) for step in _steps_of(op, graph, values, known))
        steps[op.out].run(values)
    return plan_of(graph, [steps[op.out] for op in graph.ops])


def _steps_of(op: Op, graph: Graph, values: Values, known: Known) -> list[Step]:
    """The step of an operation, and those of the layers that run as one with it."""
    if not _can_be_sparse(op, graph, values):
        return [torch_step(op, _why_not(op))]
    group = _readers_of_same(op, graph, values)
    if len(group) > 1:
        layers = _joined(group, graph, values)
        kernel, choice = _checked_kernel(layers, graph, known)
        if kernel is not None:
            return _sparse_steps(layers, kernel, choice)
    # alone, one of them may be worth it
    return [_step_alone(_joined([member], graph, values), graph, known) for member in group]


def _can_be_sparse(op: Op, graph: Graph, values: Values) -> bool:
    """Whether it is a large enough linear layer with constant weights, on a nonempty batch."""
    if op.target is not LINEAR or (weights := constant_weights(op, graph.constants)) is None:
        return False
    return weights[0].ndim == 2 and weights[0].numel() >= LEAST_WEIGHTS and values[op.args[0].value].numel() > 0


def _readers_of_same(op: Op, graph: Graph, values: Values) -> list[Op]:
    """The linear layers that read the same few tokens and can be joined with this one, which comes first."""
    x, weight = values[op.args[0].value], graph.constants[op.args[1].value]
    if x.numel() // weight.shape[1] > MOST_TOKENS or weight.dtype != x.dtype:
        return [op]

    def is_alike(other: Op) -> bool:
        if other.out < op.out or other.target is not LINEAR or other.args[0] != op.args[0]:
            return False
        return (
            _can_be_sparse(other, graph, values)
            and graph.constants[other.args[1].value].dtype == weight.dtype
            and (_bias(other, graph) is None) == (_bias(op, graph) is None)
            and kept_share(graph.constants[other.args[1].value]) < 1.0
        )

    alike = [other for other in graph.ops if is_alike(other)]
    return alike if op in alike else [op]


def _joined(group: list[Op], graph: Graph, values: Values) -> JoinedLayers:
    x = values[group[0].args[0].value]
    weights = [graph.constants[op.args[1].value] for op in group]
    biases = [bias for op in group if (bias := _bias(op, graph)) is not None]
    return JoinedLayers(
        group, weights, torch.cat(weights), torch.cat(biases) if biases else None, x.reshape(-1, x.shape[-1])
    )


def _kind(layers: JoinedLayers) -> Hashable:
    """What layers have in common that are timed only once: sizes, dtypes, pattern, and about the kept share."""
    weight, tokens = layers.weight, layers.tokens
    sizes = *(len(part) for part in layers.weights), weight.shape, tokens.shape, tokens.stride()
    share = round(KEEP_BINS * kept_share(weight))
    return *sizes, weight.dtype, tokens.dtype, layers.bias is None, timing_group(weight, tokens), share


def _timed_choice(layers: JoinedLayers, graph: Graph) -> KernelChoice:
    """The fastest kernel, timed against torch's layers one by one."""
    tokens = layers.tokens
    n_bytes = sum(constant.nbytes for constant in graph.constants.values())
    cache = torch.cuda.get_device_properties(tokens.device).L2_cache_size if tokens.is_cuda else 0
    n_copies = partial(copies_to_time, -(-n_bytes // layers.weight.nbytes), cache)

    def dense_seconds() -> float:
        return sum(time_kernel(dense_kernel(own, None), tokens, n_copies(own.nbytes)) for own in layers.weights)

    return fastest_kernel(layers.weight, layers.bias, tokens, n_copies, dense_seconds)


def _checked_kernel(layers: JoinedLayers, graph: Graph, known: Known) -> tuple[LinearKernel | None, KernelChoice]:
    """The fastest kernel and its choice; no kernel if torch's is as fast, or this one's sums differ from torch's.

    The timing may come from similar layers, but all layers are compared with torch themselves.
    """
    kind = _kind(layers)
    if kind not in known:
        known[kind] = _timed_choice(layers, graph)
    choice = known[kind]
    if choice.is_dense:
        return None, choice
    kernel = choice.make(layers.weight, layers.bias)
    by = kernel_error(kernel, layers.weight, layers.bias, layers.tokens)
    if not by <= AGREEMENT[layers.tokens.dtype]:
        return None, replace(choice, make=dense_kernel, is_dense=True, why=why_wrong(by))
    return kernel, choice


def _step_alone(layer: JoinedLayers, graph: Graph, known: Known) -> Step:
    """The step of a single layer: sparse, or as torch runs it."""
    kernel, choice = _checked_kernel(layer, graph, known)
    if kernel is not None:
        return _sparse_steps(layer, kernel, choice)[0]
    step, n_bytes = torch_step(layer.ops[0], choice.why), layer.weight.nbytes
    return replace(
        step, kernel="dense", keep=kept_share(layer.weight), n_bytes=n_bytes, n_dense_bytes=n_bytes,
        seconds=choice.seconds, dense_seconds=choice.dense_seconds,
    )  # fmt: skip


def _sparse_steps(layers: JoinedLayers, kernel: LinearKernel, choice: KernelChoice) -> list[Step]:
    """The step of the first layer, which computes the results of all, and those of the others, which do nothing."""
    first, *others = layers.ops
    outs, n_rows = [op.out for op in layers.ops], [len(weight) for weight in layers.weights]

    def run_step(values: Values) -> None:
        x = values[first.args[0].value]
        result = kernel.call(x.reshape(-1, x.shape[-1]), kernel.tensors)
        values.update(zip(outs, result.reshape(*x.shape[:-1], -1).split(n_rows, -1)))

    step = Step(
        first.name, kernel.name, run_step, first.out, kept_share(layers.weight), kernel.n_bytes, layers.weight.nbytes,
        choice.seconds, choice.dense_seconds, held=kernel.tensors, reads=(first.args[0].value,),
    )  # fmt: skip
    return [step, *(Step(op.name, f"with {first.name}", lambda values: None, op.out, reads=()) for op in others)]


def copies_to_time(n_layers: int, n_cache_bytes: int, n_bytes: int) -> int:
    """How many copies of weights to time in turn: one for each layer, or as many as fill the cache twice.

    Packed weights take fewer bytes than dense ones, so they need more copies before they leave the cache.
    """
    return max(1, min(n_layers, -(-2 * n_cache_bytes // n_bytes)))


def _bias(op: Op, graph: Graph) -> Tensor | None:
    return graph.constants[op.args[2].value] if len(op.args) > 2 and op.args[2] is not None else None


def _why_not(op: Op) -> str:
    """Why torch runs a layer with weights."""
    if op.target is CONV:
        return "convolution: tensor cores multiply faster than zeros are skipped"
    return f"fewer than {LEAST_WEIGHTS:,} weights, or not its own" if op.target is LINEAR else ""
