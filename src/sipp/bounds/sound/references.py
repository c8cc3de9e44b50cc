"""What each operation that has a bound computes, by elementary tensor arithmetic: what its name says, no more.

The bounds (T12, T13) know an operation by its name and arguments. These formulas say what that name means; they call
none of the functions they stand for. A formula's parameters are all arguments that are understood: a call with
any other has no bound.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sipp.bounds.sound.calls import NoBound
from sipp.bounds.sound.operator_norms import conv_geometry, per_axis

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
# Arguments that change no value in eval mode, and the type that they must have: nothing else may hide in their place.
_WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    "inplace": (bool,),
    "_stacklevel": (int,),
    "momentum": (int, float, type(None)),
    "cudnn_enabled": (bool,),
    "return_indices": (bool,),
}
FEW_SAMPLES = 8  # of a convolution or pooling, which treats all samples alike


def reference(op: str, options: dict[str, Any], n_out: Sequence[int]) -> Tensor:
    """What an operation of this name gives with these arguments; its first samples are enough.

    Raises NoBound for an operation without a formula, and for an argument that its formula does not know.
    """
    formula = _FORMULAS.get(op)
    if formula is None:
        raise NoBound("")
    known = inspect.signature(formula).parameters
    chosen: dict[str, Any] = {}
    for name, option in options.items():
        if name in known:
            chosen[name] = option
        elif name not in _WITHOUT_EFFECT or not isinstance(option, _WITHOUT_EFFECT[name]):
            raise NoBound(f"its argument {name}={option!r:.40} is not understood")
    if "n_out" in known:
        chosen["n_out"] = tuple(n_out)
    try:
        return formula(**chosen)
    except NoBound:
        raise
    except Exception as error:
        raise NoBound(f"its arguments are not understood ({type(error).__name__}: {error})") from error


# Coordinate by coordinate.


def _between(a: Tensor, low: Any, high: Any) -> Tensor:
    a = a if low is None else torch.where(a < low, torch.full_like(a, low), a)
    return a if high is None else torch.where(a > high, torch.full_like(a, high), a)


def _relu(input: Tensor) -> Tensor:
    return _between(input, 0.0, None)


def _relu6(input: Tensor) -> Tensor:
    return _between(input, 0.0, 6.0)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return _between(input, min_val, max_val)


def _clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return _between(input, min, max)


def _tanh(input: Tensor) -> Tensor:
    shrunk = (-2.0 * input.abs()).expm1()
    return input.sign() * -shrunk / (2.0 + shrunk)


def _sigmoid(input: Tensor) -> Tensor:
    shrunk = (-input.abs()).exp()
    return torch.where(input >= 0, 1.0 / (1.0 + shrunk), shrunk / (1.0 + shrunk))


def _softplus(a: Tensor) -> Tensor:
    return _between(a, 0.0, None) + (-a.abs()).exp().log1p()


def _logsigmoid(input: Tensor) -> Tensor:
    return -_softplus(-input)


def _softsign(input: Tensor) -> Tensor:
    return input / (1.0 + input.abs())


def _abs(input: Tensor) -> Tensor:
    return torch.where(input < 0, -1.0 * input, input)


def _neg(input: Tensor) -> Tensor:
    return -1.0 * input


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * input * (1.0 + (input / math.sqrt(2.0)).erf())
    if approximate == "tanh":
        return 0.5 * input * (1.0 + _tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * input * input * input)))
    raise NoBound(f"its argument approximate={approximate!r:.40} is not understood")


def _silu(input: Tensor) -> Tensor:
    return input * _sigmoid(input)


def _mish(input: Tensor) -> Tensor:
    return input * _tanh(_softplus(input))


def _hardsigmoid(input: Tensor) -> Tensor:
    return _between(input / 6.0 + 0.5, 0.0, 1.0)


def _hardswish(input: Tensor) -> Tensor:
    return input * _hardsigmoid(input)


def _bent(a: Tensor, below: Tensor) -> Tensor:
    return torch.where(a > 0, a, below)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    return _bent(input, negative_slope * input)


def _elu(input: Tensor, alpha: float = 1.0) -> Tensor:
    return _bent(input, alpha * _between(input, None, 0.0).expm1())


def _celu(input: Tensor, alpha: float = 1.0) -> Tensor:
    return _bent(input, alpha * (_between(input, None, 0.0) / alpha).expm1())


def _selu(input: Tensor) -> Tensor:
    return SELU_SCALE * _elu(input, SELU_ALPHA)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    return _bent(input, (weight.reshape(1, -1, *([1] * (input.dim() - 2))) if input.dim() > 1 else weight) * input)


def _identity(input: Tensor) -> Tensor:
    return input


def _dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return input


# Along axes of a sample.


def _rows(input: Tensor, dim: Any) -> tuple[Tensor, list[int]]:
    """The values with the axes `dim` joined at the end, and these axes."""
    axes = sorted(d % input.dim() for d in (dim if isinstance(dim, Sequence) else [dim]))
    others = [d for d in range(input.dim()) if d not in axes]
    moved = input.permute(*others, *axes)
    return moved.reshape(*(input.shape[d] for d in others), -1), axes


def _sum(input: Tensor, dim: Any, keepdim: bool = False, dtype: None = None) -> Tensor:
    rows, axes = _rows(input, dim)
    total = rows @ torch.ones(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    for axis in axes if keepdim else ():
        total = total.unsqueeze(axis)
    return total


def _mean(input: Tensor, dim: Any, keepdim: bool = False, dtype: None = None) -> Tensor:
    return _sum(input, dim, keepdim) / _rows(input, dim)[0].shape[-1]


def _softmax(input: Tensor, dim: int, dtype: None = None) -> Tensor:
    powers = (input - input.amax(dim, keepdim=True)).exp()
    return powers / _sum(powers, dim, keepdim=True)


def _log_softmax(input: Tensor, dim: int, dtype: None = None) -> Tensor:
    shifted = input - input.amax(dim, keepdim=True)
    return shifted - _sum(shifted.exp(), dim, keepdim=True).log()


# Maps with weights.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = input @ weight.T
    return out if bias is None else out + bias


def _batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    eps: float = 1e-5,
) -> Tensor:
    channels = (1, -1, *([1] * (input.dim() - 2)))
    out = (input - running_mean.reshape(channels)) / (running_var.reshape(channels) + eps) ** 0.5
    out = out if weight is None else out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def _taps(
    a: Tensor, n_out: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], left: Any
) -> Any:
    """For each position in a window: its indices along each axis, one per output, from the unpadded start."""
    axes = zip(n_out, kernel, stride, dilation, left)
    at = [
        [torch.arange(n, dtype=torch.int64, device=a.device) * s + j * d - start for j in range(k)]
        for n, k, s, d, start in axes
    ]  # axis by axis, tap by tap
    return itertools.product(*at)


def _picked(a: Tensor, at: Sequence[Tensor], mode: str = "zeros", fill: float = 0.0) -> Tensor:
    """The values at these indices of each spatial axis, and what stands in for those outside."""
    for axis, index in enumerate(at, start=2):
        n = a.shape[axis]
        if mode == "circular":
            a = a.index_select(axis, index % n)
        elif mode == "replicate":
            a = a.index_select(axis, index.clamp(0, n - 1))
        elif mode == "reflect":
            a = a.index_select(axis, (n - 1) - ((n - 1) - index.abs()).abs())
        else:
            inside = ((index >= 0) & (index < n)).reshape(-1, *([1] * (a.dim() - axis - 1)))
            a = torch.where(
                inside,
                a.index_select(axis, index.clamp(0, n - 1)),
                torch.full((), fill, dtype=a.dtype, device=a.device),
            )
    return a


def _conv(
    input: Tensor,
    weight: Tensor,
    n_out: Sequence[int],
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    padding_mode: Any = "zeros",
) -> Tensor:
    a = input[:FEW_SAMPLES]
    g = conv_geometry(weight, stride=stride, padding=padding, dilation=dilation, padding_mode=padding_mode)
    starts = [left for left, _ in g.padding]
    weight_GFCT = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    total: Tensor | None = None
    for tap, at in enumerate(_taps(a, n_out, g.kernel, g.stride, g.dilation, starts)):
        seen_BGCP = _picked(a, at, padding_mode).reshape(a.shape[0], groups, weight.shape[1], -1)
        term = weight_GFCT[..., tap] @ seen_BGCP
        total = term if total is None else total + term
    assert total is not None
    out = total.reshape(a.shape[0], weight.shape[0], *n_out)
    return out if bias is None else out + bias.reshape(1, -1, *([1] * len(n_out)))


# Pooling.


def _windows(kernel_size: Any, stride: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kernel = per_axis(kernel_size, rank)
    return kernel, per_axis(stride, rank) if stride else kernel


def _max_pool(
    input: Tensor,
    kernel_size: Any,
    n_out: Sequence[int],
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    a, rank = input[:FEW_SAMPLES], len(n_out)
    kernel, strides = _windows(kernel_size, stride, rank)
    out = a.new_full((*a.shape[:2], *n_out), -math.inf)
    for at in _taps(a, n_out, kernel, strides, per_axis(dilation, rank), per_axis(padding, rank)):
        seen = _picked(a, at, fill=-math.inf)
        out = torch.where(seen > out, seen, out)
    return out


def _avg_pool(
    input: Tensor,
    kernel_size: Any,
    n_out: Sequence[int],
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: None = None,
) -> Tensor:
    a, rank = input[:FEW_SAMPLES], len(n_out)
    kernel, strides = _windows(kernel_size, stride, rank)
    paddings = per_axis(padding, rank)
    sides = [p if count_include_pad else 0 for p in paddings]
    out, count = a.new_zeros((*a.shape[:2], *n_out)), a.new_zeros(n_out)
    for at in _taps(a, n_out, kernel, strides, (1,) * rank, paddings):
        out = out + _picked(a, at)
        counts = a.new_ones(n_out)
        for axis, (index, n, side) in enumerate(zip(at, a.shape[2:], sides)):
            inside = (index >= -side) & (index < n + side)
            counts = counts * inside.to(a).reshape(-1, *([1] * (rank - axis - 1)))
        count = count + counts
    return out / count


def _adaptive(input: Tensor, n_out: Sequence[int], joined: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Windows from floor(i n / m) to ceil((i + 1) n / m) along each axis, one axis after the other."""
    a = input[:FEW_SAMPLES]
    for axis, m in enumerate(n_out, start=2):
        n = a.shape[axis]
        pieces = [joined(a.narrow(axis, i * n // m, -(-(i + 1) * n // m) - i * n // m), axis) for i in range(m)]
        out = a.new_empty((*a.shape[:axis], m, *a.shape[axis + 1 :]))
        for i, piece in enumerate(pieces):
            out.select(axis, i).copy_(piece)
        a = out
    return a


def _adaptive_avg_pool(input: Tensor, output_size: Any, n_out: Sequence[int]) -> Tensor:
    return _adaptive(input, n_out, lambda a, axis: _mean(a, axis))


def _adaptive_max_pool(input: Tensor, output_size: Any, n_out: Sequence[int]) -> Tensor:
    return _adaptive(input, n_out, lambda a, axis: a.amax(axis))


# Several values.


def _add(input: Any, other: Any, alpha: float = 1) -> Any:
    return input + alpha * other


def _sub(input: Any, other: Any, alpha: float = 1) -> Any:
    return input - alpha * other


def _mul(input: Any, other: Any) -> Any:
    return input * other


def _div(input: Any, other: Any, rounding_mode: None = None) -> Any:
    return input / other


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    axis = dim % tensors[0].dim()
    sizes = [part.shape[axis] for part in tensors]
    out = tensors[0].new_empty((*tensors[0].shape[:axis], sum(sizes), *tensors[0].shape[axis + 1 :]))
    for part, start, size in zip(tensors, itertools.accumulate([0, *sizes]), sizes):
        out.narrow(axis, start, size).copy_(part)
    return out


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    axis = dim % (tensors[0].dim() + 1)
    return _cat([part.unsqueeze(axis) for part in tensors], axis)


_FORMULAS: dict[str, Callable[..., Any]] = {
    **{f.__name__[1:]: f for f in (_relu, _relu6, _hardtanh, _clamp, _tanh, _sigmoid, _logsigmoid, _softsign, _abs)},
    **{f.__name__[1:]: f for f in (_neg, _gelu, _silu, _mish, _hardsigmoid, _hardswish, _leaky_relu, _elu, _celu)},
    **{f.__name__[1:]: f for f in (_selu, _prelu, _identity, _sum, _mean, _softmax, _log_softmax, _linear)},
    **{f.__name__[1:]: f for f in (_batch_norm, _add, _sub, _mul, _div, _cat, _stack)},
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _dropout),
    **{f"conv{rank}d": _conv for rank in (1, 2, 3)},
    **{f"max_pool{rank}d": _max_pool for rank in (1, 2, 3)},
    **{f"avg_pool{rank}d": _avg_pool for rank in (1, 2, 3)},
    **{f"adaptive_avg_pool{rank}d": _adaptive_avg_pool for rank in (1, 2, 3)},
    **{f"adaptive_max_pool{rank}d": _adaptive_max_pool for rank in (1, 2, 3)},
}
