"""The vector code of the CPU kernels: small functions, written as LLVM instructions, that compiled loops can call.

The vector width, the tile held in registers and `max` as one instruction (with no fast-math flag that would let NaN
slip) are the whole speed, so they are not left to a compiler's guess. Arrays are handed over as addresses.

Layout of a block of BLOCK patches (K padded to whole groups of COLUMNS, rows to whole QUADs, with zeros):
    a[k, p] patches      d[2 r + s, p] denominators of row r and sign s, then their reciprocals
    peaks: the largest value of each line of a and of d
    signs[r / QUAD, k / COLUMNS]: 64 bits, set where a weight is positive
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

WIDE = bool(dict(llvm.get_host_cpu_features()).get("avx512f"))
LANES = 16 if WIDE else 8  # floats of one vector register
FLOAT = 4  # bytes
STRIP_VECTORS = 4 if WIDE else 2  # PANEL x STRIP_VECTORS accumulators: 24 of 32 registers, or 12 of 16
STRIP = LANES * STRIP_VECTORS  # patches of one register tile of the ordinary product
BLOCK = 64  # patches that are skipped or computed as a whole
COLUMNS = 16  # columns tested at once
COLUMN_BITS = 4  # 2 ** COLUMN_BITS == COLUMNS
QUAD = 4  # rows tested and computed at once: QUAD x COLUMNS bits are one integer
PANEL = 6  # (row, sign) pairs of one register tile of the ordinary product; even: both signs of a row lie together
LINE = BLOCK * FLOAT
VECTOR = LANES * FLOAT

F32, I1, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(32), ir.IntType(64)
VECTOR_TYPE = ir.VectorType(F32, LANES)
ZERO = ir.Constant(VECTOR_TYPE, [0.0] * LANES)
_group = ir.VectorType(F32, COLUMNS)


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


def _line_max(b: Any, column: list[Any], row: Any) -> Any:
    """Lane maxima of one line of a (in registers) times one line of d (at an address)."""
    best = None
    for v, a in enumerate(column):
        product = b.fmul(a, load(b, row, v * VECTOR))
        best = product if best is None else larger(b, product, best)
    return best


def _line(b: Any, address: Any) -> list[Any]:
    return [load(b, address, v * VECTOR) for v in range(BLOCK // LANES)]


@primitive(types.none, types.int64, types.int64, types.int64)
def raise_one(b: Any, column: Any, row: Any, best: Any) -> None:
    """best = the largest of best and column[p] * row[p] over a block."""
    store(b, larger(b, across(b, _line_max(b, _line(b, column), row)), load(b, best, 0, F32)), best)


@primitive(types.int64, *[types.int64] * 5)
def survivors(b: Any, a_peaks: Any, d_peaks: Any, signs: Any, best: Any, best_stride: Any) -> Any:
    """Bit COLUMNS * r + c: the peak of column c times the peak of the line of row r that it meets is above best."""
    peaks = load(b, a_peaks, 0, _group)
    alive = I64(0)
    for r in range(QUAD):
        bits = b.bitcast(b.trunc(b.lshr(signs, I64(r * COLUMNS)), ir.IntType(COLUMNS)), ir.VectorType(I1, COLUMNS))
        positive, negative = (splat(b, load(b, d_peaks, (2 * r + s) * FLOAT, F32), _group) for s in (0, 1))
        bound = b.fmul(peaks, b.select(bits, positive, negative))
        above = b.fcmp_ordered(">", bound, load(b, b.add(best, b.mul(best_stride, I64(r))), 0, _group))
        alive = b.or_(alive, b.shl(b.zext(b.bitcast(above, ir.IntType(COLUMNS)), I64), I64(r * COLUMNS)))
    return alive


def _quad(is_first: bool) -> Any:
    """A function: spill[r, c] = lane maxima of QUAD rows x COLUMNS columns over a block, and of what it held before.

    A line of a is read once for all rows; a bit of `signs` chooses which of a row's two lines it meets.
    """

    @primitive(types.none, *[types.int64] * 4)
    def quad(b: Any, columns: Any, rows: Any, signs: Any, spill: Any) -> None:
        with cgutils.for_range(b, I64(COLUMNS)) as loop:
            column = _line(b, b.add(columns, b.mul(loop.index, I64(LINE))))
            at = b.add(spill, b.mul(loop.index, I64(VECTOR)))
            negative = b.not_(b.lshr(signs, loop.index))
            for r in range(QUAD):
                is_negative = b.and_(b.lshr(negative, I64(r * COLUMNS)), I64(1))
                row = b.add(rows, b.mul(is_negative, I64(LINE)))
                found = _line_max(b, column, b.add(row, I64(2 * r * LINE)))
                before = None if is_first else load(b, at, r * COLUMNS * VECTOR)
                store(b, found if before is None else larger(b, found, before), at, r * COLUMNS * VECTOR)

    return quad


first_quad, next_quad = _quad(True), _quad(False)


@primitive(types.none, types.int64, types.int64, types.int64)
def reduce_quad(b: Any, spill: Any, best: Any, best_stride: Any) -> None:
    """best[r, c] = the largest of best and of the lanes of spill[r, c]."""
    for r in range(QUAD):
        for start in range(0, COLUMNS, LANES):
            at = b.add(b.add(best, b.mul(best_stride, I64(r))), I64(start * FLOAT))
            found = [load(b, spill, (r * COLUMNS + start + i) * VECTOR) for i in range(LANES)]
            store(b, larger(b, transposed_max(b, found), load(b, at)), at)


@primitive(types.float32, types.int64, types.int64)
def scale_line(b: Any, line: Any, factors: Any) -> Any:
    """The largest of line[p] *= factors[p]."""
    best = ZERO
    for v in range(BLOCK // LANES):
        value = b.fmul(load(b, line, v * VECTOR), load(b, factors, v * VECTOR))
        store(b, value, line, v * VECTOR)
        best = larger(b, value, best)
    return across(b, best)


def _gather(n: int, step: int = 1) -> Any:
    """A function: target[k, i] = max(0, source[fan[k] + step i] * factor[i]) for n patches i, and their sums over k.

    Rows of images are short, so there are several widths. Nothing beyond the last value needed is read: with step 2 the
    second half comes from a vector that ends there.
    """
    kind = ir.VectorType(F32, n)
    zero = ir.Constant(kind, [0.0] * n)

    @primitive(types.none, *[types.int64] * 6)
    def gather(b: Any, source: Any, fan: Any, n_fan: Any, factor: Any, target: Any, sums: Any) -> None:
        scale, total = load(b, factor, 0, kind), cgutils.alloca_once(b, kind)
        b.store(zero, total)
        with cgutils.for_range(b, n_fan) as loop:
            offset = load(b, b.add(fan, b.mul(loop.index, I64(8))), 0, I64)
            at = b.add(source, b.mul(offset, I64(FLOAT)))
            value = load(b, at, 0, kind)
            if step == 2:
                end = load(b, at, (n - 1) * FLOAT, kind)
                value = pick(b, value, end, [*range(0, n, 2), *range(n + 1, 2 * n, 2)])
            value = larger(b, b.fmul(value, scale), zero)
            store(b, value, b.add(target, b.mul(loop.index, I64(LINE))))
            b.store(b.fadd(b.load(total), value), total)
        store(b, b.load(total), sums)

    return gather


gather_16, gather_8, gather_4, gather_1 = (_gather(n) for n in (16, 8, 4, 1))
gather_16_even, gather_8_even, gather_4_even = (_gather(n, 2) for n in (16, 8, 4))


@primitive(types.float32, types.int64, types.int64)
def copy_line(b: Any, source: Any, target: Any) -> Any:
    """The largest of a line's values, copied from any address."""
    best = ZERO
    for v, value in enumerate(_line(b, source)):
        store(b, value, target, v * VECTOR)
        best = larger(b, value, best)
    return across(b, best)


@primitive(types.float32, types.int64)
def invert_line(b: Any, line: Any) -> Any:
    """The largest of line[p] = 1 / line[p], 0 where line[p] is 0 (T2). Half vectors: dividers are no wider."""
    half = ir.VectorType(F32, 8)
    zero, one = ir.Constant(half, [0.0] * 8), ir.Constant(half, [1.0] * 8)
    best = zero
    for offset in range(0, LINE, 8 * FLOAT):
        value = load(b, line, offset, half)
        inverse = b.select(b.fcmp_ordered(">", value, zero), b.fdiv(one, value), zero)
        store(b, inverse, line, offset)
        best = larger(b, inverse, best)
    return across(b, best)


@primitive(types.int64, types.int64)
def lowest_bit(b: Any, bits: Any) -> Any:
    return b.cttz(bits, I1(1))


@primitive(types.int64, types.int64)
def bit_count(b: Any, bits: Any) -> Any:
    return b.ctpop(bits)


def _panel(n_lines: int) -> Any:
    """A function: out[i, strip] += sum over k of weights[k, i] * a[k, strip] for `n_lines` lines i of d."""

    @primitive(types.none, *[types.int64] * 4)
    def panel(b: Any, a: Any, weights: Any, out: Any, n_terms: Any) -> None:
        sums = [[cgutils.alloca_once(b, VECTOR_TYPE) for _ in range(STRIP_VECTORS)] for _ in range(n_lines)]
        for cell in (cell for line in sums for cell in line):
            b.store(ZERO, cell)
        with cgutils.for_range(b, n_terms) as loop:
            a_k = b.add(a, b.mul(loop.index, I64(LINE)))
            w_k = b.add(weights, b.mul(loop.index, I64(n_lines * FLOAT)))
            terms = [load(b, a_k, v * VECTOR) for v in range(STRIP_VECTORS)]
            for i, line in enumerate(sums):
                w = splat(b, load(b, w_k, i * FLOAT, F32))
                for cell, term in zip(line, terms):
                    product = b.fmul(w, term, flags=("contract",))
                    b.store(b.fadd(product, b.load(cell), flags=("contract",)), cell)
        for i, line in enumerate(sums):
            for v, cell in enumerate(line):
                offset = i * LINE + v * VECTOR
                store(b, b.fadd(load(b, out, offset), b.load(cell)), out, offset)

    return panel


panel_6, panel_4, panel_2 = _panel(6), _panel(4), _panel(2)
