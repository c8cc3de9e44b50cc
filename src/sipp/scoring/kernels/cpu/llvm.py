"""How a function of LLVM instructions is written that compiled loops can call: `primitive`, and pieces to write it of.

Whether a product and a sum become one instruction is decided here (`fused`). Left to a compiler it would depend on what
was inlined where, and so on which functions came from Numba's cache: the same seed would not give the same bits.

`b` is the builder that instructions are appended to. Arrays are handed over as addresses, offsets are in bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from sipp.scoring.kernels.cpu.host import HAS_FUSED, IS_COMPILED
from sipp.scoring.kernels.cpu.values import primitive as primitive

F32, I1, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(32), ir.IntType(64)
_ALIGN = 4  # bytes: of any number that is loaded or stored


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once where the processor has that, else twice."""
    if not HAS_FUSED:
        return b.fadd(b.fmul(x, y), z)
    kind = x.type
    lanes, scalar = (f"v{kind.count}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
    name = f"llvm.fma.{lanes}{scalar.intrinsic_name}"  # llvmlite's own `fma` knows no vectors
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z])


def _product_and_sum(x: float, y: float, z: float) -> float:
    return x * y + z


# x * y + z of float64 for compiled loops to call; plain Python where nothing is compiled
product_and_sum: Any = primitive(types.float64, *[types.float64] * 3)(fused) if IS_COMPILED else _product_and_sum


def load(b: Any, address: Any, offset: int, kind: Any) -> Any:
    return b.load(b.inttoptr(b.add(address, I64(offset)), kind.as_pointer()), align=_ALIGN, typ=kind)


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    b.store(value, b.inttoptr(b.add(address, I64(offset)), value.type.as_pointer()), align=_ALIGN)


def calling(n_arguments: int) -> Any:
    """A function for compiled code: calls what lies at an address (`host.Native`) with this many whole numbers."""

    @primitive(types.none, *[types.int64] * (1 + n_arguments))
    def call(b: Any, address: Any, *numbers: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * n_arguments)
        b.call(b.inttoptr(address, kind.as_pointer()), numbers)

    return call


def reading(record: type) -> Any:
    """A function for compiled code: the record of whole numbers (a NamedTuple class) that lies at an address."""
    n = len(record._fields)  # type: ignore[attr-defined]

    @primitive(types.NamedUniTuple(types.int64, n, record), types.int64)
    def read(b: Any, address: Any) -> Any:
        made = ir.Constant(ir.ArrayType(I64, n), ir.Undefined)
        for i in range(n):
            made = b.insert_value(made, load(b, address, 8 * i, I64), i)
        return made

    return read


def _element(b: Any, address: Any, i: Any, kind: Any) -> Any:
    """The place of element i of an array; counted from one address, so that loops over it become vectors."""
    return b.gep(b.inttoptr(address, kind.as_pointer()), [i], source_etype=kind)


def array_of(number: Any, kind: Any) -> tuple[Any, Any]:
    """Two functions for compiled code, get(address, i) and put(address, i, value), of an array of such numbers."""

    @primitive(number, types.int64, types.int64)
    def get(b: Any, address: Any, i: Any) -> Any:
        return b.load(_element(b, address, i, kind), align=kind_bytes, typ=kind)

    @primitive(types.none, types.int64, types.int64, number)
    def put(b: Any, address: Any, i: Any, value: Any) -> None:
        b.store(value, _element(b, address, i, kind), align=kind_bytes)

    kind_bytes = number.bitwidth // 8
    return get, put


float_at, put_float = array_of(types.float32, F32)
double_at, put_double = array_of(types.float64, ir.DoubleType())
byte_at, put_byte = array_of(types.uint8, ir.IntType(8))
short_at, put_short = array_of(types.int16, ir.IntType(16))
int_at, put_int = array_of(types.int32, I32)
long_at, put_long = array_of(types.int64, I64)


def pick(b: Any, left: Any, right: Any, lanes: list[int]) -> Any:
    """The lanes of these numbers, those of `right` counted on after those of `left`."""
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def splat(b: Any, scalar: Any, kind: Any) -> Any:
    """A vector with this number in all lanes."""
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return pick(b, one, one, [0] * kind.count)


def larger(b: Any, left: Any, right: Any) -> Any:
    """left if left > right else right: what one vmaxps does, bit for bit, with no assumption about NaN."""
    return b.select(b.fcmp_ordered(">", left, right), left, right)


def smaller(b: Any, left: Any, right: Any) -> Any:
    """left if left < right else right."""
    return b.select(b.fcmp_ordered("<", left, right), left, right)


def tree(b: Any, join: Any, values: list[Any]) -> Any:
    """All values joined, two by two."""
    while len(values) > 1:
        values = [join(b, *values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def across(b: Any, join: Any, vector: Any) -> Any:
    """The lanes of a vector joined into one number."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        vector = join(b, *(pick(b, vector, vector, list(range(i, i + half))) for i in (0, half)))
    return b.extract_element(vector, I32(0))


def transposed(b: Any, vectors: list[Any]) -> list[Any]:
    """n vectors of n lanes with lanes and vectors exchanged, one bit of their indices after the other."""
    vectors, n = list(vectors), len(vectors)
    bit = 1
    while bit < n:
        low = [lane if not lane & bit else n + lane - bit for lane in range(n)]
        high = [lane + bit if not lane & bit else n + lane for lane in range(n)]
        for i in (i for i in range(n) if not i & bit):
            x, y = vectors[i], vectors[i + bit]
            vectors[i], vectors[i + bit] = pick(b, x, y, low), pick(b, x, y, high)
        bit *= 2
    return vectors
