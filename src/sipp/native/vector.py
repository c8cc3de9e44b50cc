"""Building blocks of vector code: each function appends LLVM instructions to a builder `b`.

Addresses are 64-bit integers, offsets are in bytes. A fused multiply-add is requested by name (`fused`), because there
is no fast-math flag (`compiling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from sipp.native.processor import HAS_FUSED

F32, F64 = ir.FloatType(), ir.DoubleType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_BYTE = I8.as_pointer()
FLOAT_BYTES, LONG_BYTES = 4, 8  # of a float32, and of an address or a whole number
_ALIGN = 4  # bytes; assumed for every load and store of four bytes or more

# --- Kinds and constants ----------------------------------------------------------------------------------------------


def of(lanes: int, kind: Any = F32) -> Any:
    """LLVM's vector type with this many lanes; a scalar for one lane."""
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def constant(value: float, lanes: int, kind: Any = F32) -> Any:
    """A constant with this value in all lanes."""
    return ir.Constant(kind, value) if lanes == 1 else ir.Constant(of(lanes, kind), [value] * lanes)


def lanes_of(value: Any) -> int:
    """How many lanes a value has; 1 for a scalar."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 1


def like(value: Any, number: float) -> Any:
    """A float32 constant in as many lanes as this value has."""
    return constant(number, lanes_of(value))


# --- Memory -----------------------------------------------------------------------------------------------------------


def address_of(b: Any, base: Any, index: Any, size: int = FLOAT_BYTES) -> Any:
    """The address of element `index` in an array of `size`-byte items."""
    return b.add(base, b.mul(index, I64(size)))


def load(b: Any, address: Any, kind: Any = F32, offset: int = 0) -> Any:
    return b.load(_pointer(b, address, offset, kind), align=_aligned(kind), typ=kind)


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    b.store(value, _pointer(b, address, offset, value.type), align=_aligned(value.type))


def _pointer(b: Any, address: Any, offset: int, kind: Any) -> Any:
    return b.inttoptr(b.add(address, I64(offset)) if offset else address, kind.as_pointer())


def _aligned(kind: Any) -> int:
    return min(_ALIGN, kind.width // 8) if isinstance(kind, ir.IntType) else _ALIGN


def item(b: Any, base: Any, index: Any, kind: Any) -> Any:
    """Element `index` of an array of integers, as a 64-bit one; shorter ones have no sign."""
    value = load(b, address_of(b, base, index, kind.width // 8), kind)
    return value if kind is I64 else b.zext(value, I64)


def element(b: Any, address: Any, i: Any, kind: Any) -> Any:
    """A pointer to element i of an array; based on one address, so LLVM can vectorise loops over it."""
    return b.gep(b.inttoptr(address, kind.as_pointer()), [i], source_etype=kind)


def variables(b: Any, values: Sequence[Any]) -> list[Any]:
    """Variables with these initial values; LLVM keeps them in registers."""
    cells = [on_stack(b, value.type) for value in values]
    for cell, value in zip(cells, values):
        b.store(value, cell)
    return cells


def on_stack(b: Any, kind: Any) -> Any:
    """A stack slot for such a value, allocated once even inside a loop."""
    with b.goto_entry_block():
        return b.alloca(kind)


@contextmanager
def floats_on_heap(b: Any, n: int) -> Iterator[Any]:
    """Allocates n floats for the block and yields their address, 0 if malloc fails. A thread's stack may be small."""
    address = b.ptrtoint(b.call(_of_c(b, "malloc", _BYTE, I64), [I64(n * FLOAT_BYTES)]), I64)
    yield address
    b.call(_of_c(b, "free", ir.VoidType(), _BYTE), [b.inttoptr(address, _BYTE)])


def _of_c(b: Any, name: str, result: Any, argument: Any) -> Any:
    """Declares a function of the C library."""
    known = b.module.globals.get(name)
    return known or ir.Function(b.module, ir.FunctionType(result, [argument]), name)


# --- Loops and calls --------------------------------------------------------------------------------------------------


@contextmanager
def each(b: Any, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
    """A loop from start to stop (LLVM values or Python ints) in steps of `step`; yields the index."""
    start, stop = (I64(x) if isinstance(x, int) else x for x in (start, stop))
    before, test, body, end = b.block, *(b.append_basic_block(name) for name in ("test", "body", "end"))
    b.branch(test)
    b.position_at_end(test)
    index = b.phi(I64)
    b.cbranch(b.icmp_signed("<", index, stop), body, end)
    b.position_at_end(body)
    yield index
    following = b.add(index, I64(step), flags=["nsw"])
    index.add_incoming(start, before)
    index.add_incoming(following, b.block)
    b.branch(test)
    b.position_at_end(end)


def call(b: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Calls an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return b.call(b.module.declare_intrinsic(name, (), kind), arguments)


def call_at(b: Any, address: Any, numbers: Sequence[Any]) -> None:
    """Calls the function at an address with integers."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(numbers))
    b.call(b.inttoptr(address, kind.as_pointer()), numbers)


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once if the processor has fused multiply-add, else twice."""
    if not HAS_FUSED:
        return b.fadd(b.fmul(x, y), z)
    kind = x.type
    lanes, scalar = (f"v{kind.count}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
    return call(b, f"llvm.fma.{lanes}{scalar.intrinsic_name}", kind, [x, y, z])


def maximum(b: Any, left: Any, right: Any) -> Any:
    """left if left > right else right: exactly what vmaxps does, including for NaN."""
    return b.select(b.fcmp_ordered(">", left, right), left, right)


def minimum(b: Any, left: Any, right: Any) -> Any:
    """left if left < right else right."""
    return b.select(b.fcmp_ordered("<", left, right), left, right)


def tree(b: Any, join: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Combines all values pairwise, as a balanced tree."""
    values = list(values)
    while len(values) > 1:
        values = [join(b, *values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


# --- Lanes ------------------------------------------------------------------------------------------------------------


def splat(b: Any, scalar: Any, lanes: int) -> Any:
    """Broadcasts a scalar to all lanes."""
    if lanes == 1:
        return scalar
    first = b.insert_element(ir.Constant(of(lanes, scalar.type), ir.Undefined), scalar, I32(0))
    return pick(b, first, first, [0] * lanes)


def splat_item(b: Any, address: Any, i: Any, lanes: int, offset: int = 0) -> Any:
    """Number i of an array of float32 in all lanes."""
    return splat(b, load(b, address_of(b, address, i), offset=offset), lanes)


def pick(b: Any, left: Any, right: Any, lanes: list[int]) -> Any:
    """Shuffles two vectors: the lanes with these numbers, `right` numbered after `left`."""
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def across(b: Any, join: Callable[..., Any], values: Any) -> Any:
    """Reduces the lanes of a vector to one number; a scalar stays as it is."""
    if lanes_of(values) == 1:
        return values
    while values.type.count > 1:
        half = values.type.count // 2
        values = join(b, *(pick(b, values, values, list(range(i, i + half))) for i in (0, half)))
    return b.extract_element(values, I32(0))


def transposed(b: Any, vectors: Sequence[Any]) -> list[Any]:
    """Transposes n vectors of n lanes, one index bit at a time."""
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
