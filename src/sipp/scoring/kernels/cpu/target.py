"""What the processor that Numba compiles for can do, and the one product and sum that is rounded once.

Whether a product and a sum become one instruction is decided here. Left to a compiler it would depend on what was
inlined where, and so on which functions came from Numba's cache: the same seed would not give the same bits.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, codegen, types
from numba.extending import intrinsic

_FEATURES = (
    codegen.get_host_cpu_features() if numba.config.CPU_FEATURES is None else numba.config.CPU_FEATURES  # type: ignore[attr-defined]
).split(",")
WIDE = "+avx512f" in _FEATURES
HAS_FUSED = "+fma" in _FEATURES or platform.machine() in ("aarch64", "arm64")


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in LLVM instructions, rounded once where the processor has that, else twice."""
    if not HAS_FUSED:
        return b.fadd(b.fmul(x, y), z)
    kind = x.type
    lanes, scalar = (f"v{kind.count}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
    name = f"llvm.fma.{lanes}{scalar.intrinsic_name}"  # llvmlite's own `fma` knows no vectors
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z])


def _emit_product_and_sum(_: Any, x: Any, y: Any, z: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return fused(builder, *given)

    return types.float64(types.float64, types.float64, types.float64), generate


def _product_and_sum(x: float, y: float, z: float) -> float:
    return x * y + z


# x * y + z of float64 for compiled loops to call; plain Python where nothing is compiled
product_and_sum: Any = _product_and_sum if numba.config.DISABLE_JIT else intrinsic(_emit_product_and_sum)  # type: ignore[attr-defined]
