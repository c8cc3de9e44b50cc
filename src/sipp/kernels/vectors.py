"""Small pieces of LLVM vector code that the compiled CPU loops are made of, and the vector width of this machine.

A change here is not noticed by Numba's cache of `simd.py`, which looks at that file only: touch it too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WIDE = bool(dict(llvm.get_host_cpu_features()).get("avx512f"))
LANES = 16 if WIDE else 8  # floats of one vector register
FLOAT = 4  # bytes

F32, I1, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(32), ir.IntType(64)
VECTOR_TYPE = ir.VectorType(F32, LANES)
ZERO = ir.Constant(VECTOR_TYPE, [0.0] * LANES)


def primitive(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `emit(builder, *values)`, which writes LLVM code, becomes a function for compiled code to call."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is types.none else made

            return result(*arguments), codegen

        # Numba passes arguments by name, so the signature is that of `emit`, one name for each argument
        names = ("typingctx", *(f"x{i}" for i in range(len(arguments))))
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return wrap


def load(b: Any, address: Any, offset: int = 0, kind: Any = VECTOR_TYPE) -> Any:
    return b.load(b.inttoptr(b.add(address, I64(offset)), kind.as_pointer()), align=FLOAT, typ=kind)


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    b.store(value, b.inttoptr(b.add(address, I64(offset)), value.type.as_pointer()), align=FLOAT)


def pick(b: Any, left: Any, right: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def splat(b: Any, scalar: Any, kind: Any = VECTOR_TYPE) -> Any:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return pick(b, one, one, [0] * kind.count)


def larger(b: Any, left: Any, right: Any) -> Any:
    """left if left > right else right: what one vmaxps does, bit for bit, with no assumption about NaN."""
    return b.select(b.fcmp_ordered(">", left, right), left, right)


def across(b: Any, vector: Any) -> Any:
    """The largest lane."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        low, high = (pick(b, vector, vector, list(range(i, i + half))) for i in (0, half))
        vector = larger(b, low, high)
    return b.extract_element(vector, I32(0))


def transposed_max(b: Any, vectors: list[Any]) -> Any:
    """One vector whose lane i is the largest lane of vectors[i]: pairs are merged until one is left."""
    lanes = width = vectors[0].type.count
    while len(vectors) > 1:
        half = width // 2  # each merged vector holds lanes // half originals, `half` lanes of each
        starts = [source + start for source in (0, lanes) for start in range(0, lanes, width)]
        low = [start + i for start in starts for i in range(half)]
        high = [start + half + i for start in starts for i in range(half)]
        vectors = [larger(b, pick(b, x, y, low), pick(b, x, y, high)) for x, y in zip(vectors[::2], vectors[1::2])]
        width = half
    return vectors[0]
