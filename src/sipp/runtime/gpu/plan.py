"""Compiles a traced graph for a GPU: chooses a kernel for each linear layer, leaves the rest to torch.

Linear layers that read the same few tokens (queries, keys and values of an attention) become one sparse product, which
takes a single launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sipp.runtime.gpu.layouts import int8_scales
from sipp.runtime.gpu.linear import (
    LIMITS,
    MOST_TOKENS,
    LinearKernel,
    MakeKernel,
    candidates,
    dense_kernel,
    is_two_of_four,
    kernel_error,
    time_kernel,
)
from sipp.runtime.graph import CONV, LINEAR, Graph, Op
from sipp.runtime.steps import Plan, Step, Values, constant_weights, fold_constants, kept_share, plan_of, torch_step
from sipp.runtime.timing import is_enough_faster

LEAST_WEIGHTS = 1 << 16  # smaller layers take no longer than their launch
KEEP_BINS = 50  # similar layers whose kept share agrees to 1/50 are timed only once
MOST_BYTES = 0.95  # of the dense size: a larger layout cannot be faster


@dataclass(frozen=True)
class Layers:
    """Linear layers that read the same tokens, as one product: their weights below one another."""

    weights: list[Tensor]
    bias: Tensor | None
    weight: Tensor
    tokens: Tensor  # of the example: tokens x columns


@dataclass(frozen=True)
class Choice:
    """The kernel for layers of one kind; None: torch's, and `why`."""

    make: MakeKernel | None
    seconds: float | None = None
    dense_seconds: float | None = None
    why: str = ""


Known = dict[Hashable, Choice]  # by what layers that are timed only once have in common


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
    together = _sparse_or_dense(group, graph, values, known)
    if together or len(group) == 1:
        return together
    # alone, one of them may be worth it
    return [step for member in group for step in _sparse_or_dense([member], graph, values, known)]


def _can_be_sparse(op: Op, graph: Graph, values: Values) -> bool:
    """Whether it is a large enough linear layer with constant weights, on a nonempty batch."""
    if op.target is not LINEAR or (weights := constant_weights(op, graph.constants)) is None:
        return False
    return weights[0].ndim == 2 and weights[0].numel() >= LEAST_WEIGHTS and values[op.args[0].value].numel() > 0


def _why_not(op: Op) -> str:
    """Why torch runs a layer with weights."""
    if op.target is CONV:
        return "convolution: tensor cores multiply faster than zeros are skipped"
    return f"fewer than {LEAST_WEIGHTS:,} weights, or not its own" if op.target is LINEAR else ""


def _readers_of_same(op: Op, graph: Graph, values: Values) -> list[Op]:
    """The linear layers that read the same few tokens and can be joined with this one, which comes first."""
    own, x = constant_weights(op, graph.constants) or [], values[op.args[0].value]
    if x.numel() // own[0].shape[1] > MOST_TOKENS or own[0].dtype != x.dtype or kept_share(own[0]) == 1:
        return [op]

    def is_alike(other: Op) -> bool:
        is_later = other.out > op.out and other.target is LINEAR and other.args[0] == op.args[0]
        if not is_later or not _can_be_sparse(other, graph, values):
            return False
        weights = constant_weights(other, graph.constants) or []
        return len(weights) == len(own) and weights[0].dtype == own[0].dtype and kept_share(weights[0]) < 1

    return [op, *(other for other in graph.ops if is_alike(other))]


def _layers(group: list[Op], graph: Graph, values: Values) -> Layers:
    x = values[group[0].args[0].value]
    weights, *biases = zip(*(constant_weights(op, graph.constants) or [] for op in group))
    bias = torch.cat(biases[0]) if biases else None
    return Layers(list(weights), bias, torch.cat(weights), x.reshape(-1, x.shape[-1]))


def _kind(layers: Layers) -> Hashable:
    """The key of layers that are timed only once: sizes, dtypes, pattern, and about the kept share."""
    weight, x = layers.weight, layers.tokens
    sizes = *(len(part) for part in layers.weights), weight.shape, x.shape, x.stride(), layers.bias is None
    is_known = weight.dtype in LIMITS
    has_pattern = is_known and (int8_scales(weight) is not None if len(x) <= MOST_TOKENS else is_two_of_four(weight))
    return *sizes, weight.dtype, x.dtype, has_pattern, round(KEEP_BINS * kept_share(weight))


def _checked_kernel(layers: Layers, graph: Graph, known: Known) -> tuple[LinearKernel | None, Choice]:
    """The fastest kernel and its choice; no kernel if torch's is as fast, or this one's sums differ from torch's.

    The timing may come from similar layers, but all layers are compared with torch themselves.
    """
    kind = _kind(layers)
    if kind not in known:
        known[kind] = _timed_choice(layers, graph)
    choice = known[kind]
    if choice.make is None:
        return None, choice
    kernel = choice.make(layers.weight, layers.bias)
    by = kernel_error(kernel, layers.weight, layers.bias, layers.tokens)
    if not by <= LIMITS[layers.tokens.dtype]:
        return None, replace(choice, make=None, why=f"the kernel is {by:.0e} off on the example")
    return kernel, choice


def _timed_choice(layers: Layers, graph: Graph) -> Choice:
    """The fastest kernel, timed against torch's layers one by one, on copies of their weights in turn.

    There are as many copies as the network has such layers, or as fill the cache twice, so that weights come from the
    same level of memory.
    """
    weight, x = layers.weight, layers.tokens
    n_layers = -(-sum(constant.nbytes for constant in graph.constants.values()) // weight.nbytes)
    n_cache_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size if x.is_cuda else 0
    makers, why = candidates(weight, x)
    kernels = {make: make(weight, layers.bias) for make in makers}
    kernels = {make: kernel for make, kernel in kernels.items() if kernel.n_bytes <= MOST_BYTES * weight.nbytes}
    if not kernels:
        return Choice(None, why=why or "values and places take no fewer bytes")

    def is_right(kernel: LinearKernel) -> bool:
        return kernel_error(kernel, weight, layers.bias, x) <= LIMITS[x.dtype]

    def seconds(kernel: LinearKernel) -> float:
        return time_kernel(kernel, x, max(1, min(n_layers, -(-2 * n_cache_bytes // kernel.n_bytes))))

    dense_seconds = sum(seconds(dense_kernel(own, None)) for own in layers.weights)
    times = {make: seconds(kernel) for make, kernel in kernels.items() if is_right(kernel)}
    if not times:
        return Choice(None, why="the kernels are off on the example")
    best = min(times, key=times.__getitem__)
    if not is_enough_faster(times[best], dense_seconds):
        return Choice(None, times[best], dense_seconds, "dense is as fast")
    return Choice(best, times[best], dense_seconds)


def _sparse_or_dense(group: list[Op], graph: Graph, values: Values, known: Known) -> list[Step]:
    """The steps of layers that run as one: the first computes the results of all, the others do nothing.

    Without a kernel for them: the step of a single layer as torch runs it, none for several.
    """
    layers = _layers(group, graph, values)
    kernel, choice = _checked_kernel(layers, graph, known)
    n_bytes = layers.weight.nbytes
    if kernel is None:
        dense = replace(
            torch_step(group[0], choice.why), by="dense", keep=kept_share(layers.weight), n_dense_bytes=n_bytes,
            seconds=choice.seconds, dense_seconds=choice.dense_seconds,
        )  # fmt: skip
        return [dense] if len(group) == 1 else []
    first, *others = group
    outs, n_rows = [op.out for op in group], [len(weight) for weight in layers.weights]

    def run_step(values: Values) -> None:
        x = values[first.args[0].value]
        result = kernel.call(x.reshape(-1, x.shape[-1]), kernel.tensors)
        values.update(zip(outs, result.reshape(*x.shape[:-1], -1).split(n_rows, -1)))

    step = Step(
        first.name, "ours", run_step, first.out, kernel.name, keep=kept_share(layers.weight), n_dense_bytes=n_bytes,
        seconds=choice.seconds, dense_seconds=choice.dense_seconds, held=kernel.tensors,
        reads=(first.args[0].value,),
    )  # fmt: skip
    joined = f"with {first.name}"
    return [step, *(Step(op.name, "ours", lambda values: None, op.out, joined, reads=()) for op in others)]
