"""Runs a traced network one operation at a time: to look at each value, or two versions of it side by side.

An operation finishes on every batch before the next one starts, so a layer can be changed just before it runs, and
whatever follows sees the change: one pass for the whole network, however many layers change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from sipp.native import pytree
from sipp.results import numerics
from sipp.runtime.examples import Call
from sipp.runtime.graph import program_of

LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
Tensors = dict[str, Tensor]  # parameters and buffers by name


@dataclass(frozen=True)
class Traced:
    """A network traced for batches of one form."""

    program: torch.export.ExportedProgram
    leaves: dict[Node, str]  # its parameters and buffers, by the first of their names
    inputs: list[list[Any]]  # of each batch, in the order of the placeholders

    @staticmethod
    def of(model: nn.Module, calls: Sequence[Call]) -> Traced:
        """The network traced for these calls, which are of one form."""
        program = program_of(model, *calls[0], is_plain=False)
        return Traced(
            program, leaves_of(program, numerics.parameters_and_buffers(model)), [pytree.tree_leaves(c) for c in calls]
        )

    @property
    def nodes(self) -> list[Node]:
        return list(self.program.graph.nodes)

    @property
    def names(self) -> dict[str, str]:
        """What each placeholder stands for that is no input."""
        return {spec.arg.name: spec.target for spec in self.program.graph_signature.input_specs if spec.target}

    @property
    def input_nodes(self) -> list[Node]:
        names = self.names
        return [node for node in self.nodes if node.op == "placeholder" and node.name not in names]


class BothRuns:
    """The values of both networks, `dense` and `small`, while they are needed."""

    def __init__(self, traced: Traced, dense: Mapping[str, Tensor], small: Tensors) -> None:
        self.small_tensors, self.n_batches = small, len(traced.inputs)
        self._tensors = (dense, small)
        program = traced.program
        self._module = program.graph_module
        self._others = {**program.state_dict, **program.constants}
        self._names = traced.names
        self._inputs = {node: [leaves[i] for leaves in traced.inputs] for i, node in enumerate(traced.input_nodes)}
        self._held: tuple[dict[Node, list[Any]], dict[Node, list[Any]]] = ({}, {})

    def is_changed(self, node: Node) -> bool:
        """Whether the small network has a value of its own there."""
        name = self._names.get(node.name) if node.op == "placeholder" else None
        if name is not None:
            return name in self.small_tensors and self.small_tensors[name] is not self._tensors[0][name]
        return node in self._held[1]

    def of(self, node: Node, batch: int, *, is_small: bool) -> Any:
        """The value of a node for a batch."""
        if node in self._inputs:
            return self._inputs[node][batch]
        if node.op == "placeholder":
            name = self._names[node.name]
            own = self._tensors[is_small].get(name)
            return own if own is not None else self._others[name]
        held = self._held[is_small]
        return held[node][batch] if node in held else self._held[0][node][batch]

    def computed(self, node: Node, batch: int, *, is_small: bool, given: Mapping[Node, Any] | None = None) -> Any:
        """Runs one operation on a batch; `given` are values to use for some of its operands."""
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        known = given or {}

        def value(read: Node) -> Any:
            return known[read] if read in known else self.of(read, batch, is_small=is_small)

        target: Any = node.target
        return target(*torch.fx.node.map_arg(node.args, value), **torch.fx.node.map_arg(node.kwargs, value))

    def run(self, node: Node) -> None:
        """Runs an operation in both networks, or once if it reads nothing that differs."""
        batches = range(self.n_batches)
        self._held[0][node] = [self.computed(node, batch, is_small=False) for batch in batches]
        if any(self.is_changed(read) for read in node.all_input_nodes):
            self._held[1][node] = [self.computed(node, batch, is_small=True) for batch in batches]

    def run_all(
        self,
        nodes: Sequence[Node],
        needs: Mapping[Node, Sequence[Node]] | None = None,
        before: Callable[[Node], None] = lambda node: None,
        after: Callable[[Node], None] = lambda node: None,
    ) -> None:
        """Runs these operations, each of which `needs` values that are forgotten after their last use."""
        needs = needs or {node: node.all_input_nodes for node in nodes}
        left = Counter(read for node in nodes for read in set(needs[node]))
        for node in nodes:
            before(node)
            if node.op not in ("placeholder", "output"):
                self.run(node)
            after(node)
            left.subtract(set(needs[node]))
            for read in (*needs[node], node):
                if left[read] == 0:
                    for held in self._held:
                        held.pop(read, None)


def run_both(
    traced: Traced,
    dense: Mapping[str, Tensor],
    small: Tensors,
    streams: Mapping[Node, Node | None],
    visit: Callable[[Node, BothRuns], None],
) -> None:
    """Runs both networks up to the last of some products, and calls `visit` before each, which may change `small`.

    A product runs after the stream that it is added to, if it has one.
    """
    needs = {node: [*node.all_input_nodes] for node in traced.nodes}
    for product, stream in streams.items():
        needs[product] += [] if stream is None else [stream]
    order: dict[Node, None] = {}
    for last in streams:
        stack = [last]
        while stack:
            missing = [read for read in needs[stack[-1]] if read not in order and read.op != "placeholder"]
            stack += missing
            if not missing:
                order.setdefault(stack.pop())
    values = BothRuns(traced, dense, small)
    values.run_all(list(order), needs, before=lambda node: visit(node, values) if node in streams else None)


def leaves_of(program: torch.export.ExportedProgram, tensors: dict[str, Tensor]) -> dict[Node, str]:
    """The parameters and buffers of a program by the first of their names."""
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    return {
        node: first[id(tensors[kinds[node.name].target])]
        for node in program.graph.nodes
        if node.op == "placeholder" and kinds[node.name].target in tensors
    }
