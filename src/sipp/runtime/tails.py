"""What can follow a product before its result is written: an activation, in LLVM instructions and by torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.runtime import curves
from sipp.runtime.code import Loop, constant
from sipp.scoring.kernels.cpu.llvm import fused

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

# erf(z) = 1 - polynomial(1 / (1 + ERF_P z)) exp(-z^2) for z >= 0, to 1.5e-7 (Abramowitz and Stegun 7.1.26)
ERF_P = 0.3275911
ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def tail_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of an activation that a product can take over, or None."""
    if target is ATEN.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(kwargs.get("approximate", "none"))
    if target is ATEN.hardtanh.default:
        return "relu6" if list(args[1:]) in ([0, 6], [0.0, 6.0]) else None
    return _PLAIN.get(target) if not kwargs else None


def emit_tail(loop: Loop, act: str, value: Any, lanes: int) -> Any:
    """The activation of a vector; NaN stays NaN."""
    b, zero = loop.b, constant(0.0, lanes)
    if act in ("relu", "relu6"):
        value = b.select(b.fcmp_ordered("<", value, zero), zero, value)
        six = constant(6.0, lanes)
        return value if act == "relu" else b.select(b.fcmp_ordered(">", value, six), six, value)
    if act == "sigmoid":
        return curves.sigmoid(b, value, lanes)
    if act == "tanh":
        return curves.tanh(b, value, lanes)
    if act == "silu":
        return b.fmul(value, curves.sigmoid(b, value, lanes))
    if act == "gelu":
        return _gelu(b, value, lanes)
    if act == "gelu_tanh":
        cube = b.fmul(b.fmul(value, value), value)
        inner = b.fmul(fused(b, cube, constant(0.044715, lanes), value), constant(math.sqrt(2 / math.pi), lanes))
        half = b.fmul(value, constant(0.5, lanes))
        return fused(b, half, curves.tanh(b, inner, lanes), half)
    return value


def _gelu(b: Any, x: Any, lanes: int) -> Any:
    """x Phi(x), Phi(x) = 1 - q for x > 0 and q below, where q = polynomial exp(-x^2 / 2) / 2."""
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    is_negative = b.fcmp_ordered("<", x, zero)
    size = b.select(is_negative, b.fsub(zero, x), x)
    t = b.fdiv(one, fused(b, size, constant(ERF_P / math.sqrt(2), lanes), one))
    total = constant(ERF_TERMS[0], lanes)
    for term in ERF_TERMS[1:]:
        total = fused(b, total, t, constant(term, lanes))
    power = curves.exp(b, b.fmul(b.fmul(x, x), constant(-0.5, lanes)), lanes)
    q = b.fmul(b.fmul(b.fmul(total, t), power), constant(0.5, lanes))
    return b.fmul(x, b.select(is_negative, q, b.fsub(one, q)))
