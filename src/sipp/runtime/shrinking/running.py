"""Runs two versions of a traced network side by side, one operation at a time over all batches.

An operation finishes on every batch before the next one starts, so a layer can be changed just before it runs, and
whatever follows sees the change: one pass for the whole network, however many layers change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from sipp.errors import DataError
from sipp.inputs import Batch
from sipp.native import pytree
from sipp.runtime.graph import program_of, shape_of
from sipp.runtime.shrinking.rules import named_arguments, operation_name

MOST_SHAPES = 8  # of batches, each of which is traced by itself
PRODUCTS = ("linear", "conv1d", "conv2d", "conv3d")
NORM_LEAVES = ("weight", "bias", "running_mean", "running_var")
IDENTITIES = ("dropout", "clone", "alias", "detach", "contiguous")  # in eval mode


@dataclass(frozen=True)
class Traced:
    """A network traced for each shape of batch. Node number i is the same operation in each program."""

    programs: list[torch.export.ExportedProgram]  # of each batch; the first is the one that is looked at
    nodes: list[list[Node]]  # of each batch
    leaves: list[list[Any]]  # the inputs of each batch, in the order of the placeholders


@dataclass(frozen=True)
class Use:
    """The one use of a weight, with what lies between its output and the stream of the network."""

    node: Node  # the product
    weight: str
    bias: str | None
    norm: Node | None  # a BatchNorm that alone reads the product
    norm_names: tuple[str | None, ...]  # of its weight, bias, mean and variance
    stream: Node | None  # what the result is added to

    @property
    def inputs(self) -> Node:
        inputs: Node = named_arguments(self.node)["input"]
        return inputs


def trace_batches(model: nn.Module, batches: Sequence[Batch]) -> Traced:
    """The programs for these batches; DataError if they have too many shapes."""
    known: dict[Any, torch.export.ExportedProgram] = {}
    programs, nodes, leaves = [], [], []
    for batch in batches:
        flat, spec = pytree.tree_flatten((batch.args, batch.kwargs))
        key = repr(spec), *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in flat)
        if key not in known:
            if len(known) == MOST_SHAPES:
                raise DataError(
                    f"the batches have more than {MOST_SHAPES} shapes, and each must be traced by itself",
                    where=batch.where,
                    fix="give batches of one shape, with texts cut or padded to one length",
                )
            known[key] = program_of(model, batch.args, batch.kwargs, is_plain=False)
        programs.append(known[key])
        nodes.append(list(known[key].graph.nodes))
        leaves.append(flat)
    first = [(node.op, str(node.target)) for node in nodes[0] if node.op == "call_function"]
    for batch, other in zip(batches, nodes):
        if [(node.op, str(node.target)) for node in other if node.op == "call_function"] != first:
            raise DataError("the network takes other steps for this batch than for the first", where=batch.where)
    return Traced(programs, nodes, leaves)


Tensors = dict[str, Tensor]  # parameters and buffers by name
Visit = Callable[[Node, "Values"], None]


class Values:
    """The values of both networks, `dense` and `small`, while they are needed."""

    def __init__(self, traced: Traced, dense: Mapping[str, Tensor], small: Tensors) -> None:
        self.traced, self.small_tensors = traced, small
        self._tensors = (dense, small)
        self._place = {node: i for i, node in enumerate(traced.nodes[0])}
        self._index = [{node: i for i, node in enumerate(nodes)} for nodes in traced.nodes]
        self._names = {
            spec.arg.name: spec.target for spec in traced.programs[0].graph_signature.input_specs if spec.target
        }
        inputs = [node for node in traced.nodes[0] if node.op == "placeholder" and node.name not in self._names]
        self._inputs = {node: i for i, node in enumerate(inputs)}
        self._held: tuple[dict[int, list[Any]], dict[int, list[Any]]] = ({}, {})

    @property
    def n_batches(self) -> int:
        return len(self.traced.nodes)

    def is_changed(self, node: Node) -> bool:
        """Whether the small network has a value of its own there."""
        name = self._names.get(node.name) if node.op == "placeholder" else None
        if name is not None:
            return name in self.small_tensors and self.small_tensors[name] is not self._tensors[0][name]
        return self._place[node] in self._held[1]

    def of(self, node: Node, batch: int, *, is_small: bool) -> Any:
        """The value of a node (of the first program) for a batch."""
        return self._at(self._place[node], batch, is_small)

    def _at(self, place: int, batch: int, is_small: bool) -> Any:
        node = self.traced.nodes[0][place]
        if node.op == "placeholder":
            if node in self._inputs:
                return self.traced.leaves[batch][self._inputs[node]]
            name = self._names[node.name]
            program = self.traced.programs[batch]
            own = self._tensors[is_small].get(name)
            return own if own is not None else {**program.state_dict, **program.constants}[name]
        held = self._held[is_small]
        return held[place][batch] if place in held else self._held[0][place][batch]

    def computed(self, node: Node, batch: int, *, is_small: bool, given: Mapping[Node, Any] | None = None) -> Any:
        """Runs one operation on a batch; `given` are values to use for some of its operands."""
        place = self._place[node]
        own = self.traced.nodes[batch][place]
        index, known = self._index[batch], {self._place[n]: value for n, value in (given or {}).items()}
        if own.op == "get_attr":
            return getattr(self.traced.programs[batch].graph_module, str(own.target))

        def value(operand: Node) -> Any:
            at = index[operand]
            return known[at] if at in known else self._at(at, batch, is_small)

        target: Any = own.target
        return target(*torch.fx.node.map_arg(own.args, value), **torch.fx.node.map_arg(own.kwargs, value))

    def run(self, node: Node) -> None:
        """Runs an operation in both networks, or once if it reads nothing that differs."""
        place, batches = self._place[node], range(self.n_batches)
        self._held[0][place] = [self.computed(node, batch, is_small=False) for batch in batches]
        if any(self.is_changed(read) for read in node.all_input_nodes):
            self._held[1][place] = [self.computed(node, batch, is_small=True) for batch in batches]

    def forget(self, node: Node) -> None:
        for held in self._held:
            held.pop(self._place[node], None)


def run_both(
    traced: Traced,
    dense: Mapping[str, Tensor],
    small: Tensors,
    uses: Sequence[Use],
    visit: Callable[[Use, Values], None],
) -> None:
    """Runs both networks up to the last of `uses`, and calls `visit` before each, which may change `small`."""
    by_node = {use.node: use for use in uses}
    order = _order(traced.nodes[0], uses)
    left = Counter(read for node in order for read in set(node.all_input_nodes))
    left.update(use.stream for use in uses if use.stream is not None)
    values = Values(traced, dense, small)
    for node in order:
        use = by_node.get(node)
        if use is not None:
            visit(use, values)
        values.run(node)
        for read in {*node.all_input_nodes, *([use.stream] if use is not None and use.stream is not None else [])}:
            left[read] -= 1 + (use is not None and read is use.stream and read in node.all_input_nodes)
            if left[read] == 0 and read.op != "placeholder":
                values.forget(read)
        if not left[node]:
            values.forget(node)


def _order(nodes: Sequence[Node], uses: Sequence[Use]) -> list[Node]:
    """The operations that the uses need, each after what it reads, and a product after the stream it is added to."""
    streams = {use.node: use.stream for use in uses if use.stream is not None}
    order: dict[Node, None] = {}

    def add(target: Node) -> None:
        stack = [target]
        while stack:
            node = stack[-1]
            missing = [read for read in _needed(node, streams) if read not in order and read.op != "placeholder"]
            if missing:
                stack += missing
            else:
                order.setdefault(stack.pop())

    for node in nodes:
        if any(use.node is node for use in uses):
            add(node)
    return list(order)


def _needed(node: Node, streams: Mapping[Node, Node | None]) -> Iterator[Node]:
    yield from node.all_input_nodes
    if (stream := streams.get(node)) is not None:
        yield stream


def uses_in(traced: Traced, weights: Mapping[str, str | None], names: Mapping[Node, str]) -> list[Use]:
    """The uses of these weights (with their biases), each of which is used once, in the order of the program."""
    found: list[Use] = []
    taken: set[Node] = set()
    for node in traced.nodes[0]:
        if node.op != "call_function" or operation_name(node) not in PRODUCTS:
            continue
        weight = names.get(named_arguments(node)["weight"])
        if weight is None or weight not in weights:
            continue
        norm = _norm_behind(node, names)
        end = _end(node if norm is None else norm)
        stream, total = None, next(iter(end.users)) if len(end.users) == 1 else None
        if total is not None and operation_name(total) in ("add", "add_") and total not in taken:
            other = next((read for read in total.all_input_nodes if read is not end), None)
            # of two products that meet in a sum, the first is fitted to what the other leaves
            if other is not None and shape_of(other) == shape_of(end) and not _reaches(node, other):
                stream = other
                taken.add(total)
        held = () if norm is None else tuple(named_arguments(norm)[name] for name in NORM_LEAVES)
        leaves = tuple(None if leaf is None else names[leaf] for leaf in held)
        found.append(Use(node, weight, weights[weight], norm, leaves, stream))
    return found


def _norm_behind(node: Node, names: Mapping[Node, str]) -> Node | None:
    """The BatchNorm that alone reads a product, with statistics and parameters that nothing else reads."""
    norm = next(iter(node.users)) if len(node.users) == 1 else None
    if norm is None or operation_name(norm) != "batch_norm":
        return None
    arguments = named_arguments(norm)
    leaves = [arguments[name] for name in NORM_LEAVES]
    known = [leaf for leaf in leaves if leaf is not None]
    is_plain = not arguments["training"] and leaves[2] is not None and leaves[3] is not None
    return norm if is_plain and all(leaf in names and len(leaf.users) == 1 for leaf in known) else None


def _end(node: Node) -> Node:
    """The last value that is the same as this one, behind dropout and copies."""
    while len(node.users) == 1 and operation_name(reader := next(iter(node.users))) in IDENTITIES:
        node = reader
    return node


def _reaches(node: Node, other: Node) -> bool:
    """Whether the other value is computed from this node."""
    seen, stack = set[Node](), [other]
    while stack:
        at = stack.pop()
        if at is node:
            return True
        new = [read for read in at.all_input_nodes if read not in seen]
        seen.update(new)
        stack += new
    return False
