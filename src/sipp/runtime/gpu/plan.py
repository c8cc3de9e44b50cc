"""Compiles a traced graph for a GPU: chooses a kernel for each linear layer and LSTM, leaves the rest to torch.

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

from sipp.native import pytree
from sipp.runtime.gpu.linear import (
    AGREEMENT,
    MOST_TOKENS,
    KernelChoice,
    dense_kernel,
    fastest_kernel,
    kernel_error,
    time_kernel,
    timing_group,
    why_wrong,
)
from sipp.runtime.gpu.recurrent import RECURRENT, recurrent_reads, recurrent_step
from sipp.runtime.graph import CONV, LINEAR, Graph, Op, Ref
from sipp.runtime.plan import fold_constants
from sipp.runtime.steps import Step, Values, kept_share, torch_step

LEAST_WEIGHTS = 1 << 16  # smaller layers take no longer than their launch
KEEP_BINS = 50  # similar layers whose kept share agrees to 1/50 are timed only once


@dataclass(frozen=True)
class GpuPlan:
    """The steps of a network for inputs of certain shapes."""

    graph: Graph
    steps: list[Step]
    constants: Values

    def run(self, inputs: list[Any]) -> Any:
        """Runs the steps; results may share memory with constants."""
        values = self.constants | dict(zip(self.graph.inputs, inputs))
        with torch.autocast("cuda", enabled=False):
            for step in self.steps:
                step.run(values)
        outputs = [values[ref.value] if isinstance(ref, Ref) else ref for ref in self.graph.outputs]
        return pytree.tree_unflatten(outputs, self.graph.out_spec)


def make_plan(graph: Graph, inputs: list[Any]) -> GpuPlan:
    """The plan for inputs like these: runs every operation in order, and times the kernels of linear layers."""
    graph = fold_constants(graph)
    values: Values = {**graph.constants, **dict(zip(graph.inputs, inputs))}
    known: dict[Hashable, KernelChoice] = {}
    n_bytes = sum(tensor.nbytes for tensor in graph.constants.values())
    steps: dict[int, Step] = {}
    for op in graph.ops:
        if op.out not in steps:
            group = _readers_of_same(op, graph, values) if _can_be_sparse(op, graph, values) else [op]
            steps.update(_steps_of(group, graph, values, n_bytes, known))
        steps[op.out].run(values)
    ordered = [steps[op.out] for op in graph.ops]
    used = {n for op, step in zip(graph.ops, ordered) for n in _still_read(op, step)}
    used |= {ref.value for ref in graph.outputs if isinstance(ref, Ref)}
    constants = {n: value for n, value in graph.constants.items() if n in used}
    return GpuPlan(replace(graph, constants={}), ordered, constants)


def _still_read(op: Op, step: Step) -> list[int]:
    """The values a step reads in later calls: not the weights that it has packed."""
    if step.kernel in ("torch", "dense"):
        return op.reads()
    return recurrent_reads(op) if op.target in RECURRENT else [op.args[0].value]


def _can_be_sparse(op: Op, graph: Graph, values: Values) -> bool:
    """Whether it is a large enough linear layer with constant weights, on a nonempty batch."""
    if op.target is not LINEAR or op.kwargs:
        return False
    refs = [ref for ref in op.args[1:3] if ref is not None]
    if not all(isinstance(ref, Ref) and ref.value in graph.constants for ref in refs):
        return False
    weight, x = graph.constants[refs[0].value], values[op.args[0].value]
    return weight.ndim == 2 and weight.numel() >= LEAST_WEIGHTS and x.numel() > 0


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


def _steps_of(
    group: list[Op], graph: Graph, values: Values, n_bytes: int, known: dict[Hashable, KernelChoice]
) -> dict[int, Step]:
    """The steps of operations that are joined, by the number of their result."""
    op = group[0]
    if op.target in RECURRENT and sum(values[n].numel() for n in op.reads()) >= LEAST_WEIGHTS:
        step = recurrent_step(op, values, graph.constants)
        return {op.out: torch_step(op, _why_not(op)) if step is None else step}
    if not _can_be_sparse(op, graph, values):
        return {op.out: torch_step(op, _why_not(op))}
    x = values[op.args[0].value]
    tokens = x.reshape(-1, x.shape[-1])
    weights = [graph.constants[member.args[1].value] for member in group]
    biases = [bias for member in group if (bias := _bias(member, graph)) is not None]
    weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
    sizes, n_dense_bytes = [len(part) for part in weights], weight.nbytes
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size if x.is_cuda else 0
    n_copies = partial(copies_to_time, -(-n_bytes // n_dense_bytes), cache)
    alike = tokens.shape, tokens.stride(), tokens.dtype, weight.shape, weight.dtype, bias is None
    kind = (*sizes, *alike, timing_group(weight, tokens), round(KEEP_BINS * kept_share(weight)))
    if kind not in known:
        each_alone = [partial(time_kernel, dense_kernel(own, None), tokens, n_copies(own.nbytes)) for own in weights]
        known[kind] = fastest_kernel(weight, bias, tokens, n_copies, lambda: sum(alone() for alone in each_alone))
    choice = known[kind]
    kernel = choice.make(weight, bias)
    # the timing may come from a similar layer, but every layer is compared with torch itself
    if not choice.is_dense and not (by := kernel_error(kernel, weight, bias, tokens)) <= AGREEMENT[tokens.dtype]:
        choice = KernelChoice(dense_kernel, True, choice.seconds, choice.dense_seconds, why_wrong(by))
    if choice.is_dense and len(group) > 1:  # alone, one of them may be worth it
        steps: dict[int, Step] = {}
        for member in group:
            steps |= _steps_of([member], graph, values, n_bytes, known)
        return steps
    if choice.is_dense:
        return {
            op.out: replace(
                torch_step(op, choice.why), kernel="dense", keep=kept_share(weight), n_bytes=n_dense_bytes,
                n_dense_bytes=n_dense_bytes, seconds=choice.seconds, dense_seconds=choice.dense_seconds,
            )
        }  # fmt: skip
    outs = [member.out for member in group]

    def run_step(current: Values) -> None:
        source = current[op.args[0].value]
        result = kernel.call(source.reshape(-1, source.shape[-1]), kernel.tensors)
        current.update(zip(outs, result.reshape(*source.shape[:-1], -1).split(sizes, -1)))

    first = Step(
        op.name, kernel.name, run_step, op.out, kept_share(weight), kernel.n_bytes, n_dense_bytes, choice.seconds,
        choice.dense_seconds, held=kernel.tensors,
    )  # fmt: skip
    others = [Step(member.name, f"with {op.name}", lambda values: None, member.out) for member in group[1:]]
    return {step.out: step for step in (first, *others)}


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
    if op.target in RECURRENT:
        return "LSTM: small, many sequences or steps, other options, or dense is as fast"
    return f"fewer than {LEAST_WEIGHTS:,} weights, or not its own" if op.target is LINEAR else ""
