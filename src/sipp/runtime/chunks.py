"""Decides whether a batch can run in chunks, so that each step finds its input in the cache.

It can if every operation is one that treats each point by itself, and the graph for fewer points is the same: the
number of points is the first size of every value, and no other number or constant was computed from it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sipp.native import vector
from sipp.runtime.graph import ATEN, CONV, LINEAR, Graph, Op, Slot
from sipp.runtime.images import CAT, MAX, MEANS, PAD

SMALLEST = 16  # points in a chunk: whole vectors
NEAR_CACHE = 1_300_000  # bytes of the largest value, per thread
_POINT_BY_POINT = {
    CONV, LINEAR, MAX, *MEANS, CAT, PAD, ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.relu.default,
    ATEN.gelu.default, ATEN.silu.default, ATEN.sigmoid.default, ATEN.tanh.default, ATEN.hardtanh.default,
    ATEN.hardswish.default, ATEN.leaky_relu.default, ATEN.elu.default, ATEN.dropout.default, ATEN.slice.Tensor,
    ATEN.view.default, ATEN.flatten.using_ints,
}  # fmt: skip


def chunk_size(graph: Graph, inputs: list[Any]) -> int | None:
    """How many points to try at a time; None: all at once, for few points, small values or operations that mix them."""
    if not inputs or not all(isinstance(x, Tensor) and x.ndim and len(x) == len(inputs[0]) for x in inputs):
        return None
    n, outs = len(inputs[0]), [op.out for op in graph.ops]
    is_known = all(op.target in _POINT_BY_POINT for op in graph.ops)
    are_computed = all(isinstance(ref, Slot) and ref.value in outs for ref in graph.outputs)
    largest = max((prod(graph.shapes[out]) for out in outs), default=0) * vector.FLOAT_BYTES
    most = NEAR_CACHE * torch.get_num_threads()
    if n < 2 * SMALLEST or n % SMALLEST or largest <= most or not is_known or not are_computed:
        return None
    sizes = [size for size in range(SMALLEST, n, SMALLEST) if n % size == 0 and size * largest <= most * n]
    return max(sizes, default=SMALLEST)


def same_but_for_batch_size(graph: Graph, part: Graph, n: int, n_part: int) -> bool:
    """Whether the graphs for n and n_part points differ only in that number, the first size of every value."""
    if [_signature(op, n) for op in graph.ops] != [_signature(op, n_part) for op in part.ops]:
        return False
    if graph.inputs != part.inputs or graph.outputs != part.outputs or graph.constants.keys() != part.constants.keys():
        return False
    pairs = [(graph.shapes[a.out], part.shapes[b.out]) for a, b in zip(graph.ops, part.ops)]
    has_points = all(whole[:1] == (n,) and fewer == (n_part, *whole[1:]) for whole, fewer in pairs)
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
