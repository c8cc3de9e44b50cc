"""Tracks the channels of a traced network: which are tied together, which are constant, and who reads them.

Every channel of every value has an id. If two ids are the same channel in two places (operands of a sum; rows of a
weight and the parameters of the norm after it) they are tied: both are removed, or neither. The id ALWAYS marks
everything that must stay: inputs, outputs, and whatever an operation without a rule reads (rules.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd

from sipp.results import numerics
from sipp.runtime.graph import shape_of

ALWAYS = 0


@dataclass(frozen=True)
class Axis:
    """The channel dimension of a value, the ids of its channels, and their values if constant."""

    dim: int
    ids: Tensor  # C, int64
    constant: Tensor  # C, float64; NaN: not constant


@dataclass(frozen=True)
class Product:
    """One use of a weight, whose outputs are sums over the channels of its input."""

    weight: str
    bias: str | None
    ids: Tensor  # of its input channels
    constant: Tensor  # their values, NaN if not constant
    out_ids: Tensor
    groups: int
    is_transposed: bool  # its weight is I x O/groups
    pads: bool  # zero padding: the output is not constant even if a channel is


@dataclass
class Channels:
    """What is known about the channels of a network so far."""

    leaves: dict[Node, str]  # name of each parameter and buffer (the first, if it is shared)
    n_reads: Counter[str]  # how often each is read
    tensors: dict[str, Tensor]  # on the CPU
    regroups: frozenset[str]  # weights of convolution modules, whose `groups` can be changed
    values: dict[Node, Axis | None] = field(default_factory=dict)  # None: all its channels stay
    ties: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sides: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # ids along a dimension of a parameter or buffer
    fixed: set[str] = field(default_factory=set)  # those that are read in other ways too, so that they stay whole
    products: list[Product] = field(default_factory=list)
    left_alone: dict[str, None] = field(default_factory=dict)  # in order
    n_ids: int = 1

    def side(self, name: str, dim: int) -> Tensor:
        """The ids along a dimension of a parameter or buffer."""
        if (name, dim) not in self.sides:
            size = self.tensors[name].shape[dim]
            self.sides[name, dim] = numerics.integers(self.n_ids, self.n_ids + size)
            self.n_ids += size
        return self.sides[name, dim]

    def tie(self, ids: Tensor, others: Tensor) -> None:
        self.ties.append((ids, others))

    def keep(self, axis: Axis | None) -> None:
        """Marks all channels of a value to stay."""
        if axis is not None:
            self.tie(axis.ids, torch.zeros_like(axis.ids))

    def keep_all(self, node: Node) -> None:
        """Marks everything an operation reads to stay, and records the operation if that prevents a removal."""
        for read in node.all_input_nodes:
            if read in self.leaves:
                self.fixed.add(self.leaves[read])
            self.keep(self.values[read])
            if self.values[read] is not None or (read in self.leaves and len(shape_of(read)) > 1):
                self.left_alone[_describe_node(node)] = None


Rule = Callable[[Channels, Node], Axis | None]  # None: all that the operation reads stays


def channels_in(
    model: nn.Module, program: torch.export.ExportedProgram, rule_of: Callable[[Node], Rule | None]
) -> Channels:
    """The channels of a network and its traced program."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    cpu = {id(tensor): tensor.detach().cpu() for _, tensor in named}  # shared ones stay shared
    tensors = {name: cpu[id(tensor)] for name, tensor in named}
    convolutions = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, _ConvNd)}
    regroups = frozenset(name for name in tensors if name.removesuffix(".weight") in convolutions)
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    channels = Channels({}, Counter(), tensors, regroups)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = kinds[node.name].target
            if kinds[node.name].kind.name in ("PARAMETER", "BUFFER") and name in tensors:
                channels.leaves[node] = first[id(tensors[name])]
                channels.n_reads[channels.leaves[node]] += len(node.users)
            channels.values[node] = None
        elif node.op == "output":
            for read in node.all_input_nodes:
                channels.keep(channels.values[read])
                channels.fixed |= {channels.leaves[read]} if read in channels.leaves else set()
        else:
            rule = rule_of(node)
            channels.values[node] = None if rule is None else rule(channels, node)
            if channels.values[node] is None and node.users:  # without users it is an assertion
                channels.keep_all(node)
    for name in channels.fixed:
        for dim in range(tensors[name].ndim):
            if (name, dim) in channels.sides:
                channels.tie(channels.sides[name, dim], torch.zeros_like(channels.sides[name, dim]))
    for product in channels.products:
        if product.groups > 1 and product.weight in channels.fixed:
            channels.tie(product.ids, torch.zeros_like(product.ids))
    return channels


def not_constant(n: int) -> Tensor:
    """The constants of n channels of which none is constant: NaN."""
    return torch.full((n,), math.nan, dtype=torch.float64, device="cpu")


def _describe_node(node: Node) -> str:
    """The operation of a node, and the module that calls it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inside = stack[-1][0] if stack else ""
    operation = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return f"{inside} ({operation})" if inside else operation
