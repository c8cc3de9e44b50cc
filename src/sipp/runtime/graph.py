"""Traces a model on an example: the operations of its forward pass, with batch norms folded and activations fused.

torch.export records the operations. Then, if no other operation reads the result in between:
    convolution -> batch norm             the norm is folded into the weights
    convolution, linear -> add -> relu    the sum and the activation become part of the product
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs import restoring
from sipp.native import pytree, quiet_export
from sipp.runtime.activations import NONE, activation_of

ATEN = torch.ops.aten
CONV, LINEAR, BATCH_NORM = ATEN.conv2d.default, ATEN.linear.default, ATEN._native_batch_norm_legit_no_training.default
ADD, ATTENTION, LSTM = ATEN.add.Tensor, ATEN.scaled_dot_product_attention.default, ATEN.lstm.input
_LAYOUT_OPS = (  # their results depend on the memory layout, or on the last bits
    ATEN.as_strided.default, ATEN.as_strided_copy.default, ATEN.as_strided_scatter.default, ATEN.view.dtype,
)  # fmt: skip
LINE = 150  # characters of torch's errors that are shown


class Untraceable(ModelError):
    """torch.export cannot trace the model, which may run nevertheless."""


@dataclass(frozen=True)
class Slot:
    """A place in the arguments of an operation for the value of this number."""

    value: int


@dataclass(frozen=True)
class Op:
    """One operation, `target(*args)`. A product may add `addend` and apply the activation `act` at the end."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    dtype: torch.dtype | None = None
    addend: int | None = None
    act: str = NONE
    shrunk: float = 1.0  # how many times larger its sums were, at most, before a norm was folded in

    def reads(self) -> list[int]:
        """The numbers of the values it reads."""
        numbers = [leaf.value for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Slot)]
        return numbers if self.addend is None else [*numbers, self.addend]


@dataclass(frozen=True)
class Graph:
    """The operations of a network, its constants, and the numbers of its inputs and outputs."""

    ops: list[Op]
    constants: dict[int, Tensor]
    inputs: list[int]
    outputs: list[Any]  # Slot, or a Python constant
    out_spec: Any
    shapes: dict[int, tuple[int, ...]]  # of every value (the first, if an operation returns several)


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of a model in eval mode for inputs shaped like this example, with operations fused."""
    return _fuse(trace_unfused(model, args, kwargs))


def trace_unfused(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The same graph as torch.export records it, without fusing."""
    return _graph_of(program_of(model, args, kwargs))


def program_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_plain: bool = True
) -> torch.export.ExportedProgram:
    """Exports a model in eval mode; no operation of the program mutates a value.

    With `is_plain`, composite operations are decomposed too, which takes two thirds of the time.
    """
    try:
        with restoring(list(model.modules())), quiet_export(), torch.no_grad():
            exported = torch.export.export(model, args, kwargs, strict=False)
            is_done = not is_plain and not any(_is_mutating(node.target) for node in exported.graph.nodes)
            return exported if is_done else exported.run_decompositions({})
    except Exception as error:
        raise Untraceable(
            f"torch.export cannot trace it ({reason_of(error)})",
            where=type(model).__name__,
            fix="its forward pass must not depend on values of its inputs; give tensors, lists, tuples or dicts",
        ) from error


def reason_of(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = (line.strip()[:LINE] for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), '')}"


def _is_mutating(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _graph_of(exported: Any) -> Graph:
    signature = exported.graph_signature
    written = [spec.target for spec in signature.output_specs if spec.kind.name != "USER_OUTPUT"]
    if written:
        raise ModelError(
            f"its forward pass changes {' and '.join(written[:3])}: a compiled copy would drift, or write to your data",
            fix="compute new tensors instead (x = x - 1, not x -= 1; inplace=False; no max_norm, no counters)",
        )
    if any(node.target in _LAYOUT_OPS for node in exported.graph.nodes):
        raise Untraceable("an operation depends on the memory layout")
    state = {**exported.state_dict, **exported.constants}
    sources = {spec.arg.name: spec for spec in signature.input_specs}
    numbers: dict[Any, int] = {}
    constants: dict[int, Tensor] = {}
    names: dict[int, str] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    inputs, ops, outputs = [], [], []

    def to_ref(node: Any) -> Any:
        return Slot(numbers[node])

    for node in exported.graph.nodes:
        number = numbers.setdefault(node, len(numbers))
        shapes[number] = shape_of(node)

        def with_refs(arguments: Any) -> Any:
            return torch.fx.node.map_arg(arguments, to_ref)

        if node.op == "placeholder" and sources[node.name].kind.name == "USER_INPUT":
            inputs.append(number)
        elif node.op == "placeholder":
            constants[number], names[number] = state[sources[node.name].target].detach(), sources[node.name].target
        elif node.op == "call_function":
            args = tuple(with_refs(node.args))
            is_product = node.target in (CONV, LINEAR, BATCH_NORM) and isinstance(args[1], Slot)
            name = names.get(args[1].value, node.name).removesuffix(".weight") if is_product else node.name
            dtype = getattr(_first_result(node.meta.get("val")), "dtype", None)
            ops.append(Op(name, node.target, args, dict(with_refs(node.kwargs)), number, dtype))
        elif node.op == "output":
            outputs = [with_refs(arg) for arg in node.args[0]]
        else:
            raise Untraceable(
                f"the traced graph has a node of kind {node.op!r}",
                where=node.name,
                fix="use operations of torch that torch.export knows",
            )
    return Graph(ops, constants, inputs, outputs, exported.call_spec.out_spec, shapes)


def _first_result(value: Any) -> Any:
    """The result of an operation, or the first of several."""
    return value[0] if isinstance(value, (list, tuple)) and value else value


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a node's (first) result; () for a number."""
    return tuple(getattr(_first_result(node.meta.get("val")), "shape", ()))


def operation_name(node: Any) -> str:
    """The name of one of torch's operations; empty for anything else."""
    target = node.target
    is_own = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_own else ""


def named_arguments(node: Any) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults."""
    arguments = {}
    for i, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        arguments[argument.name] = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
    return arguments


def _fuse(graph: Graph) -> Graph:
    """Drops copies, folds batch norms, and moves sums and activations into the products before them."""
    graph = _without_copies(graph)
    ops = {op.out: op for op in graph.ops}  # in order
    constants, readers = dict(graph.constants), _readers(graph)  # fusing changes no count of a result that stays
    for op in graph.ops:
        if op.target is BATCH_NORM:
            _fold_batch_norm(op, ops, constants, readers, len(graph.shapes[op.out]))
    for op in list(ops.values()):
        if op.target is ADD and op.out in ops:
            _fuse_sum(op, ops, readers, graph.shapes)
        act = activation_of(op.target, op.args, op.kwargs)
        if act is not None and op.out in ops:
            source = ops.get(op.args[0].value)
            if source is not None and _can_fuse(source, readers):
                del ops[source.out]
                ops[op.out] = replace(source, out=op.out, act=act)
    ordered = sorted(ops.values(), key=lambda op: op.out)
    used = {n for op in ordered for n in op.reads()} | {ref.value for ref in graph.outputs if isinstance(ref, Slot)}
    return replace(graph, ops=ordered, constants={n: t for n, t in constants.items() if n in used})


def _without_copies(graph: Graph) -> Graph:
    """Removes clones, which are not needed since nothing is mutated: their readers read the original."""
    same: dict[int, int] = {}
    ops = []

    def with_refs(arguments: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: Slot(same.get(leaf.value, leaf.value)) if isinstance(leaf, Slot) else leaf, arguments
        )

    for op in graph.ops:
        if op.target is ATEN.clone.default:
            same[op.out] = with_refs(op.args[0]).value
        else:
            ops.append(replace(op, args=with_refs(op.args), kwargs=with_refs(op.kwargs)))
    return replace(graph, ops=ops, outputs=with_refs(graph.outputs))


def _readers(graph: Graph) -> Counter[int]:
    """How many times each value is read."""
    outputs = [ref.value for ref in graph.outputs if isinstance(ref, Slot)]
    return Counter([*(n for op in graph.ops for n in op.reads()), *outputs])


def _can_fuse(op: Op, readers: Counter[int]) -> bool:
    """Whether a sum or activation can be fused into this operation: a product without activation, read once."""
    return op.target in (CONV, LINEAR) and op.act == NONE and readers[op.out] == 1


def _fold_batch_norm(
    norm: Op, ops: dict[int, Op], constants: dict[int, Tensor], readers: Counter[int], n_dims: int
) -> None:
    """Folds a batch norm (and its `getitem`) into the layer before it, or turns it into a depthwise convolution.

    Only in float32: torch computes half-precision norms in float32, and no kernel here is wider.
    """
    taken = [op for op in ops.values() if op.target is operator.getitem and op.args[0] == Slot(norm.out)]
    is_used_once = len(taken) == 1 and taken[0].args[1] == 0 and readers[norm.out] == 1
    if not is_used_once or not all(ref is None or ref.value in constants for ref in norm.args[1:5]):
        return
    gain, shift, mean, variance = (None if ref is None else constants[ref.value].double() for ref in norm.args[1:5])
    assert mean is not None and variance is not None
    dtype = constants[norm.args[3].value].dtype
    if not norm.dtype == dtype == torch.float32:
        return
    scale = (variance + norm.args[6]).rsqrt() * (1.0 if gain is None else gain)
    offset = -mean * scale + (0.0 if shift is None else shift)
    source, out = ops.get(norm.args[0].value), taken[0].out
    weight, bias = -2 * out - 1, -2 * out - 2  # unused numbers
    is_foldable = source is not None and _can_fold(source, n_dims, constants, readers)
    scaled = _scaled(constants[source.args[1].value], scale) if source is not None and is_foldable else None
    if source is not None and scaled is not None:
        if len(source.args) > 2 and source.args[2] is not None:
            offset = offset + constants[source.args[2].value].double() * scale
        constants[weight], constants[bias] = scaled, offset.to(scaled.dtype)
        args = (source.args[0], Slot(weight), Slot(bias), *source.args[3:])
        del ops[norm.out], ops[source.out]
        ops[out] = replace(source, args=args, out=out, shrunk=_shrunk(scaled, scale))
    elif n_dims == 4:
        constants[weight], constants[bias] = scale[:, None, None, None].to(dtype), offset.to(dtype)
        args = (norm.args[0], Slot(weight), Slot(bias), [1, 1], [0, 0], [1, 1], len(scale))
        del ops[norm.out]
        ops[out] = Op(norm.name, CONV, args, {}, out, dtype)


def _can_fold(source: Op, n_dims: int, constants: dict[int, Tensor], readers: Counter[int]) -> bool:
    refs = [ref for ref in source.args[1:3] if ref is not None]
    is_constant = all(isinstance(ref, Slot) and ref.value in constants for ref in refs)
    is_product = source.target is {4: CONV, 2: LINEAR}.get(n_dims)
    return is_product and is_constant and source.addend is None and _can_fuse(source, readers)


def _scaled(weight: Tensor, scale: Tensor) -> Tensor | None:
    """The rows of a weight times these factors; None if nothing is left of one.

    Its sums may overflow before the norm, where torch multiplies infinity by 0 and gives NaN.
    """
    scaled = (weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))).to(weight.dtype)
    has_weights, had_weights = ((rows != 0).flatten(1).any(1) for rows in (scaled, weight))
    return scaled if torch.equal(has_weights, had_weights) else None


def _shrunk(scaled: Tensor, scale: Tensor) -> float:
    """How many times larger the rows with weights were, at most, before they were scaled."""
    factors = 1 / scale[(scaled != 0).flatten(1).any(1)].abs()
    return max(1.0, float(factors.max())) if len(factors) else 1.0


def _fuse_sum(total: Op, ops: dict[int, Op], readers: Counter[int], shapes: dict[int, tuple[int, ...]]) -> None:
    """Fuses a sum into one of its terms (preferably the later), if that is a product nothing else reads.

    Both terms must have the shape of the sum: kernels do not broadcast.
    """
    if total.kwargs or len(total.args) != 2 or not all(isinstance(arg, Slot) for arg in total.args):
        return
    terms = [arg.value for arg in total.args]
    if terms[0] == terms[1] or any(shapes[n] != shapes[total.out] for n in terms):
        return
    for at, addend in (terms, terms[::-1]) if terms[0] > terms[1] else (terms[::-1], terms):
        source = ops.get(at)
        if source is not None and _can_fuse(source, readers) and source.addend is None:
            # runs at the place of the sum, where both terms exist; nothing reads the product before
            del ops[at]
            ops[total.out] = replace(source, out=total.out, addend=addend)
            return
