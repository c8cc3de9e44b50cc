"""exp, sigmoid and tanh of vectors as LLVM instructions, to a few 1e-7 of themselves; NaN stays NaN.

exp is infinite where float32 ends, and 0 below LOWEST: sigmoid then reaches 0 where torch's does.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from sipp.runtime.code import I32, constant, vector
from sipp.scoring.kernels.cpu.llvm import fused

HIGHEST, LOWEST = 89.0, -86.0  # exp of more is infinite (float32); of less it is taken as 0
SATURATED = 40.0  # exp of it plus 2 is itself
SHIFTER = 1.5 * 2**23  # added to a float32 it leaves the nearest whole number in the last bits
BIAS, MANTISSA = 127, 23  # of float32
LN2_HIGH, LN2_LOW = (
    0.693359375,
    -2.12194440e-4,
)  # their sum is ln 2; small multiples of the first are exact
TERMS = [1 / math.factorial(k) for k in range(7, -1, -1)]


def exp(b: Any, x: Any, lanes: int) -> Any:
    """e ** x. The power of two is halved, and the result doubled: the largest results need 2 ** 128."""
    is_low = b.fcmp_ordered("<", x, constant(LOWEST, lanes))
    rest, shifted = _reduced(b, _cut(b, x, LOWEST, HIGHEST, lanes), lanes)
    half = b.fmul(_polynomial(b, rest, TERMS, lanes), _power_of_two(b, shifted, BIAS - 1, lanes))
    return b.select(is_low, constant(0.0, lanes), b.fadd(half, half))


def sigmoid(b: Any, x: Any, lanes: int) -> Any:
    one = constant(1.0, lanes)
    return b.fdiv(one, b.fadd(one, exp(b, b.fsub(constant(0.0, lanes), x), lanes)))


def tanh(b: Any, x: Any, lanes: int) -> Any:
    """m / (m + 2) of m = e ** 2x - 1 = 2 ** n (e ** r - 1) + (2 ** n - 1): near zero n is 0, and nothing cancels."""
    rest, shifted = _reduced(b, _cut(b, b.fadd(x, x), -SATURATED, SATURATED, lanes), lanes)
    power = _power_of_two(b, shifted, BIAS, lanes)
    part = b.fmul(rest, _polynomial(b, rest, TERMS[:-1], lanes))
    m = fused(b, power, part, b.fsub(power, constant(1.0, lanes)))
    return b.fdiv(m, b.fadd(m, constant(2.0, lanes)))


def _cut(b: Any, x: Any, low: float, high: float, lanes: int) -> Any:
    """x within low .. high; NaN stays."""
    for sign, limit in ((">", constant(high, lanes)), ("<", constant(low, lanes))):
        x = b.select(b.fcmp_ordered(sign, x, limit), limit, x)
    return x


def _reduced(b: Any, x: Any, lanes: int) -> tuple[Any, Any]:
    """x = n ln 2 + r: r, and n in the last bits of a shifted number."""
    shifter = constant(SHIFTER, lanes)
    shifted = b.fadd(b.fmul(x, constant(1 / math.log(2), lanes)), shifter)
    whole = b.fsub(shifted, shifter)
    rest = fused(b, whole, constant(-LN2_HIGH, lanes), x)
    return fused(b, whole, constant(-LN2_LOW, lanes), rest), shifted


def _polynomial(b: Any, x: Any, terms: list[float], lanes: int) -> Any:
    total = constant(terms[0], lanes)
    for term in terms[1:]:
        total = fused(b, total, x, constant(term, lanes))
    return total


def _power_of_two(b: Any, shifted: Any, bias: int, lanes: int) -> Any:
    """2 ** (n + bias - BIAS) of the whole number n in the last bits."""
    kind = vector(lanes, I32)
    exponent = b.shl(b.add(b.bitcast(shifted, kind), _whole(bias, lanes)), _whole(MANTISSA, lanes))
    return b.bitcast(exponent, vector(lanes))


def _whole(value: int, lanes: int) -> Any:
    return I32(value) if lanes == 1 else ir.Constant(vector(lanes, I32), [value] * lanes)
