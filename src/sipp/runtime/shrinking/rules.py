"""Rules: which channels the result of an operation has. Where a rule gives None, all that the operation reads stays."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from sipp.results import numerics
from sipp.runtime.graph import shape_of
from sipp.runtime.shrinking.channels import Axis, Channels, Product, Rule, not_constant

ALSO_POINTWISE = {  # in addition to those that torch tags as pointwise
    "hardswish", "log_sigmoid", "_to_copy", "to", "alias", "detach", "contiguous", "clone", "lift_fresh_copy",
}  # fmt: skip
AT_REST = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}  # the identity in eval mode
DRAWS = torch.Tag.nondeterministic_seeded
VIEWS = {"view", "_unsafe_view", "reshape", "flatten", "unflatten"}
MOVES = {  # no value is computed, some are left out or repeated
    *VIEWS, "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split",
    "split_with_sizes", "chunk", "unbind",
}  # fmt: skip


def rule_of(node: Node) -> Rule | None:
    """The rule for an operation, or None."""
    target: Any = node.target
    if target is operator.getitem:
        return _item
    name = operation_name(node)
    if name in AT_REST and named_arguments(node)["train"] is False:
        return _pointwise
    if name == "" or name in RULES:
        return RULES.get(name)
    is_pointwise = torch.Tag.pointwise in target.tags or name in ALSO_POINTWISE
    return _pointwise if is_pointwise and DRAWS not in target.tags and not target._schema.is_mutable else None


def operation_name(node: Node) -> str:
    """The name of one of torch's operations; empty for anything else."""
    target: Any = node.target
    is_own = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_own else ""


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults."""
    arguments = {}
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        arguments[argument.name] = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
    return arguments


# --- layers ---------------------------------------------------------------------------------------------------------


def _product(channels: Channels, node: Node) -> Axis | None:
    """The output channels of a linear or convolutional layer whose weight is a parameter."""
    arguments = named_arguments(node)
    x, weight_leaf, bias_leaf = (arguments[name] for name in ("input", "weight", "bias"))
    leaves = channels.leaves
    if x in leaves or weight_leaf not in leaves or (bias_leaf is not None and bias_leaf not in leaves):
        return None
    weight, bias = leaves[weight_leaf], None if bias_leaf is None else leaves[bias_leaf]
    value, read = channels.tensors[weight], channels.values.get(x)
    is_transposed, groups = "transpose" in str(node.target), arguments.get("groups", 1)
    from_end = value.ndim - 1  # the channel dimension, counted from the last
    dim = len(shape_of(x)) - from_end
    is_grouped = groups > 1
    if value.ndim < 2 or (read is not None and read.dim != dim):
        return None
    if is_grouped and (is_transposed or weight not in channels.regroups):
        return None
    if read is None:
        n_in = shape_of(x)[dim]
        read = Axis(dim, torch.zeros(n_in, dtype=torch.int64, device="cpu"), not_constant(n_in))
    out_ids = channels.side(weight, 1 if is_transposed else 0)
    if not is_grouped:
        channels.tie(read.ids, channels.side(weight, 0 if is_transposed else 1))
    for other in channels.products:
        if other.weight == weight:
            channels.tie(read.ids, other.ids)
    if bias is not None:
        channels.tie(out_ids, channels.side(bias, 0))
    pads = is_transposed or _pads(arguments.get("padding", 0), value.shape[2:])
    product = Product(weight, bias, read.ids, read.constant, out_ids, groups, is_transposed, pads)
    channels.products.append(product)
    offsets = 0.0 if bias is None else channels.tensors[bias].double()
    return Axis(len(shape_of(node)) - from_end, out_ids, _finite(constant_rows(product, value) + offsets))


def _pads(padding: Any, kernel: tuple[int, ...]) -> bool:
    """Whether a layer or pooling reads zeros around its input."""
    if isinstance(padding, str):
        return padding == "same" and max(kernel) > 1
    return any(padding) if isinstance(padding, (list, tuple)) else bool(padding)


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
        return None
    for leaf in held:
        if leaf is not None:
            channels.tie(axis.ids, channels.side(channels.leaves[leaf], 0))
    defaults = (1.0, 0.0, 0.0, 1.0)
    weight, bias, mean, var = (
        torch.full_like(axis.constant, default) if h is None else channels.tensors[channels.leaves[h]].double()
        for h, default in zip(held, defaults)
    )
    constant = (axis.constant - mean) * (var + arguments["eps"]).rsqrt() * weight + bias
    return Axis(axis.dim, axis.ids, _finite(torch.where(weight == 0, bias, constant)))


def _embedding(channels: Channels, node: Node) -> Axis | None:
    weight = named_arguments(node)["weight"]
    if weight not in channels.leaves:
        return None
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
        return None
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
            return None
        own = channels.side(channels.leaves[read], at) if axis is None else axis.ids
        if ids is not None:
            channels.tie(ids, own)
        ids = own
    if ids is None:
        return None
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
        return None
    value = channels.tensors[channels.leaves[slope]].double()
    if value.numel() > 1:
        channels.tie(axis.ids, channels.side(channels.leaves[slope], 0))
    c = axis.constant
    return Axis(axis.dim, axis.ids, torch.where(c < 0, c * value, c))


# --- operations on positions: the channels stay as they are ---------------------------------------------------------


def _resized(channels: Channels, node: Node) -> Axis | None:
    """The channels after pooling or upsampling."""
    x, arguments = node.all_input_nodes[0], named_arguments(node)
    axis, n_spatial = channels.values.get(x), int(re.findall("([123])d", str(node.target))[0])
    if axis is None or axis.dim >= len(shape_of(x)) - n_spatial:
        return None
    varies = "avg_pool" in str(node.target) and (  # the mean of equal numbers is another one at the border
        _pads(arguments.get("padding", 0), ()) or arguments.get("ceil_mode") or arguments.get("divisor_override")
    )
    return Axis(axis.dim, axis.ids, _only_zeros(axis.constant) if varies else axis.constant)


def _only_zeros(constant: Tensor) -> Tensor:
    """The constants that are 0, for operations that change any other."""
    return torch.where(constant == 0, constant, torch.nan)


def _pad(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    x, pads = arguments["self"], arguments["pad"]
    axis, mode, value = channels.values.get(x), arguments.get("mode", "constant"), arguments.get("value") or 0.0
    if axis is None:
        return None
    constant = axis.constant
    if mode == "constant":
        constant = torch.where(constant == value, constant, torch.nan)
    place = 2 * (len(shape_of(x)) - 1 - axis.dim)
    before, after = pads[place : place + 2] if place < len(pads) else (0, 0)
    if before == after == 0:
        return Axis(axis.dim, axis.ids, constant)
    if mode != "constant" or min(before, after) < 0:
        return None
    # The network's code fixes how many channels are added, so they stay.
    stay = [torch.zeros(n, dtype=torch.int64, device="cpu") for n in (before, after)]
    added = [torch.full((n,), value, dtype=torch.float64, device="cpu") for n in (before, after)]
    return Axis(axis.dim, torch.cat([stay[0], axis.ids, stay[1]]), torch.cat([added[0], constant, added[1]]))


def _reduced(channels: Channels, node: Node) -> Axis | None:
    arguments, x = named_arguments(node), node.all_input_nodes[0]
    axis, n_dims, over = channels.values.get(x), len(shape_of(x)), arguments.get("dim")  # None: over all dimensions
    dims = {d % n_dims for d in (over if isinstance(over, (list, tuple)) else [over])} if over is not None else set()
    if axis is None or not dims or axis.dim in dims:
        return None
    is_mean = "sum" not in str(node.target)  # a sum depends on the number of positions
    constant = axis.constant if is_mean else _only_zeros(axis.constant)
    dim = axis.dim if arguments["keepdim"] else axis.dim - sum(d < axis.dim for d in dims)
    return Axis(dim, axis.ids, constant)


def _softmax(channels: Channels, node: Node) -> Axis | None:
    x = node.all_input_nodes[0]
    axis = channels.values.get(x)
    if axis is None or named_arguments(node)["dim"] % len(shape_of(x)) == axis.dim:
        return None
    return Axis(axis.dim, axis.ids, not_constant(len(axis.ids)))


# --- operations on shapes -------------------------------------------------------------------------------------------


def _moved(channels: Channels, node: Node) -> Axis | None:
    """The channels after an operation that only moves values: found by running it on the numbers of the channels.

    A channel may be merged with its positions. If some channels are left out or their order changes, indices in the
    network's code have chosen them; and one channel cannot be told from its positions.
    """
    x, target = node.all_input_nodes[0], cast(Any, node.target)
    axis = channels.values.get(x)
    if axis is None or len(axis.ids) == 1:
        return None
    numbers = numerics.integers(0, len(axis.ids))
    whole = _along(numbers, axis.dim, shape_of(x)).contiguous()
    moved = target(*torch.fx.node.map_arg(node.args, lambda _: whole), **node.kwargs)
    results = moved if isinstance(moved, (list, tuple)) else [moved]
    for dim, size in enumerate(results[0].shape):
        merged = numbers.repeat_interleave(size // len(numbers))
        if 0 < size == len(merged) and all(torch.equal(part, _along(merged, dim, part.shape)) for part in results):
            return Axis(dim, axis.ids[merged], axis.constant[merged])
    return _split_in_heads(channels, axis, results)


def _split_in_heads(channels: Channels, axis: Axis, results: Sequence[Tensor]) -> Axis | None:
    """The channels after a view that splits them in heads: those of a head are tied, and count as one."""
    for dim, n_heads in enumerate(results[0].shape):
        each, rest = divmod(len(axis.ids), n_heads) if n_heads else (0, 1)
        if rest or not 1 < n_heads < len(axis.ids):
            continue
        heads = numerics.integers(0, n_heads)
        if all(torch.equal(part // each, _along(heads, dim, part.shape)) for part in results):
            ids = axis.ids.view(n_heads, each)
            channels.tie(ids[:, :1].expand(-1, each).flatten(), axis.ids)
            return Axis(dim, ids[:, 0], not_constant(n_heads))
    return None


def _attention(channels: Channels, node: Node) -> Axis | None:
    """Heads of attention, which are computed alone: those of query, key and value are tied."""
    arguments = named_arguments(node)
    axes = [channels.values.get(arguments[name]) for name in ("query", "key", "value")]
    mask = arguments["attn_mask"]
    if mask is not None and len(shape_of(mask)) > 2 and shape_of(mask)[-3] > 1:
        return None
    if any(axis is None or axis.dim != len(shape_of(node)) - 3 for axis in axes):
        return None
    query, key, value = (cast(Axis, axis) for axis in axes)
    for read in (key, value):  # several heads of queries may read one of keys and values
        channels.tie(query.ids, read.ids.repeat_interleave(len(query.ids) // len(read.ids)))
    return Axis(query.dim, query.ids, not_constant(len(query.ids)))


def _along(line: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """One number per index of a dimension, as a tensor of this shape."""
    return line.view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)


def _joined(channels: Channels, node: Node) -> Axis | None:
    arguments = named_arguments(node)
    parts = arguments["tensors"]
    dim = arguments["dim"] % len(shape_of(node))
    axes = [channels.values.get(part) for part in parts]
    known = [axis for axis in axes if axis is not None]
    if not known or any(part in channels.leaves for part in parts):
        return None
    if any(len(shape_of(part)) != len(shape_of(node)) for part in parts):
        return None
    if all(axis.dim == dim for axis in known):
        sizes = [shape_of(part)[dim] for part in parts]
        ids = [torch.zeros(n, dtype=torch.int64, device="cpu") if a is None else a.ids for a, n in zip(axes, sizes)]
        constants = [not_constant(n) if axis is None else axis.constant for axis, n in zip(axes, sizes)]
        return Axis(dim, torch.cat(ids), torch.cat(constants))
    if len(known) < len(axes) or len({axis.dim for axis in known}) > 1:
        return None
    for axis in known[1:]:
        channels.tie(known[0].ids, axis.ids)
    constants = [torch.where(axis.constant == known[0].constant, axis.constant, torch.nan) for axis in known]
    return Axis(known[0].dim, known[0].ids, torch.stack(constants).sum(0) / len(known))


def _item(channels: Channels, node: Node) -> Axis | None:
    """One of several results: the first, or any of a list, whose members have the same channels."""
    of = node.all_input_nodes[0]
    target: Any = of.target
    is_list = len(target._schema.returns) == 1
    return channels.values.get(of) if is_list or node.args[1] == 0 else None


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "linear": _product, "batch_norm": _batch_norm, "_native_batch_norm_legit_no_training": _batch_norm,
        "embedding": _embedding, "prelu": _prelu, "_prelu_kernel": _prelu, "pad": _pad, "constant_pad_nd": _pad,
        "mean": _reduced, "sum": _reduced, "amax": _reduced, "amin": _reduced, "softmax": _softmax,
        "_softmax": _softmax, "log_softmax": _softmax, "_log_softmax": _softmax, "cat": _joined,
        "scaled_dot_product_attention": _attention,
    }  # fmt: skip
    for n in (1, 2, 3):
        rules |= {f"conv{n}d": _product, f"conv_transpose{n}d": _product}
        pools = (
            "max_pool{}d",
            "max_pool{}d_with_indices",
            "adaptive_max_pool{}d",
            "adaptive_avg_pool{}d",
            "avg_pool{}d",
        )
        upsampled = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
        rules |= {name.format(n): _resized for name in (*pools, *upsampled)}
    smooth = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
    rules |= dict.fromkeys((*smooth, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _resized)
    return rules | dict.fromkeys(MOVES, _moved)


RULES = _rules()


def without_views(node: Node) -> Rule | None:
    """Like `rule_of`, but without a rule for views: their sizes may be numbers of channels in the network's code."""
    return None if operation_name(node) in VIEWS else rule_of(node)


def without_numbers(node: Node) -> Rule | None:
    """Like `rule_of`, but results of operations with numbers are not constant: these may be computed from sizes."""
    return _careful(node, rule_of(node))


def without_either(node: Node) -> Rule | None:
    """Like `without_views` and `without_numbers`."""
    return _careful(node, without_views(node))


def _careful(node: Node, rule: Rule | None) -> Rule | None:
    """The rule, without constants in its result if the operation has a number among its arguments."""
    numbers = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, int | float)]
    if rule is None or rule not in (_pointwise, _pad) or not numbers:
        return rule

    def without_constants(channels: Channels, node: Node) -> Axis | None:
        axis = rule(channels, node)
        return None if axis is None else Axis(axis.dim, axis.ids, not_constant(len(axis.ids)))

    return without_constants
