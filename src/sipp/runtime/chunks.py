"""Decides whether a batch can run in chunks, so that each step finds its input in the cache.

It can if every operation treats each point (the first dimension of every value) separately. Operations not known to do
so count as mixing points.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sipp.native import vector
from sipp.runtime.graph import ATEN, CONV, LINEAR, Graph, Op, Ref
from sipp.runtime.pools import POOLS

SMALLEST = 16  # points in a chunk: whole vectors
NEAR_CACHE = 1_300_000  # bytes of the largest value, per thread

_ELEMENTWISE = {
    ATEN.relu.default, ATEN.gelu.default, ATEN.silu.default, ATEN.sigmoid.default, ATEN.tanh.default,
    ATEN.hardtanh.default, ATEN.hardswish.default, ATEN.leaky_relu.default, ATEN.elu.default, ATEN.dropout.default,
}  # fmt: skip
_BINARY = {ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor}


def chunk_size(graph: Graph, inputs: list[Any]) -> int | None:
    """How many points to run at a time; None: all at once, for few points, small values or operations that mix them."""
    if not inputs or not all(isinstance(x, Tensor) and x.ndim and len(x) == len(inputs[0]) for x in inputs):
        return None
    n = len(inputs[0])
    largest = max((prod(graph.shapes[op.out]) for op in graph.ops), default=0) * vector.FLOAT_BYTES
    most = NEAR_CACHE * torch.get_num_threads()
    if n < 2 * SMALLEST or n % SMALLEST or largest <= most or not _is_pointwise(graph, n):
        return None
    sizes = [size for size in range(SMALLEST, n, SMALLEST) if n % size == 0 and size * largest <= most * n]
    return max(sizes, default=SMALLEST)


def same_but_for_batch_size(graph: Graph, part: Graph, n: int, n_part: int) -> bool:
    """Whether the graphs for n and n_part points differ only in that number, the first size of every shape.

    Compares all arguments and constants too, because a forward pass may compute them from n.
    """
    if [_signature(op, n) for op in graph.ops] != [_signature(op, n_part) for op in part.ops]:
        return False
    if graph.inputs != part.inputs or graph.outputs != part.outputs or graph.constants.keys() != part.constants.keys():
        return False
    pairs = [(graph.shapes[a.out], part.shapes[b.out]) for a, b in zip(graph.ops, part.ops)]
    has_points = all(whole[0] == n and fewer == (n_part, *whole[1:]) for whole, fewer in pairs if whole or fewer)
    return has_points and all(_is_same(value, part.constants[number]) for number, value in graph.constants.items())


def _signature(op: Op, n: int) -> str:
    """An operation with all its arguments as text, without the number of points in the shape of a view."""
    args = op.args
    if op.target is ATEN.view.default and args[1][0] == n:
        args = (args[0], ["points", *args[1][1:]])
    return repr((op.target, args, op.kwargs, op.out, op.addend, op.act, op.shrunk))


def _is_same(value: Tensor, other: Tensor) -> bool:
    is_one = value.data_ptr() == other.data_ptr() and value.stride() == other.stride()
    return value.shape == other.shape and value.dtype == other.dtype and (is_one or torch.equal(value, other))


def _is_pointwise(graph: Graph, n: int) -> bool:
    points = set(graph.inputs)  # values whose first dimension is the batch
    for op in graph.ops:
        if not _is_per_point(op, points, graph, n):
            return False
        points.add(op.out)
    return all(isinstance(ref, Ref) and ref.value in points for ref in graph.outputs)


def _is_per_point(op: Op, points: set[int], graph: Graph, n: int) -> bool:
    args, target, constants, n_dims = op.args, op.target, graph.constants, len(graph.shapes[op.out])
    values = [number for number in op.reads() if number not in constants]
    if not values or not all(number in points for number in values) or n_dims < 2:
        return False
    if target in (CONV, LINEAR) and len(values) != 1 + (op.addend is not None):
        return False  # its weight depends on the input
    if target is CONV and n_dims != 4:
        return False  # a single image without a batch dimension
    if target in (CONV, LINEAR) or target in POOLS or target in _ELEMENTWISE:
        return isinstance(args[0], Ref)
    if target in _BINARY:
        fixed = [constants[a.value] for a in args if isinstance(a, Ref) and a.value in constants]
        return all(t.ndim < n_dims for t in fixed)
    if target is ATEN.cat.default:
        return len(args) > 1 and args[1] % n_dims != 0 and len(values) == len(args[0])
    if target is ATEN.pad.default:
        return len(args[1]) // 2 < n_dims
    if target is ATEN.slice.Tensor:
        return len(args) > 1 and args[1] > 0
    if target is ATEN.view.default:
        return bool(args[1][0] == n)
    if target is ATEN.flatten.using_ints:
        return len(args) > 1 and args[1] > 0
    return False
