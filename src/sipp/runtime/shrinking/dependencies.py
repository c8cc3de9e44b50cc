"""The channels of a network that belong together, followed through every operation of one run (T23).

Every channel of every value has a number. Two that are the same channel in two places (operands of a sum; rows of a
weight and the norm behind it) are tied: both go, or neither does. What is tied, over parameters and buffers, is one
class. The class of ALWAYS stays: inputs, outputs, and whatever is read by an operation that mixes channels.

Whether an operation mixes channels is not looked up but tried: it runs on random values, and again with its channels in
another order and half of them replaced. If the others come out as before, in the new order, it treats channels alike
and each alone. Three kinds of operations have rules: layers, whose outputs are new channels; those that only place
values elsewhere, which run on the numbers of the channels; and attention, whose channels are heads.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd

from sipp.results import numerics
from sipp.runtime.graph import named_arguments, operation_name
from sipp.runtime.shrinking.traced import LAYERS, BothRuns, Tensors, Traced

ALWAYS = 0
VIEWS = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")
PLACED = (*VIEWS, "cat", "pad", "constant_pad_nd")  # values are not computed, but placed among others
N_ORDERS = 2  # in which channels are tried
ALIKE = 64  # times the rounding of its dtype: how far a value may be off that is the same


@dataclass(frozen=True)
class Axis:
    """The channel dimension of a value, the numbers of its channels, and their values if constant."""

    dim: int
    ids: Tensor  # C, int64
    constant: Tensor  # C, float64; NaN: not constant


@dataclass(frozen=True)
class Product:
    """One use of a weight whose outputs are sums over the channels of its input."""

    weight: str
    bias: str | None
    ids: Tensor  # of its input channels
    constant: Tensor  # their values, NaN if not constant
    out_ids: Tensor
    pads: bool  # it reads zeros around its input: a constant is none at the border


@dataclass
class Channels:
    """The channels of a network: which are tied, and which must stay."""

    tensors: dict[str, Tensor]  # parameters and buffers by all of their names
    n_reads: Counter[str]  # how often each is read
    depthwise: set[str] = field(default_factory=set)  # weights of layers that hand each channel on by itself
    sides: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # ids along a dimension of a parameter or buffer
    fixed: set[str] = field(default_factory=set)  # parameters and buffers that stay whole
    products: list[Product] = field(default_factory=list)
    left_alone: dict[str, None] = field(default_factory=dict)  # in order
    ties: list[tuple[Tensor, Tensor]] = field(default_factory=list)
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

    def keep(self, ids: Tensor) -> None:
        """Marks channels to stay."""
        self.tie(ids, torch.zeros_like(ids))

    @property
    def classes(self) -> Tensor:
        """The class of each id: what is tied."""
        tied = torch.cat([torch.stack(pair) for pair in self.ties] or [numerics.integers(0, 0).view(2, 0)], 1).numpy()
        graph = coo_matrix((np.ones(tied.shape[1], dtype=np.int8), (tied[0], tied[1])), (self.n_ids, self.n_ids))
        return torch.from_numpy(connected_components(graph, directed=False)[1].astype(np.int64))


def channels_in(
    traced: Traced,
    tensors: Tensors,
    modules: Mapping[str, nn.Module],
    *,
    follows_views: bool = True,
    knows_constants: bool = True,
) -> Channels:
    """The channels of a traced network, which is run once.

    Sizes of views, and numbers that constants are computed with, may be numbers of channels in the network's code, or
    follow from the size of the input: without them, more stays.
    """
    regroups = {f"{name}.weight" for name, module in modules.items() if isinstance(module, _ConvNd)}
    run = _Following(Channels(tensors, Counter()), traced, regroups, follows_views, knows_constants)
    with torch.no_grad():
        run.values.run_all(traced.nodes, after=run.follow)
    channels = run.channels
    for name, dim in channels.sides:
        if name in channels.fixed:
            channels.keep(channels.sides[name, dim])
    return channels


class _Following:
    """One run of a network, which follows the channels of each value."""

    def __init__(
        self, channels: Channels, traced: Traced, regroups: set[str], follows_views: bool, knows_constants: bool
    ) -> None:
        self.channels, self.regroups = channels, regroups
        self.follows_views, self.knows_constants = follows_views, knows_constants
        self.leaves, self.inputs = traced.leaves, set(traced.input_nodes)
        self.values = BothRuns(traced, channels.tensors, {})
        self.axes: dict[Node, Axis] = {}  # without an entry, all channels of a value stay
        self.varies: set[Node] = set()  # values that inputs decide
        self.generator = torch.Generator("cpu").manual_seed(0)

    def follow(self, node: Node) -> None:
        """Notes the channels of a value."""
        channels = self.channels
        if node in self.inputs or not self.varies.isdisjoint(node.all_input_nodes):
            self.varies.add(node)
        if node in self.leaves:
            channels.n_reads[self.leaves[node]] += len(node.users)
        elif node.op == "output":
            for read in node.all_input_nodes:
                self._keep(read)
        elif node.op == "call_function":
            axis = self._axis(node)
            if axis is not None:
                self.axes[node] = Axis(axis.dim, axis.ids, self._observed(axis, self._value(node)))
            elif node.users:  # without users it is an assertion
                for read in node.all_input_nodes:
                    self._keep(read)
                    if read in self.axes or (read in self.leaves and self._value(read).ndim > 1):
                        channels.left_alone[_description(node)] = None

    def _keep(self, read: Node) -> None:
        if read in self.leaves:
            self.channels.fixed.add(self.leaves[read])
        if read in self.axes:
            self.channels.keep(self.axes[read].ids)

    def _value(self, node: Node) -> Any:
        """What a node gave: its first result, if there are several."""
        value = self.values.of(node, 0, is_small=False)
        return value[0] if isinstance(value, (list, tuple)) else value

    def _computed(self, node: Node, given: Mapping[Node, Any]) -> Any:
        """What an operation gives with other operands: its first result, if there are several."""
        value = self.values.computed(node, 0, is_small=False, given=given)
        return value[0] if isinstance(value, (list, tuple)) else value

    def _observed(self, axis: Axis, value: Tensor) -> Tensor:
        """The constants of a value: where its channels cannot vary (not NaN), and are the same everywhere."""
        value_C = value.movedim(axis.dim, 0).flatten(1)
        if not (self.knows_constants and value_C.is_floating_point() and value_C.numel()):
            return torch.full_like(axis.constant, math.nan)
        low_C, high_C = (one.cpu().double() for one in torch.aminmax(value_C, dim=1))
        rounding = ALIKE * torch.finfo(value_C.dtype).eps
        is_one = (high_C - low_C <= rounding * high_C.abs()) & high_C.isfinite() & ~axis.constant.isnan()
        return torch.where(is_one, (low_C + high_C) / 2, math.nan)

    # --- The channels of a result: the constants are NaN where they can vary, and else not yet known -----------------

    def _axis(self, node: Node) -> Axis | None:
        name = operation_name(node)
        if str(node.target) == "<built-in function getitem>":
            of, at = node.args
            is_list = isinstance(of, Node) and len(of.target._schema.returns) == 1  # type: ignore[union-attr]
            return self.axes.get(of) if is_list or at == 0 else None  # type: ignore[arg-type]
        if name in LAYERS:
            return self._layer(node)
        if name == "embedding":
            return self._embedding(node)
        if name == "scaled_dot_product_attention" and (found := self._attention(node)) is not None:
            return found
        if name in PLACED and (self.follows_views or name not in VIEWS):
            found = self._alone(node) if name not in VIEWS else None
            return found if found is not None else self._placed(node)
        return None if name in VIEWS else self._alone(node)

    def _layer(self, node: Node) -> Axis | None:
        """The outputs of a linear or convolutional layer whose weight is a parameter."""
        channels, arguments = self.channels, named_arguments(node)
        x, weight_leaf, bias_leaf = (arguments[name] for name in ("input", "weight", "bias"))
        if x in self.leaves or weight_leaf not in self.leaves:
            return None
        if bias_leaf is not None and bias_leaf not in self.leaves:
            return None
        weight = self.leaves[weight_leaf]
        bias = None if bias_leaf is None else self.leaves[bias_leaf]
        value, groups = channels.tensors[weight], arguments.get("groups", 1)
        if value.ndim < 2:
            return None
        from_end = value.ndim - 1  # the channel dimension, counted from the last
        dim = self._value(x).ndim - from_end
        n_in = self._value(x).shape[dim]
        read = self.axes.get(x, Axis(dim, torch.zeros(n_in, dtype=torch.int64, device="cpu"), not_constant(n_in)))
        is_depthwise = groups > 1 and groups == n_in
        if read.dim != dim or (groups > 1 and not (is_depthwise and weight in self.regroups)):
            return None
        out_ids = channels.side(weight, 0)
        reads = reads_of(value)
        if is_depthwise:
            channels.depthwise.add(weight)
            each = len(out_ids) // n_in
            channels.tie(read.ids.repeat_interleave(each), out_ids)
            may_vary = reads[:, 0] & read.constant.isnan().repeat_interleave(each)
        else:
            channels.tie(read.ids, channels.side(weight, 1))
            pads = _pads(arguments.get("padding", 0), tuple(value.shape[2:]))
            channels.products.append(Product(weight, bias, read.ids, read.constant, out_ids, pads))
            may_vary = (reads & read.constant.isnan()).any(1)
        if bias is not None:
            channels.tie(out_ids, channels.side(bias, 0))
        return Axis(self._value(node).ndim - from_end, out_ids, torch.where(may_vary, math.nan, 0.0).double())

    def _embedding(self, node: Node) -> Axis | None:
        leaf = named_arguments(node)["weight"]
        if leaf not in self.leaves:
            return None
        rows, ids = (self.channels.side(self.leaves[leaf], dim) for dim in (0, 1))
        self.channels.keep(rows)
        return Axis(self._value(node).ndim - 1, ids, not_constant(len(ids)))

    def _attention(self, node: Node) -> Axis | None:
        """Heads of attention, several of which may read one of keys and values."""
        arguments = named_arguments(node)
        axes = [self.axes.get(arguments[name]) for name in ("query", "key", "value")]
        mask, heads = arguments["attn_mask"], self._value(node).ndim - 3
        if mask is not None and self._value(mask).ndim > 2 and self._value(mask).shape[-3] > 1:
            return None
        if any(axis is None or axis.dim != heads for axis in axes):
            return None
        query, *others = (axis for axis in axes if axis is not None)
        for read in others:
            self.channels.tie(query.ids, read.ids.repeat_interleave(len(query.ids) // len(read.ids)))
        return Axis(heads, query.ids, not_constant(len(query.ids)))

    def _placed(self, node: Node) -> Axis | None:
        """The channels after an operation that only places values: it runs on the numbers of the channels.

        A channel may be merged with its positions, and new ones may stand beside it, which stay: the network's code
        says how many. If one is left out, the code has chosen among them.
        """
        reads = [read for read in node.all_input_nodes if read in self.axes]
        is_filled = bool(named_arguments(node).get("value"))  # with what may be taken for a number of a channel
        if not reads or is_filled or any(len(self.axes[read].ids) == 1 for read in reads):
            return None  # one channel cannot be told from its positions
        numbers = self._placed_numbers(node, reads)
        if numbers is None:
            return None
        ids = torch.cat([numerics.integers(0, 1), *(self.axes[read].ids for read in reads)])  # by these numbers
        for dim in range(numbers.ndim):
            line = numbers.movedim(dim, 0).flatten(1)[:, 0] if numbers.numel() else numbers.flatten()
            is_axis = torch.equal(numbers, _along(line, dim, tuple(numbers.shape))) and len(line) > 1
            if is_axis and set(range(1, len(ids))) <= set(line.tolist()):
                self.channels.fixed |= {self.leaves[read] for read in node.all_input_nodes if read in self.leaves}
                return Axis(dim, ids[line], self._placed_constants(node, reads, line))
        return self._in_heads(reads[0], numbers - 1) if len(reads) == 1 else None

    def _placed_numbers(self, node: Node, reads: list[Node]) -> Tensor | None:
        """Runs the operation on the numbers of its operands' channels, from 1; None if it fails."""
        given, n_read = {}, 0
        for read in reads:
            axis = self.axes[read]
            own = numerics.integers(1 + n_read, 1 + n_read + len(axis.ids))
            given[read] = _along(own.double(), axis.dim, self._value(read).shape).contiguous()
            n_read += len(axis.ids)
        others = {
            read: torch.zeros(self._value(read).shape, dtype=torch.float64, device="cpu")
            for read in node.all_input_nodes
        }
        try:
            return self._computed(node, {**others, **given}).long()
        except RuntimeError:
            return None

    def _placed_constants(self, node: Node, reads: list[Node], line: Tensor) -> Tensor:
        """The constants of channels that were placed along a line, by their numbers; 0 stands beside them."""
        zero = torch.zeros(1, dtype=torch.float64, device="cpu")
        constant = torch.cat([zero, *(self.axes[read].constant for read in reads)])[line]
        if self.varies.intersection(set(node.all_input_nodes) - set(reads)):
            constant = torch.where(line == 0, math.nan, constant)
        return constant

    def _in_heads(self, read: Node, numbers: Tensor) -> Axis | None:
        """The channels after a view that splits them in heads: those of a head are tied, and count as one."""
        axis = self.axes[read]
        for dim, n_heads in enumerate(numbers.shape):
            each, rest = divmod(len(axis.ids), n_heads) if n_heads else (0, 1)
            if rest or not 1 < n_heads < len(axis.ids):
                continue
            if torch.equal(numbers // each, _along(numerics.integers(0, n_heads), dim, tuple(numbers.shape))):
                ids = axis.ids.view(n_heads, each)
                self.channels.tie(ids[:, :1].expand(-1, each).flatten(), axis.ids)
                return Axis(dim, ids[:, 0], not_constant(n_heads))
        return None

    def _alone(self, node: Node) -> Axis | None:
        """The channels after an operation that treats each of them alone and all alike, as a trial shows."""
        reads = [read for read in node.all_input_nodes if read in self.axes]
        n = max((len(self.axes[read].ids) for read in reads), default=0)
        whole = [read for read in reads if len(self.axes[read].ids) == n]
        if n < 2 or any(len(self.axes[read].ids) not in (1, n) for read in reads):
            return None
        leaves = [read for read in node.all_input_nodes if read in self.leaves]
        places = [[*_dims_of(self._value(leaf), n), None] for leaf in leaves]
        for dims in itertools.product(*places):
            at = {read: self.axes[read].dim for read in whole}
            at |= {leaf: dim for leaf, dim in zip(leaves, dims) if dim is not None}
            dim = self._tried(node, at, n)
            if dim is not None:
                break
        else:
            return None
        ids = self.axes[whole[0]].ids
        for read in reads:
            if read in whole:
                self.channels.tie(ids, self.axes[read].ids)
            else:
                self.channels.keep(self.axes[read].ids)
        for leaf, leaf_dim in zip(leaves, dims):
            if leaf_dim is not None:
                self.channels.tie(ids, self.channels.side(self.leaves[leaf], leaf_dim))
        return Axis(dim, ids, self._constants_alone(node, reads, n))

    def _constants_alone(self, node: Node, reads: list[Node], n: int) -> Tensor:
        """The constants of n channels behind such an operation: none can vary whose operands cannot."""
        constants = torch.stack([self.axes[read].constant.expand(n) for read in reads])
        may_vary = constants.isnan().any(0)
        if self.varies.intersection(set(node.all_input_nodes) - set(reads)):
            may_vary |= True
        if operation_name(node) == "mul":  # nothing times anything
            may_vary &= ~(constants == 0).any(0)
        elif "batch_norm" in operation_name(node) and (scale := named_arguments(node)["weight"]) is not None:
            may_vary &= (self._value(scale) != 0).cpu()
        return torch.where(may_vary, math.nan, 0.0).double()

    def _tried(self, node: Node, at: dict[Node, int], n: int) -> int | None:
        """The dimension of the result along which each channel depends on itself alone; None if there is none.

        `at` are the operands that have channels, and their dimensions there.
        """
        given = {read: self._random(read) for read in node.all_input_nodes if read in at or read in self.leaves}
        try:
            first = self._computed(node, given)
            if not isinstance(first, Tensor):
                return None
            dims = _dims_of(first, n)
            for order, replaced in self._orders(n):
                again = dict(given)
                for read, dim in at.items():
                    other = self._random(read)
                    moved = given[read].index_select(dim, order.to(other.device))
                    again[read] = torch.where(_along(replaced.to(other.device), dim, other.shape), other, moved)
                second = self._computed(node, again)
                stays = (~replaced).nonzero().flatten().to(first.device)
                places = order.to(first.device)[stays]
                dims = [
                    dim
                    for dim in dims
                    if second.shape == first.shape
                    and _is_same(second.index_select(dim, stays), first.index_select(dim, places))
                ]
        except (RuntimeError, TypeError, IndexError):
            return None
        return dims[0] if dims else None

    def _orders(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Other orders of n channels, and which of them to replace: half, and then the others."""
        for _ in range(N_ORDERS):
            order = torch.randperm(n, generator=self.generator, dtype=torch.int64, device="cpu")
            order = order.flip(0) if torch.equal(order, numerics.integers(0, n)) else order
            is_first = torch.randperm(n, generator=self.generator, dtype=torch.int64, device="cpu") < n // 2
            yield order, is_first
            yield order, ~is_first

    def _random(self, read: Node) -> Tensor:
        """Random values in place of a value; those of a parameter or buffer are positive, as variances are."""
        value = self._value(read)
        if not value.is_floating_point():
            return torch.randint(0, 2, value.shape, generator=self.generator, dtype=torch.int64, device="cpu").to(value)
        draw = torch.rand if read in self.leaves else torch.randn
        return (draw(value.shape, generator=self.generator) + (0.5 if read in self.leaves else 0.0)).to(value)


def not_constant(n: int) -> Tensor:
    """The constants of n channels of which none is constant: NaN."""
    return torch.full((n,), math.nan, dtype=torch.float64, device="cpu")


def reads_of(weight: Tensor) -> Tensor:
    """Which output reads which input channel: O x I, true for nonzero weights."""
    return (weight != 0).flatten(2).any(2).cpu() if weight.ndim > 2 else (weight != 0).cpu()


def _pads(padding: Any, kernel: tuple[int, ...]) -> bool:
    """Whether a layer reads zeros around its input."""
    if isinstance(padding, str):
        return padding == "same" and max(kernel) > 1
    return any(padding) if isinstance(padding, (list, tuple)) else bool(padding)


def _along(line: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """One number per index of a dimension, as a tensor of this shape."""
    return line.view(-1, *[1] * (len(shape) - dim - 1)).expand(*shape)


def _dims_of(value: Tensor, n: int) -> list[int]:
    return [dim for dim, size in enumerate(value.shape) if size == n]


def _is_same(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    size = float(other[other.isfinite()].abs().amax()) if bool(other.isfinite().any()) else 0.0
    rounding = ALIKE * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=rounding, atol=rounding * size, equal_nan=True)


def _description(node: Node) -> str:
    """The operation of a node, and the module that calls it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inside = stack[-1][0] if stack else ""
    operation = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return f"{inside} ({operation})" if inside else operation
