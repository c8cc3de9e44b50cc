"""Rules for how each operation maps channels; the inputs of an operation without a rule stay whole."""

from __future__ import annotations

import operator
import re
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sipp.runtime.graph import shape_of
from sipp.runtime.shrinking.channels import Axis, Channels, Product, Rule, not_constant

ALSO_POINTWISE = {  # in addition to those that torch tags as pointwise
    "hardswish", "log_sigmoid", "_to_copy", "to", "alias", "detach", "contiguous", "clone", "lift_fresh_copy",
}  # fmt: skip
AT_REST = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}  # the identity in eval mode
DRAWS = torch.Tag.nondeterministic_seeded


def rule_of(node: Node) -> Rule | None:
    """The rule for an operation, or None."""
    target: Any = node.target
    if target is operator.getitem:
        return _item
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if name in AT_REST and named_arguments(node)["train"] is False:
        return _pointwise
    if name in RULES:
        return RULES[name]
    is_pointwise = torch.Tag.pointwise in target.tags or name in ALSO_POINTWISE
    return _pointwise if is_pointwise and DRAWS not in target.tags and not target._schema.is_mutable else None


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults."""
    arguments = {}
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        arguments[argument.name] = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
    return arguments


def _no_values(channels: Channels, node: Node) -> Axis | None:
    """For assertions, which change no value."""
    return None


def _keep_inputs(channels: Channels, node: Node) -> Axis | None:
    """Marks everything the operation reads to stay; its result has no removable channels."""
    channels.keep_all(node)
    return None


# --- layers ---------------------------------------------------------------------------------------------------------


def _convolution(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    weight, is_transposed, groups = arguments["weight"], "transpose" in str(node.target), arguments["groups"]
    if weight not in channels.leaves or (is_transposed and groups > 1):
        return _keep_inputs(channels, node)
    n_spatial = len(shape_of(weight)) - 2
    padding, kernel = arguments["padding"], shape_of(weight)[2:]
    if isinstance(padding, str):
        pads = padding == "same" and max(kernel) > 1
    else:
        pads = is_transposed or any(padding if isinstance(padding, (list, tuple)) else [padding])
    return _product(channels, node, n_spatial, groups, is_transposed, pads)


def _linear(channels: Channels, node: Node) -> Axis | None:
    return (
        _product(channels, node, 0, 1, False, False)
        if node.args[1] in channels.leaves
        else _keep_inputs(channels, node)
    )


def _product(
    channels: Channels, node: Node, n_spatial: int, groups: int, is_transposed: bool, pads: bool
) -> Axis | None:
    """The output channels of a layer whose weight is a parameter."""
    arguments = named_arguments(node)
    x, bias, weight = arguments["input"], arguments["bias"], channels.leaves[arguments["weight"]]
    value, read = channels.tensors[weight], channels.values.get(x)
    dim = len(shape_of(x)) - n_spatial - 1
    n_in = shape_of(x)[dim]
    is_odd = x in channels.leaves or (bias is not None and bias not in channels.leaves)
    if is_odd or (read is not None and read.dim != dim) or (groups > 1 and weight not in channels.regroups):
        return _keep_inputs(channels, node)
    if read is None:
        read = Axis(dim, torch.zeros(n_in, dtype=torch.int64, device="cpu"), not_constant(n_in))
    out_ids = channels.side(weight, 1 if is_transposed else 0)
    if groups == 1:
        channels.tie(read.ids, channels.side(weight, 0 if is_transposed else 1))
    for other in channels.products:
        if other.weight == weight:
            channels.tie(read.ids, other.ids)
    added = None if bias is None else channels.leaves[bias]
    if added is not None:
        channels.tie(out_ids, channels.side(added, 0))
    product = Product(weight, added, read.ids, read.constant, out_ids, groups, is_transposed, pads)
    channels.products.append(product)
    offsets = 0.0 if added is None else channels.tensors[added].double()
    return Axis(len(shape_of(node)) - n_spatial - 1, out_ids, _finite(constant_rows(product, value) + offsets))


def reads_of(weight: Tensor, groups: int, is_transposed: bool) -> Tensor:
    """Which output reads which input channel: O x I, true for nonzero weights."""
    return _full_matrix((weight != 0).flatten(2).any(2) if weight.ndim > 2 else weight != 0, groups, is_transposed)


def kernel_sums(weight: Tensor, groups: int, is_transposed: bool) -> Tensor:
    """The weight summed over the kernel window: O x I, float64."""
    sums = weight.double().flatten(2).sum(2) if weight.ndim > 2 else weight.double()
    return _full_matrix(sums, groups, is_transposed)


def _full_matrix(blocks: Tensor, groups: int, is_transposed: bool) -> Tensor:
    """The full matrix O x I of a grouped one, which stores only its diagonal blocks."""
    if is_transposed:
        return blocks.T
    return blocks if groups == 1 else torch.block_diag(*blocks.chunk(groups)).to(blocks.dtype)


def constant_rows(product: Product, weight: Tensor) -> Tensor:
    """The output of each row without its bias if all its inputs are constant, else NaN."""
    is_known = ~product.constant.isnan() & ((product.constant == 0) | (not product.pads))
    reads = reads_of(weight, product.groups, product.is_transposed)
    result = torch.where((reads & ~is_known).any(1), torch.nan, 0.0).double()
    used = is_known & (product.constant != 0)
    if bool(used.any()):
        result += kernel_sums(weight, product.groups, product.is_transposed)[:, used] @ product.constant[used]
    return result


def _batch_norm(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    axis = channels.values.get(arguments["input"])
    held = [arguments[name] for name in ("weight", "bias", "running_mean", "running_var")]
    is_plain = (
        held[2] is not None and not arguments.get("training") and all(h is None or h in channels.leaves for h in held)
    )
    if axis is None or axis.dim != 1 or not is_plain:
        return _keep_inputs(channels, node)
    for leaf in held:
        if leaf is not None:
            channels.tie(axis.ids, channels.side(channels.leaves[leaf], 0))
    defaults = (1.0, 0.0, 0.0, 1.0)
    weight, bias, mean, var = (
        torch.full_like(axis.constant, default) if h is None else channels.tensors[channels.leaves[h]].double()
        for h, default in zip(held, defaults)
    )
    constant = (axis.constant - mean) * (var + arguments["eps"]).rsqrt() * weight + bias
    channels.several[node] = False
    return Axis(axis.dim, axis.ids, _finite(torch.where(weight == 0, bias, constant)))


def _embedding(channels: Channels, node: Node) -> Axis | None:
    weight = named_arguments(node)["weight"]
    if weight not in channels.leaves:
        return _keep_inputs(channels, node)
    rows, ids = (channels.side(channels.leaves[weight], dim) for dim in (0, 1))
    channels.tie(rows, torch.zeros_like(rows))
    return Axis(len(shape_of(node)) - 1, ids, not_constant(len(ids)))


# --- operations on each value alone ---------------------------------------------------------------------------------


def _pointwise(channels: Channels, node: Node) -> Axis | None:
    """The channels of a sum, product or activation: those of its operands, tied together."""
    n_dims = len(shape_of(node))
    axes = {read: channels.values[read] for read in node.all_input_nodes if channels.values.get(read) is not None}
    dims = {axis.dim + n_dims - len(shape_of(read)) for read, axis in axes.items() if axis is not None}
    if len(dims) != 1:
        return _keep_inputs(channels, node)
    dim = dims.pop()
    n_channels = shape_of(node)[dim]
    constants: dict[Node, Tensor] = {}
    ids: Tensor | None = None
    for read in node.all_input_nodes:
        axis, at = channels.values.get(read), dim - (n_dims - len(shape_of(read)))
        size = shape_of(read)[at] if at >= 0 else 1
        if axis is None and read in channels.leaves:
            constants[read] = _leaf_constant(channels.tensors[channels.leaves[read]], at, n_channels)
        elif axis is None:
            constants[read] = not_constant(n_channels)
        else:
            constants[read] = axis.constant.expand(n_channels)
        if size == 1 and n_channels > 1:
            channels.keep(axis)
            continue
        if axis is None and read not in channels.leaves:
            return _keep_inputs(channels, node)
        own = channels.side(channels.leaves[read], at) if axis is None else axis.ids
        if ids is not None:
            channels.tie(ids, own)
        ids = own
    if ids is None:
        return _keep_inputs(channels, node)
    return Axis(dim, ids, _evaluate(node, constants, n_channels))


def _leaf_constant(value: Tensor, at: int, n_channels: int) -> Tensor:
    """A parameter or buffer as one constant per channel, if it has one value per channel or one for all."""
    size = value.shape[at] if at >= 0 else 1
    if value.numel() != size:
        return not_constant(n_channels)
    return value.double().flatten().expand(n_channels)


def _evaluate(node: Node, constants: dict[Node, Tensor], n_channels: int) -> Tensor:
    """The result of a pointwise operation on constant channels; NaN if an operand is not constant."""
    is_known = torch.stack([~constant.isnan() for constant in constants.values()]).all(0)
    target: Any = node.target

    def number(read: Node) -> Tensor:
        dtype = read.meta["val"].dtype
        filled = torch.where(is_known, constants[read], 1.0)
        return filled if dtype.is_floating_point else filled.to(dtype)

    result = not_constant(n_channels)
    if bool(is_known.any()):
        try:
            results = target(*torch.fx.node.map_arg(node.args, number), **torch.fx.node.map_arg(node.kwargs, number))
            result = torch.where(is_known, results.detach().cpu().double(), torch.nan).expand(n_channels)
        except (RuntimeError, TypeError):  # it does not accept one number per channel
            pass
    if target is torch.ops.aten.mul.Tensor:
        is_zero = torch.stack([constant == 0 for constant in constants.values()]).any(0)
        result = torch.where(is_zero, 0.0, result)
    return _finite(result)


def _finite(constant: Tensor) -> Tensor:
    return torch.where(constant.isfinite(), constant, torch.nan)


def _prelu(channels: Channels, node: Node) -> Axis | None:
    axis, slope = channels.values.get(node.all_input_nodes[0]), named_arguments(node)["weight"]
    if axis is None or axis.dim != 1 or slope not in channels.leaves:
        return _keep_inputs(channels, node)
    value = channels.tensors[channels.leaves[slope]].double()
    if value.numel() > 1:
        channels.tie(axis.ids, channels.side(channels.leaves[slope], 0))
    c = axis.constant
    return Axis(axis.dim, axis.ids, torch.where(c < 0, c * value, c))


# --- operations on positions: the channels stay as they are ---------------------------------------------------------


def _same_channels(channels: Channels, node: Node, n_spatial: int, is_constant: bool = True) -> Axis | None:
    """The channels after an operation on the last `n_spatial` dimensions; keeps constants, or only those that are 0."""
    axis = channels.values.get(node.all_input_nodes[0])
    if axis is None or axis.dim >= len(shape_of(node.all_input_nodes[0])) - n_spatial:
        return _keep_inputs(channels, node)
    channels.several[node] = False
    constant = axis.constant
    if not is_constant:
        constant = torch.where(constant == 0, constant, torch.nan)
    return Axis(axis.dim, axis.ids, constant)


def _n_spatial(node: Node) -> int:
    return int(re.findall("([123])d", str(node.target))[0])


def _resized(channels: Channels, node: Node) -> Axis | None:
    return _same_channels(channels, node, _n_spatial(node))


def _average_pool(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    padding = arguments["padding"] if isinstance(arguments["padding"], (list, tuple)) else [arguments["padding"]]
    is_whole = not any(padding) and not arguments.get("ceil_mode") and not arguments.get("divisor_override")
    return _same_channels(channels, node, _n_spatial(node), is_whole)


def _pad(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    x, pads = arguments["self"], arguments["pad"]
    axis, mode, value = channels.values.get(x), arguments.get("mode", "constant"), arguments.get("value") or 0.0
    if axis is None:
        return _keep_inputs(channels, node)
    constant = axis.constant
    if mode == "constant":
        constant = torch.where(constant == value, constant, torch.nan)
    place = 2 * (len(shape_of(x)) - 1 - axis.dim)
    before, after = pads[place : place + 2] if place < len(pads) else (0, 0)
    if before == after == 0:
        return Axis(axis.dim, axis.ids, constant)
    if mode != "constant" or min(before, after) < 0:
        return _keep_inputs(channels, node)
    # The network's code fixes how many channels are added, so they stay.
    stay = [torch.zeros(n, dtype=torch.int64, device="cpu") for n in (before, after)]
    added = [torch.full((n,), value, dtype=torch.float64, device="cpu") for n in (before, after)]
    return Axis(axis.dim, torch.cat([stay[0], axis.ids, stay[1]]), torch.cat([added[0], constant, added[1]]))


def _reduced(channels: Channels, node: Node) -> Axis | None:
    arguments, x = named_arguments(node), node.all_input_nodes[0]
    axis, n_dims, over = channels.values.get(x), len(shape_of(x)), arguments.get("dim")  # None: over all dimensions
    dims = {d % n_dims for d in (over if isinstance(over, (list, tuple)) else [over])} if over is not None else set()
    if axis is None or not dims or axis.dim in dims:
        return _keep_inputs(channels, node)
    is_mean = "sum" not in str(node.target)  # a sum depends on the number of positions
    constant = axis.constant if is_mean else torch.where(axis.constant == 0, axis.constant, torch.nan)
    dim = axis.dim if arguments["keepdim"] else axis.dim - sum(d < axis.dim for d in dims)
    return Axis(dim, axis.ids, constant)


def _softmax(channels: Channels, node: Node) -> Axis | None:
    x = node.all_input_nodes[0]
    axis = channels.values.get(x)
    if axis is None or named_arguments(node)["dim"] % len(shape_of(x)) == axis.dim:
        return _keep_inputs(channels, node)
    return Axis(axis.dim, axis.ids, not_constant(len(axis.ids)))


# --- operations on shapes -------------------------------------------------------------------------------------------


def _viewed(channels: Channels, node: Node) -> Axis | None:
    """The channels after a view: unchanged, or each merged with its positions into one dimension."""
    x = node.all_input_nodes[0]
    axis, old, new = channels.values.get(x), shape_of(x), shape_of(node)
    if axis is None:
        return _keep_inputs(channels, node)
    # In memory, the values of a channel follow those of the previous channel.
    before, n = prod(old[: axis.dim]), old[axis.dim]
    for k, size in enumerate(new):
        if prod(new[:k]) == before and size % n == 0:
            return Axis(k, axis.ids.repeat_interleave(size // n), axis.constant.repeat_interleave(size // n))
    return _keep_inputs(channels, node)


def _permuted(channels: Channels, node: Node) -> Axis | None:
    x = node.all_input_nodes[0]
    axis, n_dims = channels.values.get(x), len(shape_of(x))
    if axis is None:
        return _keep_inputs(channels, node)
    order, arguments = list(range(n_dims)), named_arguments(node)
    if "dims" in arguments:
        order = [d % n_dims for d in arguments["dims"]]
    elif n_dims > 1:
        first, second = arguments.get("dim0", 0) % n_dims, arguments.get("dim1", 1) % n_dims
        order[first], order[second] = second, first
    return Axis(order.index(axis.dim), axis.ids, axis.constant)


def _unsqueezed(channels: Channels, node: Node) -> Axis | None:
    x = node.all_input_nodes[0]
    axis, at = channels.values.get(x), named_arguments(node)["dim"] % (len(shape_of(x)) + 1)
    return _keep_inputs(channels, node) if axis is None else Axis(axis.dim + (at <= axis.dim), axis.ids, axis.constant)


def _squeezed(channels: Channels, node: Node) -> Axis | None:
    x = node.all_input_nodes[0]
    axis, shape, arguments = channels.values.get(x), shape_of(x), named_arguments(node).get("dim")
    if axis is None:
        return _keep_inputs(channels, node)
    dims = range(len(shape)) if arguments is None else [arguments] if isinstance(arguments, int) else arguments
    gone = {d % len(shape) for d in dims if shape[d] == 1}
    if axis.dim in gone:
        return _keep_inputs(channels, node)
    return Axis(axis.dim - sum(d < axis.dim for d in gone), axis.ids, axis.constant)


def _expanded(channels: Channels, node: Node) -> Axis | None:
    x = node.all_input_nodes[0]
    axis, more = channels.values.get(x), len(shape_of(node)) - len(shape_of(x))
    if axis is None or shape_of(node)[axis.dim + more] != len(axis.ids):
        return _keep_inputs(channels, node)
    return Axis(axis.dim + more, axis.ids, axis.constant)


def _sliced(channels: Channels, node: Node) -> Axis | None:
    """The channels after slicing positions; slices of channels have their indices in the network's code."""
    x = node.all_input_nodes[0]
    axis, arguments = channels.values.get(x), named_arguments(node)
    dim = arguments["dim"] % len(shape_of(x))
    if axis is None or dim == axis.dim:
        return _keep_inputs(channels, node)
    channels.several[node] = True
    loses = any(word in str(node.target) for word in ("select", "unbind"))
    return Axis(axis.dim - (loses and dim < axis.dim), axis.ids, axis.constant)


def _joined(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    parts = arguments["tensors"]
    dim = arguments["dim"] % len(shape_of(node))
    axes = [channels.values.get(part) for part in parts]
    known = [axis for axis in axes if axis is not None]
    if not known or any(part in channels.leaves for part in parts):
        return _keep_inputs(channels, node)
    if any(len(shape_of(part)) != len(shape_of(node)) for part in parts):
        return _keep_inputs(channels, node)
    if all(axis.dim == dim for axis in known):
        sizes = [shape_of(part)[dim] for part in parts]
        ids = [torch.zeros(n, dtype=torch.int64, device="cpu") if a is None else a.ids for a, n in zip(axes, sizes)]
        constants = [not_constant(n) if axis is None else axis.constant for axis, n in zip(axes, sizes)]
        return Axis(dim, torch.cat(ids), torch.cat(constants))
    if len(known) < len(axes) or len({axis.dim for axis in known}) > 1:
        return _keep_inputs(channels, node)
    for axis in known[1:]:
        channels.tie(known[0].ids, axis.ids)
    constants = [torch.where(axis.constant == known[0].constant, axis.constant, torch.nan) for axis in known]
    return Axis(known[0].dim, known[0].ids, torch.stack(constants).sum(0) / len(known))


def _item(channels: Channels, node: Node) -> Axis | None:
    """One of several results: the first, or any if all have the same channels."""
    of, at = node.all_input_nodes[0], node.args[1]
    axis = channels.values.get(of)
    if axis is None or of not in channels.several or not (channels.several[of] or at == 0):
        return _keep_inputs(channels, node)
    return axis


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "linear": _linear, "batch_norm": _batch_norm, "_native_batch_norm_legit_no_training": _batch_norm,
        "embedding": _embedding, "prelu": _prelu, "_prelu_kernel": _prelu, "pad": _pad, "constant_pad_nd": _pad,
        "mean": _reduced, "sum": _reduced, "amax": _reduced, "amin": _reduced, "softmax": _softmax,
        "_softmax": _softmax, "log_softmax": _softmax, "_log_softmax": _softmax, "permute": _permuted,
        "transpose": _permuted, "t": _permuted, "unsqueeze": _unsqueezed, "squeeze": _squeezed, "expand": _expanded,
        "slice": _sliced, "select": _sliced, "split": _sliced, "split_with_sizes": _sliced, "chunk": _sliced,
        "unbind": _sliced, "cat": _joined, "_assert_tensor_metadata": _no_values,
    }  # fmt: skip
    rules |= dict.fromkeys(SHAPES, _viewed)
    for n in (1, 2, 3):
        rules |= {f"conv{n}d": _convolution, f"conv_transpose{n}d": _convolution, f"avg_pool{n}d": _average_pool}
        pools = ("max_pool{}d", "max_pool{}d_with_indices", "adaptive_max_pool{}d", "adaptive_avg_pool{}d")
        upsampled = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
        rules |= {name.format(n): _resized for name in (*pools, *upsampled)}
    smooth = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
    return rules | dict.fromkeys((*smooth, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _resized)


SHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")
RULES = _rules()


def without_views(node: Node) -> Rule | None:
    """Like `rule_of`, but without a rule for views: their sizes may be numbers of channels in the network's code."""
    return None if rule_of(node) is _viewed else rule_of(node)


def without_numbers(node: Node) -> Rule | None:
    """Like `without_views`, and results of operations with numbers are not constant: these may depend on sizes."""
    rule = without_views(node)
    numbers = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, int | float)]
    if rule is not _pointwise or not numbers:
        return rule

    def careful(channels: Channels, node: Node) -> Axis | None:
        axis = _pointwise(channels, node)
        return None if axis is None else Axis(axis.dim, axis.ids, not_constant(len(axis.ids)))

    return careful
