"""The channels of a traced network: which belong together, which are constant, which layers read them.

Every channel of every value has an id. Ids that are the same channel at two places (of a sum's operands, of a weight's
rows and what a norm holds of them) are tied: all of them are removed, or none. The id ALWAYS is that of everything that
has to stay: inputs, outputs, and whatever an operation without a rule reads (rules.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from sipp.records.numerics import integers
from sipp.runtime.graph import shape_of

ALWAYS = 0


@dataclass(frozen=True)
class Axis:
    """The dimension of a value that holds channels, their ids, and what each is where it is always the same number."""

    dim: int
    ids: Tensor  # C, int64
    constant: Tensor  # C, float64; NaN: not known to be constant


@dataclass(frozen=True)
class Product:
    """One use of a weight: `n_out` outputs, each a sum over the channels of its input."""

    weight: str
    bias: str | None
    ids: Tensor  # of the channels that it reads
    constant: Tensor  # of them
    out_ids: Tensor
    groups: int
    is_transposed: bool  # its weight is I x O/groups
    pads: bool  # zeros stand around its input: the sum over a constant channel is no constant


@dataclass
class Channels:
    """What is known of a network so far."""

    leaves: dict[Node, str]  # parameters and buffers, by name: the first of those that a shared one has
    n_reads: Counter[str]  # of them
    tensors: dict[str, Tensor]  # on the CPU
    regroups: frozenset[str]  # weights of convolution modules, whose number of groups can be set
    values: dict[Node, Axis | None] = field(default_factory=dict)  # None: no channel of it can go
    several: dict[Node, bool] = field(default_factory=dict)  # results of a node: whether all are like the first
    ties: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sides: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # ids along a dimension of a leaf
    fixed: set[str] = field(default_factory=set)  # leaves that are read otherwise too: all of their sides stay
    products: list[Product] = field(default_factory=list)
    left_alone: dict[str, None] = field(default_factory=dict)  # in order
    n_ids: int = 1

    def side(self, name: str, dim: int) -> Tensor:
        """The ids along a dimension of a parameter or buffer."""
        if (name, dim) not in self.sides:
            size = self.tensors[name].shape[dim]
            self.sides[name, dim] = integers(self.n_ids, self.n_ids + size)
            self.n_ids += size
        return self.sides[name, dim]

    def tie(self, ids: Tensor, others: Tensor) -> None:
        self.ties.append((ids, others))

    def keep(self, axis: Axis | None) -> None:
        """Lets all channels of a value stay."""
        if axis is not None:
            self.tie(axis.ids, torch.zeros_like(axis.ids))

    def keep_all(self, node: Node) -> None:
        """Lets everything stay that an operation reads, and names it if there was something to remove."""
        for read in node.all_input_nodes:
            if read in self.leaves:
                self.fixed.add(self.leaves[read])
            self.keep(self.values[read])
            if self.values[read] is not None or (read in self.leaves and len(shape_of(read)) > 1):
                self.left_alone[_place(node)] = None


Rule = Callable[[Channels, Node], Axis | None]


def channels_of(
    program: torch.export.ExportedProgram,
    tensors: dict[str, Tensor],
    regroups: frozenset[str],
    rule_of: Callable[[Node], Rule | None],
) -> Channels:
    """The channels of a traced network whose parameters and buffers are `tensors`."""
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
            if rule is None:
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
    """So many channels of which none is known to be constant."""
    return torch.full((n,), math.nan, dtype=torch.float64, device="cpu")


def _place(node: Node) -> str:
    """The operation of a node and the module that it is called in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inside = stack[-1][0] if stack else ""
    operation = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return f"{inside} ({operation})" if inside else operation
