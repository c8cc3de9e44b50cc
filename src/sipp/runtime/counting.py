"""Counts the multiply-adds of each layer in a traced forward pass, also of a network with fewer channels.

Linear, convolutional and recurrent layers, matrix products and attention count. Elementwise work (norms, activations,
sums, pooling) does not, as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import nn
from torch.fx import Node

from sipp.results import ShrunkLayer, numerics
from sipp.runtime.graph import operation_name, shape_of

Shape = tuple[int, ...]

_PRODUCTS = {"linear", *(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3))}
_MATRICES = {"mm": 0, "bmm": 0, "matmul": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1}  # index of the first matrix
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def multiply_adds(program: torch.export.ExportedProgram, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The multiply-adds of one call with the example, by name of the weight (or of the operation, if it has none).

    `shapes` are the shapes of the weights, which may be smaller than when the program was traced.
    """
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        kind = operation_name(node)
        if kind in _PRODUCTS:
            weight = node.args[1]
            name = names.get(weight.name)
            shape = shapes.get(name, shape_of(weight)) if name else shape_of(weight)
            counts[name or node.name] = counts.get(name or node.name, 0) + _positions(node, kind) * prod(shape)
        elif kind in _MATRICES:
            counts[node.name] = prod(shape_of(node)) * shape_of(node.args[_MATRICES[kind]])[-1]
        elif kind == "scaled_dot_product_attention":
            query, key, value = (shape_of(operand) for operand in node.args[:3])
            counts[node.name] = prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        elif kind in _RECURRENT:
            weights = [read for read in node.all_input_nodes if read.name in names and len(shape_of(read)) == 2]
            counts[node.name] = prod(shape_of(node.args[0])[:-1]) * sum(prod(shape_of(weight)) for weight in weights)
    return counts


def _positions(node: Node, kind: str) -> int:
    """How many times a call uses each weight."""
    weight, x = node.args[1], node.args[0]
    if "transpose" in kind:
        return prod(shape_of(x)) // shape_of(weight)[0]
    return prod(shape_of(node)) // max(1, shape_of(weight)[0])


def count_both(
    program: torch.export.ExportedProgram, whole: nn.Module, small: nn.Module
) -> tuple[tuple[ShrunkLayer, ...], int, int]:
    """Each weight in a network and in a smaller one, and the multiply-adds of both; `program` is that of the first."""
    shapes, smaller = (
        {name: tuple(tensor.shape) for name, tensor in numerics.parameters_and_buffers(net).items()}
        for net in (whole, small)
    )
    before, after = (multiply_adds(program, each) for each in (shapes, smaller))
    layers = (
        ShrunkLayer(name, shapes[name], smaller[name], count, after[name])
        for name, count in before.items()
        if name in shapes  # others are products without a weight
    )
    return tuple(layers), sum(before.values()), sum(after.values())
