"""How one operation of a network changes an error bound (T13), given the dense network's values.

Every sample has its own absolute error e = ||a^ - a||, a being the dense network's value and a^ the pruned one's. An
operation multiplies it by a Lipschitz constant (`gain`) and, if its own weights changed, adds `injected`, which is
computed on the dense network's actual values. An operation that is not in the tables below raises NoBound.

The bounds are for exact arithmetic; the slack ROUND_UP covers float64 rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.bounds.sound.known_operations import MOVEMENTS, Call, ConstantPair, NoBound, ValueAndError
from sipp.bounds.sound.operator_norms import (
    ROUND_UP,
    SLOPES,
    SOFTMAX_NORM,
    adaptive_average_pool_norm,
    adaptive_max_pool_gain,
    average_pool_norm,
    conv_geometry,
    conv_norm,
    linear_norm,
    max_pool_gain,
    per_axis,
)
from sipp.errors import ModelError

BATCH_NORM_EPS = 1e-5  # PyTorch's default
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
IDENTITIES = ("identity", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class Effect:
    """The error after an operation, the factor on the error before it and the error it added."""

    error_B: Tensor
    gain: float
    injected_B: Tensor


def effect(call: Call) -> Effect:
    """The error after one operation; raises NoBound for an operation, or a use of it, that has no bound."""
    op, options = call.op, call.options
    if op in _SEVERAL:
        return _SEVERAL[op](call)
    others = {name: option for name, option in options.items() if name != "input"}
    if any(isinstance(option, ValueAndError) for option in others.values()):
        raise NoBound("it combines two network values")
    if op in _WEIGHTED:
        return _WEIGHTED[op](call)
    if any(isinstance(option, ConstantPair) for option in others.values()):
        raise NoBound("it has a parameter")
    if op in MOVEMENTS:
        return _scaled(call, _movement_gain(call))
    if op in IDENTITIES:
        if options.get("training", op != "identity"):
            raise NoBound("it drops values at random even in eval mode")
        return _scaled(call, 1.0)
    if op in SLOPES:
        return _scaled(call, SLOPES[op])
    if op in _GAINS:
        return _scaled(call, _GAINS[op](call))
    raise NoBound("")


def norm_B(value: Tensor) -> Tensor:
    """The Euclidean norm of each sample, rounded up; no square over- or underflows, and NaN comes back as infinity."""
    rows = value.reshape(value.shape[0], -1).to(torch.float64)
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0])
    scale_B1 = rows.abs().amax(dim=1, keepdim=True)
    safe_B1 = torch.where(scale_B1 > 0, scale_B1, torch.ones_like(scale_B1))
    return nan_as_inf(torch.linalg.vector_norm(rows / safe_B1, dim=1) * scale_B1.squeeze(1) * ROUND_UP)


def nan_as_inf(error_B: Tensor) -> Tensor:
    """The errors with NaN (an overflow, or 0 times infinity) as infinity: an unknown error is never a small one."""
    return torch.where(torch.isnan(error_B), torch.full_like(error_B, math.inf), error_B)


def can_fold_batchnorm(call: Call) -> bool:
    """Whether a call is a linear map with fixed weights, whose rows are the channels of a BatchNorm after it."""
    if isinstance(call.options.get("weight"), ValueAndError) or isinstance(call.options.get("bias"), ValueAndError):
        return False
    return call.op in CONVOLUTIONS or (call.op == "linear" and call.value.dim() == 2)


def _effect(tracked: ValueAndError, gain: float, injected_B: Tensor) -> Effect:
    return Effect(nan_as_inf(gain * tracked.error_B + injected_B), gain, injected_B)


def _scaled(call: Call, gain: float) -> Effect:
    return _effect(call.input, gain, torch.zeros_like(call.input.error_B))


# Operations with weights: e <= ||W^|| e_in + ||(W^ - W) a + (b^ - b)||.


def _affine(call: Call) -> Effect:
    """The effect of a linear layer or a convolution."""
    return _affine_effect(call, _sides(call.options["weight"]), _sides(call.options.get("bias")))


def _affine_effect(call: Call, weights: tuple[Tensor, Tensor], biases: tuple[Any, Any]) -> Effect:
    """The effect of a linear map with these (dense, pruned) weights and biases."""
    a = call.input.value
    if weights[0].shape != weights[1].shape:
        raise ModelError(
            f"weight shapes differ, {tuple(weights[0].shape)} and {tuple(weights[1].shape)}", where=call.op
        )
    changed_bias = None if biases[0] is None else biases[1] - biases[0]
    if call.op == "linear":
        if a.dim() < 2:
            raise NoBound("its input has no batch axis")
        return _effect(call.input, linear_norm(weights[1]), norm_B(F.linear(a, weights[1] - weights[0], changed_bias)))
    _spatial(call)
    names = ("stride", "padding", "dilation", "groups", "padding_mode")
    geometry = {name: call.options[name] for name in names if name in call.options}
    gain = conv_norm(weights[1], input_size=tuple(a.shape[2:]), **geometry)
    return _effect(call.input, gain, norm_B(_convolve(a, weights[1] - weights[0], changed_bias, geometry)))


def _convolve(a: Tensor, weight: Tensor, bias: Tensor | None, geometry: dict[str, Any]) -> Tensor:
    """The convolution of `a`, with any padding mode."""
    rest = dict(geometry)
    mode = rest.pop("padding_mode", "zeros")
    if mode != "zeros":
        windows = {name: rest[name] for name in ("stride", "padding", "dilation") if name in rest}
        sides = conv_geometry(weight, padding_mode=mode, **windows).padding
        a = F.pad(a, [side for pair in reversed(sides) for side in pair], mode=mode)
        rest["padding"] = 0
    convolution: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    return convolution(a, weight, bias, **rest)


def _batch_norm(call: Call) -> Effect:
    """The effect of BatchNorm with running statistics: a scale and a shift per channel, or of the map before."""
    options = call.options
    if options.get("training", False) or options.get("running_mean") is None or options.get("running_var") is None:
        raise NoBound("it uses the statistics of the batch")
    (scale, shift), (pruned_scale, pruned_shift) = (_scale_and_shift(options, side) for side in (0, 1))
    before = call.input.affine
    if before is None:
        a = call.input.value
        channels = (1, -1, *([1] * (a.dim() - 2)))
        change = (pruned_scale - scale).reshape(channels) * a + (pruned_shift - shift).reshape(channels)
        return _effect(call.input, float(pruned_scale.abs().max()) * ROUND_UP, norm_B(change))
    weights, biases = [], []
    for side, (s, t) in enumerate(((scale, shift), (pruned_scale, pruned_shift))):
        weight, bias = _sides(before.options["weight"])[side], _sides(before.options.get("bias"))[side]
        weights.append(weight * s.reshape(-1, *([1] * (weight.dim() - 1))))
        biases.append(t if bias is None else t + s * bias)
    return _affine_effect(before, (weights[0], weights[1]), (biases[0], biases[1]))


def _scale_and_shift(options: dict[str, Any], side: int) -> tuple[Tensor, Tensor]:
    """BatchNorm as scale * a + shift, for the dense (0) or the pruned (1) network."""
    mean, variance = _sides(options["running_mean"])[side], _sides(options["running_var"])[side]
    weight, bias = _sides(options.get("weight"))[side], _sides(options.get("bias"))[side]
    scale = torch.rsqrt(variance + options.get("eps", BATCH_NORM_EPS))
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def _prelu(call: Call) -> Effect:
    """The effect of a ReLU with learned slopes."""
    slope, pruned_slope = _sides(call.options["weight"])
    a = call.input.value
    gain = max(1.0, float(pruned_slope.abs().max()))
    return _effect(call.input, gain, norm_B(F.prelu(a, pruned_slope) - F.prelu(a, slope)))


# Operations on several values.


def _add(call: Call) -> Effect:
    """The effect of a sum or a difference: the errors add up; a constant adds its own change."""
    terms = [(call.options["input"], 1.0), (call.options["other"], abs(float(call.options.get("alpha", 1))))]
    spreads = [_spread(term, call.value) * factor for term, factor in terms if isinstance(term, ValueAndError)]
    tracked_terms = [term for term, _ in terms if isinstance(term, ValueAndError)]
    injected_B = torch.zeros_like(tracked_terms[0].error_B)
    for term, factor in terms:
        if isinstance(term, ConstantPair):
            injected_B = injected_B + factor * norm_B(_change(term).expand_as(call.value))
    error_B = sum((spread * tracked.error_B for spread, tracked in zip(spreads, tracked_terms)), injected_B)
    return Effect(nan_as_inf(error_B), max(spreads), injected_B)


def _mul(call: Call) -> Effect:
    """The effect of multiplying or dividing by a constant."""
    left, right = call.options["input"], call.options["other"]
    if isinstance(left, ValueAndError) == isinstance(right, ValueAndError):
        raise NoBound("it combines two network values")
    if call.op == "div" and (call.options.get("rounding_mode") is not None or isinstance(right, ValueAndError)):
        raise NoBound("it divides by a network value or rounds")
    tracked, constant = (left, right) if isinstance(left, ValueAndError) else (right, left)
    sides = [torch.as_tensor(side, dtype=torch.float64, device=tracked.value.device) for side in _sides(constant)]
    factor, pruned_factor = (1.0 / side for side in sides) if call.op == "div" else sides
    gain = float(pruned_factor.abs().max()) * _spread(tracked, call.value) * ROUND_UP
    return _effect(tracked, gain, norm_B(((pruned_factor - factor) * tracked.value).expand_as(call.value)))


def _cat(call: Call) -> Effect:
    """The effect of concatenating or stacking: sqrt of the sum of squares."""
    dim, parts = call.options.get("dim", 0), call.options["tensors"]
    if dim % call.value.dim() == 0:
        raise NoBound("it joins along the batch axis")
    errors = [part.error_B for part in parts if isinstance(part, ValueAndError)]
    zero_B = torch.zeros_like(errors[0])
    injected_B = zero_B
    for part in parts:
        if isinstance(part, ConstantPair):
            injected_B = torch.hypot(injected_B, norm_B(_change(part)))
    error_B = zero_B
    for part_B in (*errors, injected_B):
        error_B = torch.hypot(error_B, part_B)
    return Effect(nan_as_inf(error_B), 1.0, injected_B)


def _sides(option: Any) -> tuple[Any, Any]:
    """A constant as (dense, pruned); anything but a ConstantPair is the same in both networks."""
    return (option.dense, option.pruned) if isinstance(option, ConstantPair) else (option, option)


def _change(pair: ConstantPair) -> Tensor:
    return pair.pruned.to(torch.float64) - pair.dense.to(torch.float64)


def _spread(tracked: ValueAndError, out: Tensor) -> float:
    """sqrt of how often broadcasting to `out` repeats each value."""
    if tracked.value.dim() != out.dim() or tracked.value.shape[0] != out.shape[0]:
        raise NoBound("broadcasting moves the batch axis")
    return math.sqrt(out.numel() / tracked.value.numel()) if tracked.value.numel() else 1.0


# Operations with a gain that depends on their options.


def _movement_gain(call: Call) -> float:
    """sqrt of how often the operation writes one value, read off from what it does to numbered values."""
    value = call.input.value
    numbers = torch.arange(1, value.numel() + 1, dtype=torch.float64, device=value.device).reshape(value.shape)
    runs = (call.rerun(numbers), call.rerun(torch.zeros_like(numbers)), call.value)
    pieces = zip(*runs) if isinstance(call.value, (tuple, list)) else [runs]
    per_sample = max(value.numel() // value.shape[0], 1)
    most = 0
    for after, fill, seen in pieces:
        # Less the constants it fills in, what is left is a value's number, or zero.
        number = (after - fill).nan_to_num().long()
        if number.dim() == 0 or number.shape[0] != value.shape[0]:
            raise NoBound("it moves the batch axis")
        own = torch.arange(value.shape[0], dtype=torch.int64, device=value.device)
        own = own.reshape(-1, *([1] * (number.dim() - 1)))
        if bool(((number > 0) & ((number - 1) // per_sample != own)).any()):
            raise NoBound("it mixes the samples of the batch")
        # The numbers speak for the values only if these went the same way.
        moved = F.pad(value.reshape(-1), (1, 0))[number.clamp(min=0)]
        moved = torch.where(number > 0, moved, fill.to(moved.dtype))
        if seen.dtype != moved.dtype or not torch.equal(seen.nan_to_num(), moved.nan_to_num()):
            raise NoBound("it does more than move values")
        counts = number[number > 0].bincount()
        most = max(most, int(counts.max()) if counts.numel() else 0)
    return math.sqrt(most)


def _spatial(call: Call) -> tuple[int, ...]:
    """The spatial sizes of the input of a convolution or pooling of the rank in its name."""
    rank, value = int(call.op[-2]), call.input.value
    if value.dim() != rank + 2:
        raise NoBound("its input has no batch axis")
    return tuple(value.shape[2:])


def _windows(call: Call) -> dict[str, tuple[int, ...]]:
    """Kernel and stride of a pooling, axis by axis (the stride is the kernel where none is given)."""
    kernel = per_axis(call.options["kernel_size"], len(_spatial(call)))
    stride = call.options.get("stride")
    return {"kernel": kernel, "stride": per_axis(stride, len(kernel)) if stride else kernel}


def _max_pool(call: Call) -> float:
    if not isinstance(call.value, Tensor):
        raise NoBound("it returns indices")
    dilation = per_axis(call.options.get("dilation", 1), len(_spatial(call)))
    return max_pool_gain(**_windows(call), dilation=dilation, n_out=call.value.shape[2:])


def _avg_pool(call: Call) -> float:
    options, size = call.options, _spatial(call)
    if options.get("divisor_override") is not None:
        raise NoBound("it overrides the divisor")
    return average_pool_norm(
        size,
        **_windows(call),
        padding=per_axis(options.get("padding", 0), len(size)),
        ceil_mode=options.get("ceil_mode", False),
        count_include_pad=options.get("count_include_pad", True),
    )


def _adaptive_max_pool(call: Call) -> float:
    if not isinstance(call.value, Tensor):
        raise NoBound("it returns indices")
    return adaptive_max_pool_gain(_spatial(call), call.value.shape[2:])


def _reduced(call: Call) -> int:
    """The number of values of one sample that a mean, a sum or a softmax joins."""
    value, dim = call.input.value, call.options.get("dim")
    dims = (
        [d % value.dim() for d in (dim if isinstance(dim, Sequence) else [dim])] if dim not in (None, (), []) else [0]
    )
    if 0 in dims:
        raise NoBound("it acts along the batch axis or without naming its axis")
    if call.options.get("dtype") is not None:
        raise NoBound("it changes the data type")
    return math.prod(value.shape[d] for d in dims)


def _softmax(call: Call) -> float:
    _reduced(call)
    return SOFTMAX_NORM


def _slope(call: Call, name: str, default: float) -> float:
    """The largest slope of an activation that is the identity above zero, where an option is its slope below."""
    return max(1.0, abs(float(call.options.get(name, default))))


def _celu(call: Call) -> float:
    if float(call.options.get("alpha", 1.0)) <= 0.0:
        raise NoBound("its alpha is not positive")
    return 1.0


_SEVERAL: dict[str, Callable[[Call], Effect]] = {
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "div": _mul,
    "cat": _cat,
    "stack": _cat,
}
_WEIGHTED: dict[str, Callable[[Call], Effect]] = {
    "linear": _affine,
    **dict.fromkeys(CONVOLUTIONS, _affine),
    "batch_norm": _batch_norm,
    "prelu": _prelu,
}
_GAINS: dict[str, Callable[[Call], float]] = {
    **{f"max_pool{rank}d": _max_pool for rank in (1, 2, 3)},
    **{f"avg_pool{rank}d": _avg_pool for rank in (1, 2, 3)},
    **{
        f"adaptive_avg_pool{rank}d": lambda call: adaptive_average_pool_norm(_spatial(call), call.value.shape[2:])
        for rank in (1, 2, 3)
    },
    **{f"adaptive_max_pool{rank}d": _adaptive_max_pool for rank in (1, 2, 3)},
    "mean": lambda call: 1.0 / math.sqrt(_reduced(call)),
    "sum": lambda call: math.sqrt(_reduced(call)),
    "softmax": _softmax,
    # I - 1 p' is a projection, as long as 1 p' is: ||1|| ||p|| <= sqrt(n)
    "log_softmax": lambda call: math.sqrt(_reduced(call)),
    "leaky_relu": lambda call: _slope(call, "negative_slope", 0.01),
    "elu": lambda call: _slope(call, "alpha", 1.0),
    "celu": _celu,
}
