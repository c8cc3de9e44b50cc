"""Vector code for one block of patches: gathering them, the ordinary product of weights and patches, reciprocals.

Small functions of LLVM instructions (`llvm.py`) over the layout of `layout.py`, which compiled loops call. The vector
width, the tile held in registers and `max` as one instruction (with no fast-math flag that would let NaN slip) are the
whole speed, so they are not left to a compiler's guess.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from sipp.scoring.kernels.cpu.layout import CACHE_LINE, FLOAT, INDEX, LANES, LINE, RANK, STRIP_VECTORS, VECTOR
from sipp.scoring.kernels.cpu.llvm import F32, I32, I64, fused, larger, load, pick, primitive, splat, store, transposed

VECTOR_TYPE = ir.VectorType(F32, LANES)
_ZERO = ir.Constant(VECTOR_TYPE, [0.0] * LANES)


@primitive(types.none, types.int64, types.int64)
def scale_line(b: Any, line: Any, factors: Any) -> None:
    """line[p] *= factors[p]."""
    for offset in range(0, LINE, VECTOR):
        product = b.fmul(load(b, line, offset, VECTOR_TYPE), load(b, factors, offset, VECTOR_TYPE))
        store(b, product, line, offset)


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


@primitive(types.none, *[types.int64] * 6)
def gather_lines(b: Any, source: Any, offsets: Any, n_fan: Any, factors: Any, target: Any, sums: Any) -> None:
    """The same for RANK patches i whose columns lie side by side: column k of patch i is source[offsets[i] + k]."""
    kind = ir.VectorType(F32, RANK)
    zero, total = ir.Constant(kind, [0.0] * RANK), cgutils.alloca_once(b, kind)
    b.store(zero, total)
    scale = load(b, factors, 0, kind)
    starts = [b.add(source, b.mul(load(b, offsets, i * 8, I64), I64(FLOAT))) for i in range(RANK)]

    def take(value: Any, to: Any, offset: int) -> None:
        value = larger(b, b.fmul(value, scale), zero)
        store(b, value, to, offset)
        b.store(b.fadd(b.load(total), value), total)

    n_tiles = b.udiv(n_fan, I64(RANK))
    with cgutils.for_range(b, n_tiles) as tile:
        at, to = (b.mul(tile.index, I64(RANK * size)) for size in (FLOAT, LINE))
        for k, value in enumerate(transposed(b, [load(b, b.add(start, at), 0, kind) for start in starts])):
            take(value, b.add(target, to), k * LINE)
    done = b.mul(n_tiles, I64(RANK))
    with cgutils.for_range(b, b.sub(n_fan, done)) as rest:
        at, to = (b.mul(b.add(done, rest.index), I64(size)) for size in (FLOAT, LINE))
        value = zero
        for i, start in enumerate(starts):
            value = b.insert_element(value, load(b, b.add(start, at), 0, F32), I32(i))
        take(value, b.add(target, to), 0)
    store(b, b.load(total), sums)


@primitive(types.none, types.int64, types.int64)
def copy_line(b: Any, source: Any, target: Any) -> None:
    for offset in range(0, LINE, VECTOR):
        store(b, load(b, source, offset, VECTOR_TYPE), target, offset)


@primitive(types.none, types.int64)
def prefetch_line(b: Any, line: Any) -> None:
    """Asks for a line that will be read soon; an address outside of all memory does no harm."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for offset in range(0, LINE, CACHE_LINE):
        b.call(prefetch, [b.inttoptr(b.add(line, I64(offset)), byte), I32(0), I32(3), I32(1)])


@primitive(types.int64, types.int64)
def take_number(b: Any, counter: Any) -> Any:
    """The number at this address, which is one more after it: no other thread gets the same."""
    return b.atomic_rmw("add", b.inttoptr(counter, I64.as_pointer()), I64(1), "seq_cst")


@primitive(types.none, types.int64)
def invert_line(b: Any, line: Any) -> None:
    """line[p] = 1 / line[p], 0 where line[p] is 0 (T2). Half vectors: dividers are no wider."""
    half = ir.VectorType(F32, 8)
    zero, one = ir.Constant(half, [0.0] * 8), ir.Constant(half, [1.0] * 8)
    for offset in range(0, LINE, 8 * FLOAT):
        value = load(b, line, offset, half)
        store(b, b.select(b.fcmp_ordered(">", value, zero), b.fdiv(one, value), zero), line, offset)


def _panel(n_rows: int) -> Any:
    """A function: out[2 i + s, strip] += sum of magnitudes[j, i] * a[places[j], strip] over columns j, for rows i.

    Columns come sorted by the signs of their weights in these rows, bit i of the pattern for row i; those of pattern q
    end at ends[q]. So each product goes to the sum of its own sign, and the other needs none.
    """

    @primitive(types.none, *[types.int64] * 5)
    def panel(b: Any, a: Any, magnitudes: Any, places: Any, ends: Any, out: Any) -> None:
        sums = [[cgutils.alloca_once(b, VECTOR_TYPE) for _ in range(STRIP_VECTORS)] for _ in range(2 * n_rows)]
        for cell in (cell for line in sums for cell in line):
            b.store(_ZERO, cell)
        start = I64(0)
        for pattern in range(2**n_rows):
            stop = b.sext(load(b, ends, pattern * INDEX, I32), I64)
            with cgutils.for_range(b, b.sub(stop, start)) as loop:
                j = b.add(start, loop.index)
                place = b.sext(load(b, b.add(places, b.mul(j, I64(INDEX))), 0, I32), I64)
                line = b.add(a, b.mul(place, I64(LINE)))
                terms = [load(b, line, v * VECTOR, VECTOR_TYPE) for v in range(STRIP_VECTORS)]
                for i in range(n_rows):
                    at = b.add(magnitudes, b.mul(j, I64(n_rows * FLOAT)))
                    w = splat(b, load(b, at, i * FLOAT, F32), VECTOR_TYPE)
                    for cell, term in zip(sums[2 * i + (pattern >> i & 1)], terms):
                        b.store(fused(b, w, term, b.load(cell)), cell)
            start = stop
        for i, line_cells in enumerate(sums):
            for v, cell in enumerate(line_cells):
                offset = i * LINE + v * VECTOR
                store(b, b.fadd(load(b, out, offset, VECTOR_TYPE), b.load(cell)), out, offset)

    return panel


panel_3, panel_2, panel_1 = _panel(3), _panel(2), _panel(1)
