"""exp, sigmoid and tanh of vectors as LLVM instructions, to about 1e-7 of 1; NaN stays NaN."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from sipp.runtime.code import I32, constant, vector
from sipp.scoring.kernels.cpu.llvm import fused

LARGEST = 88.0  # exp of more is infinite, of less than its negative 0 (float32)
SHIFTER = 1.5 * 2**23  # added to a float32 it leaves the nearest whole number in the last bits
BIAS, MANTISSA = 127, 23  # of float32
LN2_HIGH, LN2_LOW = (
    0.693359375,
    -2.12194440e-4,
)  # their sum is ln 2; small multiples of the first are exact
TERMS = [1 / math.factorial(k) for k in range(7, -1, -1)]


def exp(b: Any, x: Any, lanes: int) -> Any:
    """e ** x, of x cut to +- LARGEST."""
    high, low = constant(LARGEST, lanes), constant(-LARGEST, lanes)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    shifter = constant(SHIFTER, lanes)
    shifted = b.fadd(b.fmul(x, constant(1 / math.log(2), lanes)), shifter)
    whole = b.fsub(shifted, shifter)
    rest = fused(b, whole, constant(-LN2_HIGH, lanes), x)
    rest = fused(b, whole, constant(-LN2_LOW, lanes), rest)
    total = constant(TERMS[0], lanes)
    for term in TERMS[1:]:
        total = fused(b, total, rest, constant(term, lanes))
    return b.fmul(total, _power_of_two(b, shifted, lanes))


def _power_of_two(b: Any, shifted: Any, lanes: int) -> Any:
    """2 ** n of the whole number in the last bits."""
    kind = vector(lanes, I32)
    bits = b.bitcast(shifted, kind)
    exponent = b.shl(b.add(bits, _whole(BIAS, lanes)), _whole(MANTISSA, lanes))
    return b.bitcast(exponent, vector(lanes))


def _whole(value: int, lanes: int) -> Any:
    return I32(value) if lanes == 1 else ir.Constant(vector(lanes, I32), [value] * lanes)


def sigmoid(b: Any, x: Any, lanes: int) -> Any:
    one = constant(1.0, lanes)
    return b.fdiv(one, b.fadd(one, exp(b, b.fsub(constant(0.0, lanes), x), lanes)))


def tanh(b: Any, x: Any, lanes: int) -> Any:
    one, two = constant(1.0, lanes), constant(2.0, lanes)
    return b.fsub(one, b.fdiv(two, b.fadd(one, exp(b, b.fmul(two, x), lanes))))
