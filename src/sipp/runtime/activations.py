"""Activations that can be fused into a product, as LLVM instructions and as torch functions.

The vector versions of exp, sigmoid and tanh have a relative error of a few 1e-7; NaN stays NaN. exp overflows to
infinity like float32, and is 0 below LOWEST, so sigmoid reaches 0 where torch's does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.native import vector

ATEN = torch.ops.aten
NONE = "none"

BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    NONE: lambda x: x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_PLAIN = {getattr(ATEN, name).default: name for name in ("relu", "sigmoid", "tanh", "silu")}

HIGHEST, LOWEST = 89.0, -86.0  # exp is infinite above (float32), and taken as 0 below
SATURATED = 40.0  # exp(40) + 2 == exp(40) in float32
SHIFTER = 1.5 * 2**23  # adding it rounds a float32 to an integer, in the last bits
BIAS, MANTISSA = 127, 23  # of float32
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # sum to ln 2; small multiples of the first are exact
TERMS = [1 / math.factorial(k) for k in range(7, -1, -1)]

# erf(z) = 1 - polynomial(1 / (1 + ERF_P z)) exp(-z^2) for z >= 0, to 1.5e-7 (Abramowitz and Stegun 7.1.26)
ERF_P = 0.3275911
ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def activation_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of an activation that can be fused into a product, or None."""
    if target is ATEN.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(kwargs.get("approximate", "none"))
    if target is ATEN.hardtanh.default:
        return "relu6" if list(args[1:]) in ([0, 6], [0.0, 6.0]) else None
    return _PLAIN.get(target) if not kwargs else None


def activate(b: Any, act: str, value: Any) -> Any:
    """Applies an activation to a vector; NaN stays NaN."""
    zero = vector.like(value, 0.0)
    if act in ("relu", "relu6"):
        value = b.select(b.fcmp_ordered("<", value, zero), zero, value)
        six = vector.like(value, 6.0)
        return value if act == "relu" else b.select(b.fcmp_ordered(">", value, six), six, value)
    if act == "sigmoid":
        return sigmoid(b, value)
    if act == "tanh":
        return tanh(b, value)
    if act == "silu":
        return b.fmul(value, sigmoid(b, value))
    if act == "gelu":
        return _gelu(b, value)
    if act == "gelu_tanh":
        cube = b.fmul(b.fmul(value, value), value)
        inner = b.fmul(
            vector.fused(b, cube, vector.like(value, 0.044715), value), vector.like(value, math.sqrt(2 / math.pi))
        )
        half = b.fmul(value, vector.like(value, 0.5))
        return vector.fused(b, half, tanh(b, inner), half)
    return value


def _gelu(b: Any, x: Any) -> Any:
    """x Phi(x), Phi(x) = 1 - q for x > 0 and q below, where q = polynomial exp(-x^2 / 2) / 2."""
    zero, one = vector.like(x, 0.0), vector.like(x, 1.0)
    is_negative = b.fcmp_ordered("<", x, zero)
    size = b.select(is_negative, b.fsub(zero, x), x)
    t = b.fdiv(one, vector.fused(b, size, vector.like(x, ERF_P / math.sqrt(2)), one))
    total = _polynomial(b, t, ERF_TERMS)
    power = exp(b, b.fmul(b.fmul(x, x), vector.like(x, -0.5)))
    q = b.fmul(b.fmul(b.fmul(total, t), power), vector.like(x, 0.5))
    return b.fmul(x, b.select(is_negative, q, b.fsub(one, q)))


def exp(b: Any, x: Any) -> Any:
    """e ** x. Uses half the power of two and doubles the result, because the largest results need 2 ** 128."""
    is_low = b.fcmp_ordered("<", x, vector.like(x, LOWEST))
    rest, shifted = _reduce_range(b, _clamp(b, x, LOWEST, HIGHEST))
    half = b.fmul(_polynomial(b, rest, TERMS), _power_of_two(b, shifted, BIAS - 1))
    return b.select(is_low, vector.like(x, 0.0), b.fadd(half, half))


def sigmoid(b: Any, x: Any) -> Any:
    one = vector.like(x, 1.0)
    return b.fdiv(one, b.fadd(one, exp(b, b.fsub(vector.like(x, 0.0), x))))


def tanh(b: Any, x: Any) -> Any:
    """m / (m + 2) with m = e ** 2x - 1 = 2 ** n (e ** r - 1) + (2 ** n - 1): near zero n is 0, so nothing cancels."""
    rest, shifted = _reduce_range(b, _clamp(b, b.fadd(x, x), -SATURATED, SATURATED))
    power = _power_of_two(b, shifted, BIAS)
    part = b.fmul(rest, _polynomial(b, rest, TERMS[:-1]))
    m = vector.fused(b, power, part, b.fsub(power, vector.like(x, 1.0)))
    return b.fdiv(m, b.fadd(m, vector.like(x, 2.0)))


def _clamp(b: Any, x: Any, low: float, high: float) -> Any:
    """x clamped to low .. high; NaN stays NaN."""
    for sign, limit in ((">", vector.like(x, high)), ("<", vector.like(x, low))):
        x = b.select(b.fcmp_ordered(sign, x, limit), limit, x)
    return x


def _reduce_range(b: Any, x: Any) -> tuple[Any, Any]:
    """Splits x = n ln 2 + r; returns r, and n in the last bits of a shifted number."""
    shifter = vector.like(x, SHIFTER)
    shifted = b.fadd(b.fmul(x, vector.like(x, 1 / math.log(2))), shifter)
    whole = b.fsub(shifted, shifter)
    rest = vector.fused(b, whole, vector.like(x, -LN2_HIGH), x)
    return vector.fused(b, whole, vector.like(x, -LN2_LOW), rest), shifted


def _polynomial(b: Any, x: Any, terms: Sequence[float]) -> Any:
    total = vector.like(x, terms[0])
    for term in terms[1:]:
        total = vector.fused(b, total, x, vector.like(x, term))
    return total


def _power_of_two(b: Any, shifted: Any, bias: int) -> Any:
    """2 ** (n + bias - BIAS) for the integer n in the last bits."""
    lanes = vector.lanes_of(shifted)
    more, places = (vector.constant(number, lanes, vector.I32) for number in (bias, MANTISSA))
    exponent = b.shl(b.add(b.bitcast(shifted, vector.of(lanes, vector.I32)), more), places)
    return b.bitcast(exponent, shifted.type)
