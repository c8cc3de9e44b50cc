"""Compiled loops of the CPU kernels, over plain arrays, run without the interpreter lock.

The innermost ones are written as LLVM vector code through Numba's `intrinsic`: the vector width, the tile held in
registers and `max` as one instruction (with no fast-math flag that would let NaN slip) are the whole speed. Arrays
are handed to those as addresses. All code is in one file because Numba's cache notices changes of one file only.

Layout of a block of BLOCK patches (K padded to whole groups of COLUMNS, rows to whole QUADs, with zeros):
    a[k, p] patches      d[2 r + s, p] denominators of row r and sign s, then their reciprocals
    peaks: the largest value of each line of a and of d
    signs[r / QUAD, k / COLUMNS]: 64 bits, set where a weight is positive
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from sipp.kernels.vectors import (
    F32,
    FLOAT,
    I1,
    I64,
    LANES,
    VECTOR_TYPE,
    WIDE,
    ZERO,
    across,
    larger,
    load,
    primitive,
    splat,
    store,
    transposed_max,
)

STRIP_VECTORS = 4 if WIDE else 2  # PANEL x STRIP_VECTORS accumulators: 24 of 32 registers, or 12 of 16
STRIP = LANES * STRIP_VECTORS  # patches of one register tile of the ordinary product
BLOCK = 64  # patches that are skipped or computed as a whole
COLUMNS = 16  # columns tested at once
COLUMN_BITS = 4  # 2 ** COLUMN_BITS == COLUMNS
QUAD = 4  # rows tested and computed at once: QUAD x COLUMNS bits are one integer
PANEL = 6  # (row, sign) pairs of one register tile of the ordinary product; even: both signs of a row lie together
SUM_BLOCK = 512  # terms summed before they join the total: bounds the rounding error of long sums (fixed: same bits)
L1_GROUPS = 8  # groups of COLUMNS x blocks of patches that stay in the first-level cache while rows pass: 32 KB
LINE = BLOCK * FLOAT
VECTOR = LANES * FLOAT
SHORT = 8  # values of one step of copying: image rows are short
QUAD_DENSE = 30  # survivors among QUAD x COLUMNS from which on all are computed: measured break-even

_group = ir.VectorType(F32, COLUMNS)
_log = logging.getLogger("sipp")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by Numba at its first call, cached on disk where a folder can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # neither beside this file nor in the user's cache folder
        _log.info("no writable folder for Numba's cache: %s is compiled anew in each process", function.__name__)
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


# --- Vector code ------------------------------------------------------------------------------------------------------


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
def _raise_one(b: Any, column: Any, row: Any, best: Any) -> None:
    """best = the largest of best and column[p] * row[p] over a block."""
    store(b, larger(b, across(b, _line_max(b, _line(b, column), row)), load(b, best, 0, F32)), best)


@primitive(types.int64, *[types.int64] * 5)
def _survivors(b: Any, a_peaks: Any, d_peaks: Any, signs: Any, best: Any, best_stride: Any) -> Any:
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


_first_quad, _next_quad = _quad(True), _quad(False)


@primitive(types.none, types.int64, types.int64, types.int64)
def _reduce_quad(b: Any, spill: Any, best: Any, best_stride: Any) -> None:
    """best[r, c] = the largest of best and of the lanes of spill[r, c]."""
    for r in range(QUAD):
        for start in range(0, COLUMNS, LANES):
            at = b.add(b.add(best, b.mul(best_stride, I64(r))), I64(start * FLOAT))
            found = [load(b, spill, (r * COLUMNS + start + i) * VECTOR) for i in range(LANES)]
            store(b, larger(b, transposed_max(b, found), load(b, at)), at)


@primitive(types.float32, types.int64, types.int64)
def _scale_line(b: Any, line: Any, factors: Any) -> Any:
    """The largest of line[p] *= factors[p]."""
    best = ZERO
    for v in range(BLOCK // LANES):
        value = b.fmul(load(b, line, v * VECTOR), load(b, factors, v * VECTOR))
        store(b, value, line, v * VECTOR)
        best = larger(b, value, best)
    return across(b, best)


def _copy(kind: Any) -> Any:
    """A function: target = max(0, source * factor), for one value or a short vector of them."""
    zero = ir.Constant(kind, 0.0 if kind is F32 else [0.0] * SHORT)

    @primitive(types.none, types.int64, types.int64, types.int64)
    def copy(b: Any, source: Any, factor: Any, target: Any) -> None:
        store(b, larger(b, b.fmul(load(b, source, 0, kind), load(b, factor, 0, kind)), zero), target)

    return copy


_copy_one, _copy_short = _copy(F32), _copy(ir.VectorType(F32, SHORT))


@primitive(types.float32, types.int64)
def _line_peak(b: Any, line: Any) -> Any:
    """The largest value of a line."""
    best = ZERO
    for value in _line(b, line):
        best = larger(b, value, best)
    return across(b, best)


@primitive(types.float32, types.int64)
def _invert_line(b: Any, line: Any) -> Any:
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
def _lowest_bit(b: Any, bits: Any) -> Any:
    return b.cttz(bits, I1(1))


@primitive(types.int64, types.int64)
def _bit_count(b: Any, bits: Any) -> Any:
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


_panel_6, _panel_4, _panel_2 = _panel(6), _panel(4), _panel(2)


# --- Loops ------------------------------------------------------------------------------------------------------------


@compiled
def denominators(a: int, weights: int, d: np.ndarray, fan_in: int) -> None:
    """Nothing; fills d[2 r + s, p] with sum over k of w_k^s a_k (T2), always in the same order of terms.

    `weights` is the address of panels of PANEL lines (then one of the remaining 4 or 2), each fan_in x lines.
    """
    n_lines = d.shape[0]
    out = d.ctypes.data
    d[:] = 0.0
    for start in range(0, fan_in, SUM_BLOCK):
        n_terms = min(SUM_BLOCK, fan_in - start)
        for line in range(0, n_lines, PANEL):
            left = min(PANEL, n_lines - line)
            w = weights + (line * fan_in + start * left) * FLOAT
            for strip in range(0, BLOCK, STRIP):
                source, target = a + start * LINE + strip * FLOAT, out + line * LINE + strip * FLOAT
                if left == PANEL:
                    _panel_6(source, w, target, n_terms)
                elif left == 4:
                    _panel_4(source, w, target, n_terms)
                else:
                    _panel_2(source, w, target, n_terms)


@compiled
def raise_best(
    a: int, d: int, a_peaks: int, d_peaks: int, signs: np.ndarray, best: int, spill: int, n_blocks: int, skip: bool
) -> int:
    """The number of (row, column, block) triples computed; raises best[r, k] to the largest product over the blocks.

    Arguments are addresses, but for `signs`. Skipping is exact: products of non-negative floats are monotone in both
    factors, rounding included, so every product of a block is at most (peak of its column) x (peak of its row's line)
    as computed here; where that bound is not above best[r, k], no product of the block is. (Inputs are finite.)
    """
    n_quads, n_groups = signs.shape
    padded = n_groups * COLUMNS
    n_lines = 2 * QUAD * n_quads
    groups_at_once = max(1, L1_GROUPS // n_blocks)
    n_computed = 0
    for first in range(0, n_groups, groups_at_once):
        last = min(first + groups_at_once, n_groups)
        for quad in range(n_quads):
            for group in range(first, last):
                bits = signs[quad, group]
                best_at = best + (quad * QUAD * padded + group * COLUMNS) * FLOAT
                n_dense = 0
                for block in range(n_blocks):
                    column, line = block * padded + group * COLUMNS, block * n_lines + 2 * QUAD * quad
                    alive = np.int64(-1)
                    if skip:
                        alive = _survivors(
                            a_peaks + column * FLOAT, d_peaks + line * FLOAT, bits, best_at, padded * FLOAT
                        )
                        if alive == 0:
                            continue
                    if _bit_count(alive) >= QUAD_DENSE:
                        if n_dense == 0:
                            _first_quad(a + column * LINE, d + line * LINE, bits, spill)
                        else:
                            _next_quad(a + column * LINE, d + line * LINE, bits, spill)
                        n_dense += 1
                        continue
                    n_computed += _bit_count(alive)
                    while alive != 0:
                        i = _lowest_bit(alive)
                        alive &= alive - 1
                        r, c = i >> COLUMN_BITS, i & (COLUMNS - 1)
                        meets = line + 2 * r + (1 - ((bits >> i) & 1))
                        _raise_one(a + (column + c) * LINE, d + meets * LINE, best_at + (r * padded + c) * FLOAT)
                if n_dense > 0:
                    n_computed += n_dense * QUAD * COLUMNS
                    _reduce_quad(spill, best_at, padded * FLOAT)
    return n_computed


@compiled
def _gather(source: int, offsets: np.ndarray, fan: np.ndarray, factors: int, block: int) -> None:
    """Nothing; block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]), copied in runs of equal stride.

    `source`, `factors` and `block` are addresses.
    """
    n_patches = len(offsets)
    first = 0
    while first < n_patches:
        step = offsets[first + 1] - offsets[first] if first + 1 < n_patches else 1
        last = first + 1
        while last < n_patches and offsets[last] - offsets[last - 1] == step:
            last += 1
        start, target, factor = source + offsets[first] * FLOAT, block + first * FLOAT, factors + first * FLOAT
        n = last - first
        if step == 1 and n >= SHORT:
            for k in range(len(fan)):
                at, to = start + fan[k] * FLOAT, target + k * LINE
                for i in range(0, n - SHORT, SHORT):
                    _copy_short(at + i * FLOAT, factor + i * FLOAT, to + i * FLOAT)
                tail = (n - SHORT) * FLOAT  # overlaps what is copied already: the same values again
                _copy_short(at + tail, factor + tail, to + tail)
        else:
            for i in range(n):
                at, to = start + i * step * FLOAT, target + i * FLOAT
                for k in range(len(fan)):
                    _copy_one(at + fan[k] * FLOAT, factor + i * FLOAT, to + k * LINE)
        first = last


@compiled
def _normalise(block: np.ndarray, fan_in: int, sums: np.ndarray, peaks: np.ndarray) -> None:
    """Nothing; divides every patch of the block by its sum (0 stays 0) and notes sums and the peaks of the columns."""
    sums[:] = 0.0
    for k in range(fan_in):
        line = block[k]
        for p in range(BLOCK):
            sums[p] += line[p]
    factors = np.empty(BLOCK, np.float32)
    for p in range(BLOCK):
        factors[p] = np.float32(1.0) / sums[p] if sums[p] > 0.0 else np.float32(0.0)
    for k in range(fan_in):
        peaks[k] = _scale_line(block[k].ctypes.data, factors.ctypes.data)


@compiled
def _add_squares(
    d: np.ndarray, row_factors: np.ndarray, sums: np.ndarray, z: np.ndarray, turn: int, squares: np.ndarray
) -> None:
    """Nothing; adds a block's squared denominators, and squared outputs once they are complete, to squares[q, p].

    `turn`: 0 the only sign of the activations, 1 the first of two (their outputs wait in z), 2 the second.
    """
    for r in range(len(row_factors)):
        factor = row_factors[r]
        for p in range(BLOCK):
            scale = factor * sums[p]
            positive, negative = d[2 * r, p] * scale, d[2 * r + 1, p] * scale
            squares[0, p] += positive * positive
            squares[1, p] += negative * negative
            output = positive - negative
            if turn == 1:
                z[r, p] = output
            else:
                output = output - z[r, p] if turn == 2 else output
                squares[2, p] += output * output


@compiled
def _prepare(
    source: np.ndarray,
    at: int,
    place: tuple[int, int, int],
    positions: np.ndarray,
    fan: np.ndarray,
    factors_B: np.ndarray,
    a: np.ndarray,
    a_peaks: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Nothing; lays one block of patches out, scaled to sum 1 each, from patch place[0] up to (not with) place[1]."""
    offsets, factors = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.float32)
    first, last, point_stride = place
    n_patches = min(BLOCK, last - first)
    for p in range(n_patches):
        point, position = divmod(first + p, len(positions))
        offsets[p] = at + point * point_stride + positions[position]
        factors[p] = factors_B[point]
    if n_patches < BLOCK:
        a[: len(fan), n_patches:] = 0.0
    _gather(source.ctypes.data, offsets[:n_patches], fan, factors.ctypes.data, a.ctypes.data)
    _normalise(a, len(fan), sums, a_peaks)


@compiled
def scan(
    source: np.ndarray,
    strides: tuple[int, int],
    positions: np.ndarray,
    fan: np.ndarray,
    factors_TB: np.ndarray,
    weights_GX: np.ndarray,
    signs_GQK: np.ndarray,
    row_factors_GR: np.ndarray,
    stretch: tuple[int, int],
    scratch: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    best_GRK: np.ndarray,
    squares_QP: np.ndarray,
) -> int:
    """The number of triples `raise_best` computed; takes a stretch of patches into the maxima and the squares.

    Patch p is position p % n of point p / n, n = len(positions); value k of group g of it lies in `source` at
    point * strides[0] + g * strides[1] + positions[p % n] + fan[k]. factors_TB[t, b] scales the activations of point
    b that have sign t; it is 0 where there are none.
    """
    a, d, z, a_peaks, d_peaks, spill = scratch
    n_groups, n_rows = row_factors_GR.shape
    first, last = stretch
    both = np.any(factors_TB[0] != 0.0) and np.any(factors_TB[1] != 0.0)
    sums = np.empty(BLOCK, np.float32)
    squares = np.empty((3, BLOCK))
    n_computed = 0
    for tile in range(first, last, len(a) * BLOCK):
        n_blocks = min(len(a), (last - tile + BLOCK - 1) // BLOCK)
        for g in range(n_groups):
            for t in range(2):
                if not np.any(factors_TB[t] != 0.0):
                    continue
                turn = (1 + t) if both else 0
                for block in range(n_blocks):
                    start = tile + block * BLOCK
                    place = (start, last, strides[0])
                    _prepare(
                        source, g * strides[1], place, positions, fan, factors_TB[t], a[block], a_peaks[block], sums
                    )
                    lines = d[block, : 2 * n_rows]
                    denominators(a[block].ctypes.data, weights_GX[g].ctypes.data, lines, len(fan))
                    squares[:] = 0.0
                    _add_squares(lines, row_factors_GR[g], sums, z[block], turn, squares)
                    for p in range(min(BLOCK, last - start)):
                        squares_QP[2 * t, start + p] += squares[0, p]
                        squares_QP[2 * t + 1, start + p] += squares[1, p]
                        squares_QP[4, start + p] += squares[2, p]
                    for line in range(2 * n_rows):
                        d_peaks[block, line] = _invert_line(lines[line].ctypes.data)
                n_computed += raise_best(
                    a.ctypes.data,
                    d.ctypes.data,
                    a_peaks.ctypes.data,
                    d_peaks.ctypes.data,
                    signs_GQK[g],
                    best_GRK[g].ctypes.data,
                    spill.ctypes.data,
                    n_blocks,
                    True,
                )
    return n_computed


@compiled
def _copy_lines(source: np.ndarray, start: int, last: int, block: np.ndarray, first_line: int, step: int) -> None:
    """Nothing; copies patches start.. of every line of `source` into every `step`-th line of the block, zeros after."""
    n_patches = min(BLOCK, last - start)
    for k in range(len(source)):
        line = block[first_line + k * step]
        for p in range(n_patches):
            line[p] = source[k, start + p]
        line[n_patches:] = 0.0


@compiled
def product(
    patches_GKP: np.ndarray,
    inverse_SGRP: np.ndarray,
    signs_GQK: np.ndarray,
    stretch: tuple[int, int],
    scratch: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    best_GRK: np.ndarray,
    skip: bool,
) -> int:
    """The number of triples `raise_best` computed; takes a stretch of patches into the maxima of their products."""
    a, d, _, a_peaks, d_peaks, spill = scratch
    first, last = stretch
    n_computed = 0
    for tile in range(first, last, len(a) * BLOCK):
        n_blocks = min(len(a), (last - tile + BLOCK - 1) // BLOCK)
        for g in range(len(patches_GKP)):
            for block in range(n_blocks):
                start = tile + block * BLOCK
                _copy_lines(patches_GKP[g], start, last, a[block], 0, 1)
                for s in range(2):
                    _copy_lines(inverse_SGRP[s, g], start, last, d[block], s, 2)
                for k in range(a.shape[1]):
                    a_peaks[block, k] = _line_peak(a[block, k].ctypes.data)
                for line in range(d.shape[1]):
                    d_peaks[block, line] = _line_peak(d[block, line].ctypes.data)
            addresses = a.ctypes.data, d.ctypes.data, a_peaks.ctypes.data, d_peaks.ctypes.data
            best = best_GRK[g].ctypes.data
            n_computed += raise_best(*addresses, signs_GQK[g], best, spill.ctypes.data, n_blocks, skip)
    return n_computed


@compiled
def sums(
    patches_GKP: np.ndarray,
    weights_GX: np.ndarray,
    stretch: tuple[int, int],
    a: np.ndarray,
    d: np.ndarray,
    sums_SGRP: np.ndarray,
) -> None:
    """Nothing; fills a stretch of the denominators."""
    first, last = stretch
    for start in range(first, last, BLOCK):
        n_patches = min(BLOCK, last - start)
        for g in range(len(patches_GKP)):
            _copy_lines(patches_GKP[g], start, last, a, 0, 1)
            denominators(a.ctypes.data, weights_GX[g].ctypes.data, d, patches_GKP.shape[1])
            for line in range(len(d)):
                for p in range(n_patches):
                    sums_SGRP[line & 1, g, line >> 1, start + p] = d[line, p]


@compiled
def extremes(bits_BN: np.ndarray, found_BX: np.ndarray) -> None:
    """Nothing; for each line of float32 bit patterns (int32): largest as int32, largest as uint32, and the smallest
    magnitude above 0 less one (uint32), so that 0 wraps around to the largest. Integers, because NaN has an order too.
    """
    for b in range(len(bits_BN)):
        line = bits_BN[b]
        highest, wrapped, smallest = np.int32(-(2**31)), np.uint32(0), np.uint32(2**32 - 1)
        for i in range(len(line)):
            bits = np.uint32(line[i])
            highest = max(highest, line[i])
            wrapped = max(wrapped, bits)
            smallest = min(smallest, np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(1)))
        found_BX[b, 0], found_BX[b, 1], found_BX[b, 2] = highest, wrapped, smallest
