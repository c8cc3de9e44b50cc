"""Compiled loops of the CPU kernels over blocks of patches, laid out as `vectors.py` says; they hold no Python lock."""

from __future__ import annotations

import numpy as np

from sipp.kernels.compiling import compiled
from sipp.kernels.vectors import (
    BLOCK,
    COLUMN_BITS,
    COLUMNS,
    FLOAT,
    LINE,
    PANEL,
    QUAD,
    STRIP,
    bit_count,
    copy_line,
    first_quad,
    gather_1,
    gather_4,
    gather_4_even,
    gather_8,
    gather_8_even,
    gather_16,
    gather_16_even,
    invert_line,
    lowest_bit,
    next_quad,
    panel_2,
    panel_4,
    panel_6,
    raise_one,
    reduce_quad,
    scale_line,
    survivors,
)

SUM_BLOCK = 512  # terms summed before they join the total: bounds the rounding error of long sums (fixed: same bits)
L1_GROUPS = 8  # groups of COLUMNS x blocks of patches that stay in the first-level cache while rows pass: 32 KB
QUAD_DENSE = 16  # survivors among QUAD x COLUMNS from which on all are computed: measured break-even


@compiled
def panel_lines(first: int, n_lines: int) -> int:
    """How many lines the panel has that starts at line `first` of d; two of 4 end better than one of 6 and one of 2."""
    left = n_lines - first
    return 4 if left == PANEL + 2 else min(PANEL, left)


@compiled
def denominators(a: int, weights: int, d: np.ndarray, fan_in: int) -> None:
    """Nothing; fills d[2 r + s, p] with sum over k of w_k^s a_k (T2), always in the same order of terms.

    `weights` is the address of panels of `panel_lines` lines, one after the other, each fan_in x lines.
    """
    n_lines = d.shape[0]
    out = d.ctypes.data
    d[:] = 0.0
    for start in range(0, fan_in, SUM_BLOCK):
        n_terms = min(SUM_BLOCK, fan_in - start)
        line = 0
        while line < n_lines:
            left = panel_lines(line, n_lines)
            w = weights + (line * fan_in + start * left) * FLOAT
            for strip in range(0, BLOCK, STRIP):
                source, target = a + start * LINE + strip * FLOAT, out + line * LINE + strip * FLOAT
                if left == PANEL:
                    panel_6(source, w, target, n_terms)
                elif left == 4:
                    panel_4(source, w, target, n_terms)
                else:
                    panel_2(source, w, target, n_terms)
            line += left


@compiled
def raise_best(
    a: int,
    d: int,
    a_peaks: int,
    d_peaks: int,
    signs: np.ndarray,
    best: int,
    spill: int,
    n_blocks: int,
    skip: bool,
    fresh: bool,
) -> int:
    """The number of (row, column, block) triples computed; raises best[r, k] to the largest product over the blocks.

    Arguments are addresses, but for `signs`. Skipping is exact: products of non-negative floats are monotone in both
    factors, rounding included, so every product of a block is at most (peak of its column) x (peak of its row's line)
    as computed here; where that bound is not above best[r, k], no product of the block is. (Inputs are finite.)
    `fresh` says that best holds little yet: the maxima of a block are then reduced before the next one is tested.
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
                        alive = survivors(
                            a_peaks + column * FLOAT, d_peaks + line * FLOAT, bits, best_at, padded * FLOAT
                        )
                        if alive == 0:
                            continue
                    if bit_count(alive) >= QUAD_DENSE:
                        if n_dense == 0:
                            first_quad(a + column * LINE, d + line * LINE, bits, spill)
                        else:
                            next_quad(a + column * LINE, d + line * LINE, bits, spill)
                        n_dense += 1
                        n_computed += QUAD * COLUMNS
                        if fresh:
                            reduce_quad(spill, best_at, padded * FLOAT)
                            n_dense = 0
                        continue
                    n_computed += bit_count(alive)
                    while alive != 0:
                        i = lowest_bit(alive)
                        alive &= alive - 1
                        r, c = i >> COLUMN_BITS, i & (COLUMNS - 1)
                        meets = line + 2 * r + (1 - ((bits >> i) & 1))
                        raise_one(a + (column + c) * LINE, d + meets * LINE, best_at + (r * padded + c) * FLOAT)
                if n_dense > 0:
                    reduce_quad(spill, best_at, padded * FLOAT)
    return n_computed


@compiled
def _gather(source: int, offsets: np.ndarray, fan: np.ndarray, factors: int, block: int, sums: int) -> None:
    """Nothing; block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]) and sums[p], in runs of equal stride.

    `source`, `factors`, `block` and `sums` are addresses. Where pieces overlap, the same values are written again.
    """
    n_patches, at_fan, n_fan = len(offsets), fan.ctypes.data, len(fan)
    first = 0
    while first < n_patches:
        step = offsets[first + 1] - offsets[first] if first + 1 < n_patches else 1
        last = first + 1
        while last < n_patches and offsets[last] - offsets[last - 1] == step:
            last += 1
        n, start = last - first, source + offsets[first] * FLOAT
        factor, to, total = factors + first * FLOAT, block + first * FLOAT, sums + first * FLOAT
        done = 0
        if step == 1:
            while n - done >= 16:
                i = done * FLOAT
                gather_16(start + i, at_fan, n_fan, factor + i, to + i, total + i)
                done += 16
            while n >= 8 and done < n:
                i = min(done, n - 8) * FLOAT
                gather_8(start + i, at_fan, n_fan, factor + i, to + i, total + i)
                done += 8
            while n >= 4 and done < n:
                i = min(done, n - 4) * FLOAT
                gather_4(start + i, at_fan, n_fan, factor + i, to + i, total + i)
                done += 4
        elif step == 2:
            while n - done >= 16:
                i = done * FLOAT
                gather_16_even(start + 2 * i, at_fan, n_fan, factor + i, to + i, total + i)
                done += 16
            while n >= 8 and done < n:
                i = min(done, n - 8) * FLOAT
                gather_8_even(start + 2 * i, at_fan, n_fan, factor + i, to + i, total + i)
                done += 8
            while n >= 4 and done < n:
                i = min(done, n - 4) * FLOAT
                gather_4_even(start + 2 * i, at_fan, n_fan, factor + i, to + i, total + i)
                done += 4
        for patch in range(done, n):
            i = patch * FLOAT
            gather_1(start + step * i, at_fan, n_fan, factor + i, to + i, total + i)
        first = last


@compiled
def _normalise(block: np.ndarray, fan_in: int, sums: np.ndarray, peaks: np.ndarray) -> None:
    """Nothing; divides every patch of the block by its sum (0 stays 0) and notes the peaks of the columns."""
    factors = np.empty(BLOCK, np.float32)
    for p in range(BLOCK):
        factors[p] = np.float32(1.0) / sums[p] if sums[p] > 0.0 else np.float32(0.0)
    for k in range(fan_in):
        peaks[k] = scale_line(block[k].ctypes.data, factors.ctypes.data)


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
    point, position = divmod(first, len(positions))
    for p in range(n_patches):
        offsets[p] = at + point * point_stride + positions[position]
        factors[p] = factors_B[point]
        position += 1
        if position == len(positions):
            point, position = point + 1, 0
    if n_patches < BLOCK:
        a[: len(fan), n_patches:] = 0.0
        sums[n_patches:] = 0.0
    _gather(source.ctypes.data, offsets[:n_patches], fan, factors.ctypes.data, a.ctypes.data, sums.ctypes.data)
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
                        d_peaks[block, line] = invert_line(lines[line].ctypes.data)
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
                    tile == first,
                )
    return n_computed


@compiled
def _copy_lines(
    source: np.ndarray, start: int, last: int, block: np.ndarray, first_line: int, step: int, peaks: np.ndarray
) -> None:
    """Nothing; copies patches start.. of every line of `source` into every `step`-th line of the block, zeros after."""
    n_patches = min(BLOCK, last - start)
    for k in range(len(source)):
        line = first_line + k * step
        at = block[line].ctypes.data
        if n_patches == BLOCK:
            peaks[line] = copy_line(source[k].ctypes.data + start * FLOAT, at)
        else:
            block[line, :n_patches] = source[k, start:last]
            block[line, n_patches:] = 0.0
            peaks[line] = copy_line(at, at)


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
                _copy_lines(patches_GKP[g], start, last, a[block], 0, 1, a_peaks[block])
                for s in range(2):
                    _copy_lines(inverse_SGRP[s, g], start, last, d[block], s, 2, d_peaks[block])
            addresses = a.ctypes.data, d.ctypes.data, a_peaks.ctypes.data, d_peaks.ctypes.data
            best = best_GRK[g].ctypes.data
            fresh = skip and tile == first
            n_computed += raise_best(*addresses, signs_GQK[g], best, spill.ctypes.data, n_blocks, skip, fresh)
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
    peaks = np.empty(len(a), np.float32)
    for start in range(first, last, BLOCK):
        n_patches = min(BLOCK, last - start)
        for g in range(len(patches_GKP)):
            _copy_lines(patches_GKP[g], start, last, a, 0, 1, peaks)
            denominators(a.ctypes.data, weights_GX[g].ctypes.data, d, patches_GKP.shape[1])
            for line in range(len(d)):
                sums_SGRP[line & 1, g, line >> 1, start : start + n_patches] = d[line, :n_patches]
