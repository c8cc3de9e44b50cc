"""How each torch operation changes an error (T13).

A value a of the dense network carries e, for each input a bound on ||a^ - a||, a^ being the pruned network's value. A
rule gives Lip(op^) e, where op^ is the operation with the pruned network's weights; of several values, what their e
amount to together. An operation without a rule, or a use of it that the rule does not cover, has no bound.

Values hold the inputs along the first axis, each as one row or several that follow each other (its positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.bounds.operator_norms import ROUND_UP, average_pool_norm, conv_norm, linear_norm, max_pool_gain
from sipp.inputs import name_of_operation
from sipp.native import pytree


class NoBound(Exception):
    """Why there is no bound."""


@dataclass(frozen=True)
class BoundedValue:
    """A value of the dense network, and the bound on the distance of the pruned network's value for each input."""

    tensor: Tensor
    error_B: Tensor


class Call:
    """One operation that torch executes."""

    options: dict[str, Any]  # its arguments by name; a tensor is a `BoundedValue`, or the pruned network's constant
    result: Any  # in the dense network
    on: Callable[[Tensor], Any]  # its result in the pruned network on another value

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.given = function, (args, kwargs)
        self.is_in_place = bool(function._schema.is_mutable)
        self.name = name_of_operation(function)  # such as "convolution" or "add"
        schema = function._schema.arguments
        self.options = {one.name: one.default_value for one in schema}
        self.options |= dict(zip(self.options, args)) | kwargs

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in pytree.tree_leaves(self.given) if isinstance(leaf, Tensor)]

    def run(self, instead: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
        """Its result, with other tensors in the place of its own."""
        args, kwargs = pytree.tree_map(lambda leaf: instead(leaf) if isinstance(leaf, Tensor) else leaf, self.given)
        return self.function(*args, **kwargs)

    @property
    def pieces(self) -> Sequence[Tensor]:
        """The tensors of its result."""
        return self.result if isinstance(self.result, tuple | list) else [self.result]

    @property
    def out(self) -> Tensor:
        """The result, or the first of several."""
        return self.pieces[0]

    @property
    def values(self) -> list[BoundedValue]:
        return [leaf for leaf in pytree.tree_leaves(self.options) if isinstance(leaf, BoundedValue)]

    @property
    def n_samples(self) -> int:
        return len(self.values[0].error_B)

    def only(self, name: str = "self") -> BoundedValue:
        """The value with this name, the only one among the arguments."""
        value = self.options.get(name)
        if not isinstance(value, BoundedValue) or len(self.values) > 1:
            raise NoBound("it combines two network values, or its first argument is not one")
        return value


Rule = Callable[[Call], Tensor]


def times(gain: float | Callable[[Call], float], name: str = "self") -> Rule:
    """The rule of an operation on one value, the argument `name`, with this Lipschitz constant."""
    return lambda call: call.only(name).error_B * (gain(call) if callable(gain) else gain)


def _linear(call: Call) -> float:
    if call.options.get("beta", 1) != 1 or call.options.get("alpha", 1) != 1:
        raise NoBound("it scales its operands")
    return linear_norm(call.options["mat2"])


def _convolution(call: Call) -> float:
    if call.options["transposed"]:
        raise NoBound("it is transposed")
    windows = {name: call.options[name] for name in ("stride", "padding", "dilation", "groups")}
    return conv_norm(call.options["weight"], input_size=call.only("input").tensor.shape[2:], **windows)


def _batch_norm(call: Call) -> float:
    options = call.options
    if options.get("training") or options["running_mean"] is None or options["running_var"] is None:
        raise NoBound("it uses the statistics of the batch")
    scale = torch.rsqrt(options["running_var"] + options.get("eps", options.get("epsilon")))
    scale = scale if options["weight"] is None else scale * options["weight"]
    return float(scale.abs().max()) * ROUND_UP


def _sum(call: Call) -> Tensor:
    """The errors of a sum or a difference add up."""
    error_B = torch.zeros_like(call.values[0].error_B)
    for name in ("self", "other"):
        term = call.options[name]
        factor = abs(float(call.options["alpha"])) if name == "other" else 1.0
        if isinstance(term, BoundedValue):
            error_B = error_B + factor * _spread(term.tensor, call.out) * term.error_B
    return error_B


def _product(call: Call) -> Tensor:
    """A value times a constant, or divided by one."""
    left, right = call.options["self"], call.options["other"]
    value, other = (left, right) if isinstance(left, BoundedValue) else (right, left)
    if isinstance(other, BoundedValue) or (call.name == "div" and value is right):
        raise NoBound("it combines two network values, or divides by one")
    if call.options.get("rounding_mode") is not None:
        raise NoBound("it rounds")
    factor = torch.as_tensor(other, dtype=torch.float64, device=value.tensor.device)
    factor = 1.0 / factor if call.name == "div" else factor
    return value.error_B * float(factor.abs().max()) * _spread(value.tensor, call.out) * ROUND_UP


def _spread(value: Tensor, out: Tensor) -> float:
    """sqrt of how often broadcasting to `out` repeats each value."""
    if value.dim() != out.dim() or len(value) != len(out):
        raise NoBound("broadcasting moves the batch axis")
    return math.sqrt(out.numel() / value.numel()) if value.numel() else 1.0


def _joined(call: Call) -> Tensor:
    """The root of the sum of squares."""
    if call.options["dim"] % call.out.dim() == 0:
        raise NoBound("it joins along the batch axis")
    return torch.stack([value.error_B for value in call.values]).square().sum(0).sqrt() * ROUND_UP


def _movement(call: Call) -> float:
    """sqrt of how often one value is written, read off from what the operation does to numbered values."""
    value, n_samples = call.only().tensor, call.n_samples
    if call.out.dtype != value.dtype:
        raise NoBound("it reads the values as another type")
    numbers = torch.arange(1, value.numel() + 1, dtype=value.dtype, device=value.device).reshape(value.shape)
    sample_B1 = torch.arange(n_samples, dtype=torch.int64, device=value.device)[:, None]
    runs, most = (call.on(numbers), call.on(torch.zeros_like(numbers))), 0
    for after, fill in [runs] if isinstance(call.result, Tensor) else zip(*runs):
        number = (after - fill).long()  # of a value, or 0 for a constant
        if number.dim() == 0 or len(number) % n_samples:
            raise NoBound("it moves the batch axis")
        number = number.reshape(n_samples, -1)
        if bool(((number > 0) & ((number - 1) * n_samples // max(value.numel(), 1) != sample_B1)).any()):
            raise NoBound("it mixes the samples of the batch")
        counts = number[number > 0].bincount()
        most = max(most, int(counts.max()) if len(counts) else 0)
    return math.sqrt(most)


def _pool(call: Call) -> float:
    """Max pooling's gain, or the norm of average pooling."""
    options, size = call.options, call.only().tensor.shape[2:]
    kernel = options["kernel_size"]
    windows = {"kernel": kernel, "stride": options["stride"] or kernel}
    if len(size) != len(kernel):
        raise NoBound("its input has no batch axis")
    if "dilation" in options:
        return max_pool_gain(**windows, dilation=options["dilation"], n_out=call.out.shape[2:])
    if options.get("divisor_override") is not None:
        raise NoBound("it overrides the divisor")
    rest = {name: options[name] for name in ("padding", "ceil_mode", "count_include_pad")}
    return average_pool_norm(size, **windows, **rest)


def _mean(call: Call) -> float:
    """1 / sqrt of the number of values of one sample that the mean joins."""
    shape, dim = call.only().tensor.shape, call.options.get("dim")
    dims = [d % len(shape) for d in (dim if isinstance(dim, Sequence) else [dim])] if dim not in (None, [], ()) else [0]
    if 0 in dims:
        raise NoBound("it acts along the batch axis or without naming its axis")
    if call.options.get("dtype") is not None:
        raise NoBound("it changes the data type")
    return 1.0 / math.sqrt(math.prod(shape[d] for d in dims))


# Operations that only move, copy or leave out values, or fill in constants
MOVEMENTS = frozenset(
    (
        *("view", "_unsafe_view", "permute", "transpose", "t", "squeeze", "unsqueeze", "clone", "alias", "detach"),
        *("select", "slice", "split", "split_with_sizes", "unbind", "expand", "index", "constant_pad_nd"),
        *(f"{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3)),
    )
)
SLOPES = {  # the largest of each activation, rounded up
    **dict.fromkeys(("relu", "tanh", "hardtanh", "clamp", "clamp_min"), 1.0),
    "sigmoid": 0.25,  # p (1 - p) at zero
    "gelu": 1.1290,  # exact form 1.128904.. at sqrt(2); tanh form 1.128993..
    "silu": 1.0999,  # 1.099839..
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVEMENTS, times(_movement)),
    **{name: times(slope) for name, slope in SLOPES.items()},
    "leaky_relu": times(lambda call: max(1.0, abs(float(call.options["negative_slope"])))),
    "addmm": times(_linear, "mat1"),
    "mm": times(_linear),
    "convolution": times(_convolution, "input"),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), times(_batch_norm, "input")),
    **dict.fromkeys(("add", "sub"), _sum),
    **dict.fromkeys(("mul", "div"), _product),
    "cat": _joined,
    **{f"max_pool{rank}d_with_indices": times(_pool) for rank in (2, 3)},
    **{f"avg_pool{rank}d": times(_pool) for rank in (2, 3)},
    "mean": times(_mean),
}
