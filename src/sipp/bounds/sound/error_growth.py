"""How one operation of a network changes an error bound (T13), given the dense network's values.

Every sample has its own absolute error e = ||a^ - a||, a being the dense network's value and a^ the pruned one's. An
operation multiplies it by a Lipschitz constant (`gain`) and, if its own weights changed, adds `injected`, which is
computed on the dense network's actual values. An operation that is not in the tables below raises NoBound.

Values hold their samples along the first axis, each sample one row or several that follow each other (its positions).
The bounds are for exact arithmetic; the slack ROUND_UP covers float64 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sipp.bounds.operations import NoBound
from sipp.bounds.sound.operator_norms import (
    ROUND_UP,
    SLOPES,
    SOFTMAX_NORM,
    average_pool_norm,
    conv_norm,
    linear_norm,
    max_pool_gain,
)

# Operations that only move, copy or leave out values, or fill in constants.
MOVEMENTS = frozenset(
    (
        *("view", "_unsafe_view", "permute", "transpose", "t", "squeeze", "unsqueeze", "clone", "alias", "detach"),
        *("select", "slice", "split", "split_with_sizes", "unsafe_split", "unbind", "expand", "repeat", "flip", "roll"),
        *("index", "index_select", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "constant_pad_nd"),
        *(f"{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3)),
    )
)
BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update")


@dataclass(frozen=True)
class Value:
    """A value of the dense network, and a bound on the distance of the pruned network's value, sample by sample."""

    tensor: Tensor
    error_B: Tensor


@dataclass(frozen=True)
class Constant:
    """A tensor or number that does not depend on the input, in the dense and in the pruned network."""

    dense: Any
    pruned: Any

    @property
    def change(self) -> Any:
        return self.pruned - self.dense


@dataclass(frozen=True)
class Call:
    """One operation: its name, arguments by name, result, and how to run it on another input."""

    name: str
    options: dict[str, Any]  # tensors are Values or Constants
    result: Any
    rerun: Callable[[Tensor], Any]
    n_samples: int

    @property
    def out(self) -> Tensor:
        """The result, or the first of several."""
        return self.result[0] if isinstance(self.result, tuple | list) else self.result

    @property
    def input(self) -> Value:
        """The only network value among the arguments."""
        values = [leaf for leaf in tree_leaves(self.options) if isinstance(leaf, Value)]
        if len(values) != 1 or self.options.get("self") is not values[0]:
            raise NoBound("it combines two network values, or its first argument is not one")
        return values[0]

    @property
    def constants(self) -> list[Constant]:
        return [leaf for leaf in tree_leaves(self.options) if isinstance(leaf, Constant)]


@dataclass(frozen=True)
class Effect:
    """The error after an operation, the factor on the error before it and the error it added."""

    error_B: Tensor
    gain: float
    injected_B: Tensor


def effect(call: Call) -> Effect:
    """The error after one operation; raises NoBound for an operation, or a use of it, that has no bound."""
    if call.name in _EFFECTS:
        return _EFFECTS[call.name](call)
    if call.name in MOVEMENTS:
        if not all(torch.equal(option.dense, option.pruned) for option in call.constants):
            raise NoBound("it depends on a parameter that was changed")
        return _scaled(call, _movement_gain(call))
    if call.constants:
        raise NoBound("it has a parameter")
    if call.name in SLOPES:
        return _scaled(call, SLOPES[call.name])
    if call.name in _GAINS:
        return _scaled(call, _GAINS[call.name](call))
    raise NoBound("")


def norm_B(value: Tensor, n_samples: int) -> Tensor:
    """The Euclidean norm of each sample, rounded up; no square over- or underflows, and NaN comes back as infinity."""
    rows = value.reshape(n_samples, -1).to(torch.float64)
    if rows.shape[1] == 0:
        return rows.new_zeros(n_samples)
    scale_B1 = rows.abs().amax(dim=1, keepdim=True)
    safe_B1 = torch.where(scale_B1 > 0, scale_B1, torch.ones_like(scale_B1))
    return nan_as_inf(torch.linalg.vector_norm(rows / safe_B1, dim=1) * scale_B1.squeeze(1) * ROUND_UP)


def nan_as_inf(error_B: Tensor) -> Tensor:
    """The errors with NaN (an overflow, or 0 times infinity) as infinity: an unknown error is never a small one."""
    return torch.where(torch.isnan(error_B), torch.full_like(error_B, math.inf), error_B)


def _effect(value: Value, gain: float, injected_B: Tensor) -> Effect:
    return Effect(nan_as_inf(gain * value.error_B + injected_B), gain, injected_B)


def _scaled(call: Call, gain: float) -> Effect:
    return _effect(call.input, gain, torch.zeros_like(call.input.error_B))


# Operations with weights: e <= ||W^|| e_in + ||(W^ - W) a + (b^ - b)||.


def _linear(call: Call) -> Effect:
    """The effect of a linear layer: a product with its transposed weight, plus a bias."""
    options = call.options
    bias, value = (options["self"], options["mat1"]) if call.name == "addmm" else (None, options["self"])
    weight = options["mat2"]
    _check_operands(value, weight, bias)
    if options.get("beta", 1) != 1 or options.get("alpha", 1) != 1:
        raise NoBound("its factors are not 1")
    moved = value.tensor @ weight.change
    moved = moved if bias is None else moved + bias.change
    return _effect(value, linear_norm(weight.pruned), norm_B(moved, call.n_samples))


def _convolution(call: Call) -> Effect:
    options = call.options
    value, weight, bias = (options[name] for name in ("input", "weight", "bias"))
    _check_operands(value, weight, bias)
    if options["transposed"]:
        raise NoBound("it is transposed")
    windows = {name: options[name] for name in ("stride", "padding", "dilation", "groups")}
    gain = conv_norm(weight.pruned, input_size=value.tensor.shape[2:], **windows)
    convolution: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[weight.pruned.dim() - 3]
    moved = convolution(value.tensor, weight.change, None if bias is None else bias.change, **windows)
    return _effect(value, gain, norm_B(moved, call.n_samples))


def _check_operands(value: Any, weight: Any, bias: Any) -> None:
    if not isinstance(value, Value) or not isinstance(weight, Constant) or isinstance(bias, Value):
        raise NoBound("it combines two network values, or its weight is one")


def _batch_norm(call: Call) -> Effect:
    """The effect of BatchNorm with running statistics: a scale and a shift per channel."""
    value, options = call.options["input"], call.options
    if options.get("training") or options["running_mean"] is None or options["running_var"] is None:
        raise NoBound("it uses the statistics of the batch")
    channels = (1, -1, *([1] * (value.tensor.dim() - 2)))
    dense, pruned = (_scale_and_shift(options, side) for side in ("dense", "pruned"))
    scale, shift = ((after - before).reshape(channels) for before, after in zip(dense, pruned))
    moved = scale * value.tensor + shift
    return _effect(value, float(pruned[0].abs().max()) * ROUND_UP, norm_B(moved, call.n_samples))


def _scale_and_shift(options: dict[str, Any], side: str) -> tuple[Tensor, Tensor]:
    """BatchNorm as scale * a + shift, in the dense or the pruned network."""
    names = ("running_mean", "running_var", "weight", "bias")
    sides: list[Any] = [None if options[name] is None else getattr(options[name], side) for name in names]
    mean, variance, weight, bias = sides
    scale = torch.rsqrt(variance + options.get("eps", options.get("epsilon")))
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


# Operations on several values.


def _add(call: Call) -> Effect:
    """The effect of a sum or a difference: the errors add up; a constant adds its own change."""
    scaled = "self" if call.name == "rsub" else "other"
    factors = {name: abs(float(call.options["alpha"])) if name == scaled else 1.0 for name in ("self", "other")}
    terms = [(call.options[name], factor) for name, factor in factors.items()]
    injected_B = torch.zeros(call.n_samples, dtype=torch.float64, device=call.out.device)
    error_B, gain = injected_B, 0.0
    for term, factor in terms:
        if isinstance(term, Value):
            gain = max(gain, factor * _spread(term.tensor, call.out))
            error_B = error_B + factor * _spread(term.tensor, call.out) * term.error_B
        elif isinstance(term, Constant):
            injected_B = injected_B + factor * norm_B(term.change.expand_as(call.out), call.n_samples)
    return Effect(nan_as_inf(error_B + injected_B), gain, injected_B)


def _mul(call: Call) -> Effect:
    """The effect of multiplying by a constant, or dividing by one."""
    left, right = call.options["self"], call.options["other"]
    if isinstance(left, Value) == isinstance(right, Value):
        raise NoBound("it combines two network values")
    if call.name == "div" and (call.options.get("rounding_mode") is not None or isinstance(right, Value)):
        raise NoBound("it divides by a network value or rounds")
    value, other = (left, right) if isinstance(left, Value) else (right, left)
    pair = (other.dense, other.pruned) if isinstance(other, Constant) else (other, other)
    sides = [torch.as_tensor(side, dtype=torch.float64, device=value.tensor.device) for side in pair]
    factor, pruned_factor = (1.0 / side for side in sides) if call.name == "div" else sides
    gain = float(pruned_factor.abs().max()) * _spread(value.tensor, call.out) * ROUND_UP
    moved = ((pruned_factor - factor) * value.tensor).expand_as(call.out)
    return _effect(value, gain, norm_B(moved, call.n_samples))


def _cat(call: Call) -> Effect:
    """The effect of concatenating: sqrt of the sum of squares."""
    if call.options["dim"] % call.out.dim() == 0:
        raise NoBound("it joins along the batch axis")
    injected_B = torch.zeros(call.n_samples, dtype=torch.float64, device=call.out.device)
    error_B = injected_B
    for part in call.options["tensors"]:
        if isinstance(part, Value):
            error_B = torch.hypot(error_B, part.error_B)
        elif part.dense.numel():
            injected_B = torch.hypot(injected_B, norm_B(part.change, call.n_samples))
    return Effect(nan_as_inf(torch.hypot(error_B, injected_B)), 1.0, injected_B)


def _spread(value: Tensor, out: Tensor) -> float:
    """sqrt of how often broadcasting to `out` repeats each value."""
    if value.dim() != out.dim() or value.shape[0] != out.shape[0]:
        raise NoBound("broadcasting moves the batch axis")
    return math.sqrt(out.numel() / value.numel()) if value.numel() else 1.0


# Operations with a gain that depends on their options.


def _movement_gain(call: Call) -> float:
    """sqrt of how often the operation writes one value, read off from what it does to numbered values."""
    value, n_samples = call.input.tensor, call.n_samples
    numbers = torch.arange(1, value.numel() + 1, dtype=torch.float64, device=value.device).reshape(value.shape)
    runs = (call.rerun(numbers), call.rerun(torch.zeros_like(numbers)), call.result)
    pieces = zip(*runs) if isinstance(call.result, tuple | list) else [runs]
    per_sample = max(value.numel() // n_samples, 1)
    most = 0
    for after, fill, seen in pieces:
        # Less the constants it fills in, what is left is a value's number, or zero.
        number = (after - fill).nan_to_num().long()
        if number.dim() == 0 or number.shape[0] % n_samples:
            raise NoBound("it moves the batch axis")
        own = torch.arange(n_samples, dtype=torch.int64, device=value.device)[:, None]
        by_sample = number.reshape(n_samples, -1)
        if bool(((by_sample > 0) & ((by_sample - 1) // per_sample != own)).any()):
            raise NoBound("it mixes the samples of the batch")
        # The numbers speak for the values only if these went the same way.
        moved = F.pad(value.reshape(-1), (1, 0))[number.clamp(min=0)]
        moved = torch.where(number > 0, moved, fill.to(moved.dtype))
        if seen.dtype != moved.dtype or not torch.equal(seen.nan_to_num(), moved.nan_to_num()):
            raise NoBound("it does more than move values")
        counts = number[number > 0].bincount()
        most = max(most, int(counts.max()) if counts.numel() else 0)
    return math.sqrt(most)


def _windows(call: Call) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The spatial sizes of a pooling's input, and its kernel and stride (that of the kernel where none is given)."""
    size = tuple(call.input.tensor.shape[2:])
    kernel, stride = call.options["kernel_size"], call.options["stride"]
    rank = int(call.name.removesuffix("_with_indices")[-2])
    if len(size) != rank:
        raise NoBound("its input has no batch axis")
    return size, {"kernel": _per_axis(kernel, rank), "stride": _per_axis(stride or kernel, rank)}


def _per_axis(values: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def _max_pool(call: Call) -> float:
    size, windows = _windows(call)
    return max_pool_gain(**windows, dilation=_per_axis(call.options["dilation"], len(size)), n_out=call.out.shape[2:])


def _avg_pool(call: Call) -> float:
    size, windows = _windows(call)
    if call.options["divisor_override"] is not None:
        raise NoBound("it overrides the divisor")
    rest = {name: call.options[name] for name in ("ceil_mode", "count_include_pad")}
    return average_pool_norm(size, **windows, padding=_per_axis(call.options["padding"], len(size)), **rest)


def _reduced(call: Call) -> int:
    """The number of values of one sample that a mean, a sum or a softmax joins."""
    shape, dim = call.input.tensor.shape, call.options.get("dim")
    dims = [d % len(shape) for d in (dim if isinstance(dim, Sequence) else [dim])] if dim not in (None, [], ()) else [0]
    if 0 in dims:
        raise NoBound("it acts along the batch axis or without naming its axis")
    if call.options.get("dtype") is not None or call.options.get("half_to_float"):
        raise NoBound("it changes the data type")
    return math.prod(shape[d] for d in dims)


def _softmax(call: Call) -> float:
    _reduced(call)
    return SOFTMAX_NORM


def _elu(call: Call) -> float:
    """scale * max(x, alpha (exp(x input_scale) - 1)): its slope above zero, and just below."""
    alpha = float(call.options["alpha"])
    scale, input_scale = (float(call.options.get(name, 1.0)) for name in ("scale", "input_scale"))
    if input_scale <= 0:
        raise NoBound("its input_scale is not positive")
    return abs(scale) * max(1.0, abs(alpha * input_scale)) * ROUND_UP


_EFFECTS: dict[str, Callable[[Call], Effect]] = {
    **dict.fromkeys(("addmm", "mm"), _linear),
    "convolution": _convolution,
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    **dict.fromkeys(("mul", "div"), _mul),
    "cat": _cat,
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
}
_GAINS: dict[str, Callable[[Call], float]] = {
    **{f"max_pool{rank}d_with_indices": _max_pool for rank in (2, 3)},
    **{f"avg_pool{rank}d": _avg_pool for rank in (2, 3)},
    "mean": lambda call: 1.0 / math.sqrt(_reduced(call)),
    "sum": lambda call: math.sqrt(_reduced(call)),
    "_softmax": _softmax,
    # I - 1 p' is a projection, as long as 1 p' is: ||1|| ||p|| <= sqrt(n)
    "_log_softmax": lambda call: math.sqrt(_reduced(call)),
    "leaky_relu": lambda call: max(1.0, abs(float(call.options["negative_slope"]))),
    "elu": _elu,
}
