"""Bounds, for each sample, the distance of a pruned network's output from the dense one's (T13).

The dense network is run in float64 along its traced graph. Every value carries a bound on the distance of the pruned
network's value; only at the end is it divided by ||f(x)||. The bound needs no assumption, but it is a product of
operator norms, which grows with depth and becomes useless for deep networks. For these, use a certificate (T14).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from sipp.bounds.sound.error_growth import Effect, can_fold_batchnorm, effect, norm_B
from sipp.bounds.sound.known_operations import (
    METADATA,
    MOVEMENTS,
    Call,
    ConstantPair,
    NoBound,
    ValueAndError,
    in_place,
    module_of,
    name_in_model,
    named_options,
    op_name,
)
from sipp.bounds.sound.operator_norms import ROUND_UP
from sipp.bounds.sound.tracing import Inputs, TracedNetworks, same_output, trace
from sipp.records.checking import check_flag
from sipp.records.pruned_to import NetworkLike, network_of

# What may be computed from constants: operations without randomness and without side effects.
_CONSTANT_OPS = MOVEMENTS | frozenset(
    (
        *("add", "sub", "mul", "div", "floordiv", "mod", "neg", "pow", "abs", "sqrt", "rsqrt", "exp", "eq", "getattr"),
        *("sigmoid", "tanh", "relu", "softmax", "sum", "mean", "cat", "stack", "t", "zeros", "ones", "full", "arange"),
        *METADATA,
    )
)


@dataclass(frozen=True)
class NodeBound:
    """One operation: its factor on the error, the error it added, and the error after it (worst of the batch)."""

    name: str
    op: str
    module: str
    gain: float
    injected: float
    error: float


@dataclass(frozen=True)
class GraphBound:
    """The bound for every sample of a batch, or the reason why there is none.

    `epsilon_B` bounds ||f^(x) - f(x)|| / ||f(x)|| (infinite if f(x) = 0 and the networks may differ), `absolute_B`
    bounds ||f^(x) - f(x)||; both are None if `reason` is not empty. `nodes` are the operations in order.
    """

    epsilon_B: Tensor | None
    absolute_B: Tensor | None
    reason: str
    nodes: tuple[NodeBound, ...]

    @property
    def epsilon(self) -> float | None:
        """The largest relative error bound of the batch, or None without a bound."""
        return None if self.epsilon_B is None else float(self.epsilon_B.max())


@torch.inference_mode(False)
def sound_bound(dense: nn.Module, pruned: NetworkLike, inputs: Inputs, *, fold_batchnorm: bool = True) -> GraphBound:
    """Bounds ||f^(x) - f(x)|| for each sample of `inputs`, or returns the reason why there is no bound.

    `pruned` is the same architecture with other weights, or what `prune` returned; `inputs` is a batch (a tensor, or
    the model's positional arguments, or its keyword arguments), with samples along the first axis. Both networks are
    copied to eval mode and float64; the originals are left as they were. The bound assumes exact arithmetic: it leaves
    out the rounding errors of networks that run in float32 or less (the network bound of `prune` and `assess` includes
    them). With `fold_batchnorm`, a linear map and the BatchNorm right after it are bounded as one map, which is never
    looser.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.9, method="wt")
        >>> x = torch.rand(3, 8)
        >>> bound = sipp.sound_bound(net, pruned, x)
        >>> error = (pruned.model(x) - net(x)).norm(dim=1).double()
        >>> bool((error <= bound.absolute_B).all())
        True
    """
    check_flag("fold_batchnorm", fold_batchnorm)
    nodes: list[NodeBound] = []
    with torch.no_grad():
        try:
            traced = trace([dense, network_of(pruned)], inputs)
            output = _propagate(traced, fold_batchnorm, nodes)
            if not same_output(output.value, traced.outputs[0]):
                raise NoBound("the graph does not repeat the model's output")
        except NoBound as reason:
            return GraphBound(None, None, f"no bound: {reason}", tuple(nodes))
    absolute_B = output.error_B * ROUND_UP
    # norm_B rounds up; divided twice by its slack it rounds down, so that the ratio is not too small.
    norms_B = norm_B(output.value) / ROUND_UP**2
    epsilon_B = torch.where(absolute_B == 0, torch.zeros_like(absolute_B), absolute_B / norms_B)
    epsilon_B = torch.where(torch.isfinite(norms_B), epsilon_B, torch.full_like(epsilon_B, math.inf))
    return GraphBound(epsilon_B, absolute_B, "", tuple(nodes))


def _propagate(traced: TracedNetworks, fold_batchnorm: bool, nodes: list[NodeBound]) -> ValueAndError:
    """The output of the network with its error bound; appends what each operation did to `nodes`."""
    root = traced.graphs[0]
    values: dict[fx.Node, Any] = {}
    uses = {node: len(node.users) for node in root.graph.nodes}
    arguments = iter(traced.args)
    for node in root.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(node, arguments, traced)
        elif node.op == "get_attr":
            values[node] = ConstantPair(_attribute(root, node.target), _attribute(traced.graphs[1], node.target))
        elif node.op == "output":
            return _output(map_arg(node.args[0], values.__getitem__), traced.n_samples)
        else:
            for argument in node.all_input_nodes:
                uses[argument] -= 1
            foldable = fold_batchnorm and _feeds_batch_norm(node, root)
            values[node] = _step(node, traced, values, uses, foldable, nodes)
            for argument in node.all_input_nodes:
                if uses[argument] == 0:
                    values.pop(argument, None)
    raise NoBound("the graph has no output")


def _step(
    node: fx.Node,
    traced: TracedNetworks,
    values: dict[fx.Node, Any],
    uses: dict[fx.Node, int],
    foldable: bool,
    nodes: list[NodeBound],
) -> Any:
    """The value of one operation with its error bound, or a constant."""
    root, op, module = traced.graphs[0], op_name(node, traced.graphs[0]), module_of(node)
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    try:
        if not any(isinstance(leaf, ValueAndError) for leaf in _leaves((args, kwargs))):
            return _constant(node, op, traced, args, kwargs)
        if op in METADATA or (op == "getattr" and args[1] in METADATA):
            return _run(node, root, args, kwargs)
        if op == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        call, overwrites = _call(node, op, traced, args, kwargs)
        if foldable and can_fold_batchnorm(call):
            return ValueAndError(call.value, torch.full_like(call.input.error_B, math.inf), call)
        done = effect(call)
        result = _with_error(call.value, done)
        if overwrites:
            _overwrite(values, uses, call.input, result)
    except NoBound as why:
        raise NoBound(f"op {name_in_model(node, root)} in module {module}{f' ({why})' if str(why) else ''}") from None
    before = call.options.get("input")
    name = f"{before.affine.op}+{op}" if isinstance(before, ValueAndError) and before.affine is not None else op
    worst = (float(done.injected_B.max()), float(done.error_B.max()))
    nodes.append(NodeBound(node.name, name, module, done.gain, *worst))
    return result


def _call(node: fx.Node, op: str, traced: TracedNetworks, args: Any, kwargs: Any) -> tuple[Call, bool]:
    """A node run on the dense network's values, and whether it overwrites its first argument."""
    if op in MOVEMENTS:
        _check_movement(list(_leaves((args, kwargs))))
    options = named_options(node, traced.graphs[0], traced.graphs[1], args, kwargs)
    overwrites = in_place(node, traced.graphs[0], options)
    if overwrites:
        before = options.get("input")
        if op in MOVEMENTS or not isinstance(before, ValueAndError):
            raise NoBound("it changes a shape or a constant in place")
        # Run on a copy; what else looks at the overwritten tensor is seen to by _overwrite.
        copied: Any = replace(before, value=before.value.clone())
        args, kwargs = map_aggregate((args, kwargs), lambda leaf: copied if leaf is before else leaf)
    value = _run(node, traced.graphs[0], args, kwargs)
    return Call(op, options, value, lambda other: _rerun(node, traced.graphs[0], args, kwargs, other)), overwrites


def _feeds_batch_norm(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether the only thing done with a node's value is a BatchNorm."""
    users = list(node.users)
    return len(users) == 1 and op_name(users[0], root) == "batch_norm" and users[0].all_input_nodes[:1] == [node]


def _with_error(value: Any, done: Effect) -> Any:
    """The result of an operation with its error; a sample with a value that is not finite has no finite error."""
    if isinstance(value, (tuple, list)):
        return tuple(_with_error(piece, done) for piece in value)
    finite_B = torch.isfinite(value).reshape(value.shape[0], -1).all(dim=1)
    return ValueAndError(value, torch.where(finite_B, done.error_B, torch.full_like(done.error_B, math.inf)))


def _overwrite(
    values: dict[fx.Node, Any], uses: dict[fx.Node, int], before: ValueAndError, after: ValueAndError
) -> None:
    """Updates later values that an in-place operation overwrote; raises NoBound if only a part was."""

    def shares(leaf: Any) -> bool:
        storage = before.value.untyped_storage().data_ptr()
        return isinstance(leaf, ValueAndError) and leaf.value.untyped_storage().data_ptr() == storage

    for node, value in values.items():
        if uses[node] == 0 or not any(shares(leaf) for leaf in _leaves(value)):
            continue
        if not isinstance(value, ValueAndError) or not value.value.is_set_to(before.value):
            raise NoBound(f"an operation in place overwrites a part of {node.name}, which is used later")
        values[node] = after


def _check_movement(leaves: Sequence[Any]) -> None:
    """Raises NoBound if a network value or a changed parameter decides where values move."""
    if sum(isinstance(leaf, ValueAndError) for leaf in leaves) != 1:
        raise NoBound("it combines two network values")
    if any(isinstance(leaf, ConstantPair) and not torch.equal(leaf.dense, leaf.pruned) for leaf in leaves):
        raise NoBound("it depends on a parameter that was changed")


def _constant(node: fx.Node, op: str, traced: TracedNetworks, args: Any, kwargs: Any) -> Any:
    """The result of an operation on constants, in both networks."""
    if op not in _CONSTANT_OPS or node.op == "call_module":
        raise NoBound("not known to be a constant")
    dense = _run(node, traced.graphs[0], args, kwargs)
    pruned = _run(node, traced.graphs[1], args, kwargs, pruned=True)
    if isinstance(dense, Tensor):
        return ConstantPair(dense, pruned)
    if dense != pruned:
        raise NoBound("it differs between the two networks")
    return dense


def _run(node: fx.Node, root: fx.GraphModule, args: Any, kwargs: Any, *, pruned: bool = False) -> Any:
    """What an operation returns on the dense network's values (or on the pruned one's constants)."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, ConstantPair):
            return leaf.pruned if pruned else leaf.dense
        return leaf.value if isinstance(leaf, ValueAndError) else leaf

    args, kwargs = map_aggregate((args, kwargs), plain)
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _rerun(node: fx.Node, root: fx.GraphModule, args: Any, kwargs: Any, other: Any) -> Any:
    """What an operation returns with another tensor in the place of its network value."""
    args, kwargs = map_aggregate((args, kwargs), lambda leaf: other if isinstance(leaf, ValueAndError) else leaf)
    return _run(node, root, args, kwargs)


def _leaves(value: Any) -> Iterator[Any]:
    """Everything inside nested tuples, lists, dicts and slices."""
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return iter(leaves)


def _placeholder(node: fx.Node, given: Iterator[Any], traced: TracedNetworks) -> Any:
    """An input, which is the same for both networks."""
    name = str(node.target)
    value = traced.kwargs[name] if name in traced.kwargs else next(given, node.args[0] if node.args else None)
    if not isinstance(value, Tensor):
        return value
    return ValueAndError(value, torch.zeros(traced.n_samples, dtype=torch.float64, device=value.device))


def _output(result: Any, n_samples: int) -> ValueAndError:
    """The network's one output."""
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, ValueAndError) or result.value.dim() == 0 or result.value.shape[0] != n_samples:
        raise NoBound("the model does not return one tensor with a row per sample that depends on the input")
    return result


def _attribute(root: nn.Module, path: Any) -> Any:
    attribute: Any = root
    for part in str(path).split("."):
        attribute = getattr(attribute, part)
    return attribute
