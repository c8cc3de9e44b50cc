"""Compiled loops over the windows of a layer: block by block of patches, their reciprocals, then maxima or means."""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.block_loops import Packed, Scratch, denominators, raise_best, turn_lines, turn_rows
from sipp.scoring.kernels.cpu.compiling import compiled
from sipp.scoring.kernels.cpu.every_product import raise_few
from sipp.scoring.kernels.cpu.mean_code import COLUMNS, mean_column, mean_columns, sum_column, sum_columns
from sipp.scoring.kernels.cpu.skipping import PATCH_BYTES, RANK_BYTES, SIGN_BYTES
from sipp.scoring.kernels.cpu.target import product_and_sum
from sipp.scoring.kernels.cpu.vector_code import (
    BLOCK,
    FLOAT,
    LINE,
    RANK,
    gather_1,
    gather_4,
    gather_4_even,
    gather_8,
    gather_8_even,
    gather_16,
    gather_16_even,
    gather_lines,
    invert_line,
    scale_line,
)

# source, strides, positions, fan, factors_TB, packed, row_factors_GR. Patch p is position p % n of point p / n,
# n = len(positions); value k of group g of it lies in `source` at
# point * strides[0] + g * strides[1] + positions[p % n] + fan[k].
# factors_TB[t, b] scales the activations of point b that have sign t; it is 0 where there are none.
Layer = tuple[np.ndarray, tuple[int, int], np.ndarray, np.ndarray, np.ndarray, Packed, np.ndarray]


@compiled
def _gather(source: int, offsets: np.ndarray, fan: np.ndarray, factors: int, block: int, sums: int) -> None:
    """Nothing; block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]) and sums[p], in runs of equal stride.

    `source`, `factors`, `block` and `sums` are addresses. Where pieces overlap, the same values are written again.
    """
    n_patches, at_fan, n_fan = len(offsets), fan.ctypes.data, len(fan)
    is_line = fan[-1] - fan[0] == n_fan - 1  # columns lie side by side
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
        elif is_line:
            while n - done >= RANK:
                i, patches = done * FLOAT, offsets[first + done :].ctypes.data
                gather_lines(source + fan[0] * FLOAT, patches, n_fan, factor + i, to + i, total + i)
                done += RANK
        for patch in range(done, n):
            i = patch * FLOAT
            gather_1(start + step * i, at_fan, n_fan, factor + i, to + i, total + i)
        first = last


@compiled
def _normalise(block: np.ndarray, sums: np.ndarray) -> None:
    """Nothing; divides every patch of the block by its sum (0 stays 0)."""
    factors = np.empty(BLOCK, np.float32)
    for p in range(BLOCK):
        factors[p] = np.float32(1.0) / sums[p] if sums[p] > 0.0 else np.float32(0.0)
    for k in range(len(block)):
        scale_line(block[k].ctypes.data, factors.ctypes.data)


@compiled
def _add_squares(
    d: np.ndarray, row_factors: np.ndarray, sums: np.ndarray, z: np.ndarray, turn: int, squares: np.ndarray
) -> None:
    """Nothing; adds a block's squared denominators, and squared outputs once they are complete, to squares[q, p].

    `turn`: 0 the only sign of the activations, 1 the first of two (their outputs wait in z), 2 the second.
    """
    outputs = np.empty(BLOCK)
    for r in range(len(row_factors)):
        for p in range(BLOCK):  # loops without a branch, which a compiler turns into vectors
            scale = row_factors[r] * sums[p]
            positive, negative = d[2 * r, p] * scale, d[2 * r + 1, p] * scale
            squares[0, p] = product_and_sum(positive, positive, squares[0, p])
            squares[1, p] = product_and_sum(negative, negative, squares[1, p])
            outputs[p] = positive - negative
        if turn == 1:
            z[r] = outputs
            continue
        if turn == 2:
            for p in range(BLOCK):
                outputs[p] -= z[r, p]
        for p in range(BLOCK):
            squares[2, p] = product_and_sum(outputs[p], outputs[p], squares[2, p])


@compiled
def _prepare(
    source: np.ndarray,
    at: int,
    place: tuple[int, int, int],
    positions: np.ndarray,
    fan: np.ndarray,
    factors_B: np.ndarray,
    a: np.ndarray,
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
        a[:, n_patches:] = 0.0
        sums[n_patches:] = 0.0
    _gather(source.ctypes.data, offsets[:n_patches], fan, factors.ctypes.data, a.ctypes.data, sums.ctypes.data)
    _normalise(a, sums)


@compiled
def _occurring(factors_TB: np.ndarray) -> tuple[bool, bool]:
    """Whether there are positive, and negative, activations."""
    return bool(np.any(factors_TB[0] != 0.0)), bool(np.any(factors_TB[1] != 0.0))


@compiled
def _reciprocals(
    layer: Layer, patches: tuple[int, int], g: int, t: int, both: bool, scratch: Scratch, squares_QP: np.ndarray
) -> None:
    """Nothing; lays one block of patches of group g and sign t out in a, 1/D in d, and adds their squares."""
    source, strides, positions, fan, factors_TB, packed, row_factors_GR = layer
    a, d, z, sums, squares = scratch[:5]
    start, stop = patches
    squares[:] = 0.0
    _prepare(source, g * strides[1], (start, stop, strides[0]), positions, fan, factors_TB[t], a, sums)
    lines = d[: 2 * row_factors_GR.shape[1]]
    denominators(a.ctypes.data, packed, g, lines)
    _add_squares(lines, row_factors_GR[g], sums, z, (1 + t) if both else 0, squares)
    for p in range(stop - start):
        squares_QP[2 * t, start + p] += squares[0, p]
        squares_QP[2 * t + 1, start + p] += squares[1, p]
        squares_QP[4, start + p] += squares[2, p]
    for line in range(len(lines)):
        invert_line(lines[line].ctypes.data)


@compiled
def scan(
    layer: Layer,
    signs_GKR: np.ndarray,
    stretch: tuple[int, int],
    scratch: Scratch,
    best_GKX: np.ndarray,
    is_few: bool,
    squares_QP: np.ndarray,
) -> int:
    """The number of triples computed; takes a stretch of patches into the maxima and the squares."""
    a, d, _, _, _, turned, scales, floors, reach = scratch
    n_groups, n_rows = layer[6].shape
    occurs = _occurring(layer[4])
    n_computed = 0
    for start in range(stretch[0], stretch[1], BLOCK):
        patches = (start, min(start + BLOCK, stretch[1]))
        for g in range(n_groups):
            for t in range(2):
                if not occurs[t]:
                    continue
                _reciprocals(layer, patches, g, t, occurs[0] and occurs[1], scratch, squares_QP)
                if is_few:
                    n_computed += raise_few(a.ctypes.data, d, n_rows, signs_GKR[g], best_GKX[g])
                    continue
                turn_lines(d, turned, scales, floors, reach)
                n_computed += raise_best(a.ctypes.data, turned, scales, floors, reach, signs_GKR[g], best_GKX[g], True)
    return n_computed


@compiled
def scan_means(
    layer: Layer,
    signs_GKR: np.ndarray,
    starts: np.ndarray,
    shares_B: np.ndarray,
    scratch: Scratch,
    totals_TGKR: np.ndarray,
    best_GKR: np.ndarray,
    squares_QP: np.ndarray,
) -> None:
    """Nothing; takes the blocks from starts[i] to starts[i + 1] into the largest means of a point, and the squares.

    shares_B[b] is what a patch of point b counts. A block holds whole points, or a part of one: then its sums wait in
    `totals`, which are 0 before and after.
    """
    a, d, _, _, _, turned, scales, _, _ = scratch
    n_each, occurs = len(layer[2]), _occurring(layer[4])
    for i in range(len(starts) - 1):
        start, stop = starts[i], starts[i + 1]
        is_whole = n_each <= BLOCK
        for g in range(len(signs_GKR)):
            for t in range(2):
                if not occurs[t]:
                    continue
                _reciprocals(layer, (start, stop), g, t, occurs[0] and occurs[1], scratch, squares_QP)
                turn_rows(d, turned, scales)
                sizes, shares = (stop - start, n_each if is_whole else stop - start), shares_B[start // n_each :]
                out = best_GKR[g] if is_whole else totals_TGKR[t, g]
                _add_means(a.ctypes.data, turned.ctypes.data, sizes, signs_GKR[g], shares, out, is_whole)
                if not is_whole and stop % n_each == 0:
                    _settle(totals_TGKR[t, g].reshape(-1), shares[0], best_GKR[g].reshape(-1))


@compiled
def _add_means(
    a: int, turned: int, sizes: tuple[int, int], signs: np.ndarray, shares: np.ndarray, out: np.ndarray, is_whole: bool
) -> None:
    """Nothing; takes the sums over patches, sizes[0] in all and sizes[1] at a time, into out[k, r]."""
    fan_in, n_ranks = signs.shape
    n_patches, n_each = sizes
    signs_step, out_step = n_ranks * SIGN_BYTES, n_ranks * RANK * FLOAT
    for rank in range(n_ranks):
        k = 0
        while k < fan_in:
            is_wide = fan_in - k >= COLUMNS
            at, to = signs.ctypes.data + k * signs_step + rank * SIGN_BYTES, out[k].ctypes.data + rank * RANK * FLOAT
            for p in range(0, n_patches, n_each):  # here, so that what is raised stays in the cache
                share = shares[p // n_each]
                line, rows = a + k * LINE + p * FLOAT, turned + rank * RANK_BYTES + p * PATCH_BYTES
                if is_wide and is_whole:
                    mean_columns(n_each, line, rows, at, signs_step, to, out_step, share)
                elif is_wide:
                    sum_columns(n_each, line, rows, at, signs_step, to, out_step, share)
                elif is_whole:
                    mean_column(n_each, line, rows, at, signs_step, to, out_step, share)
                else:
                    sum_column(n_each, line, rows, at, signs_step, to, out_step, share)
            k += COLUMNS if is_wide else 1


@compiled
def _settle(totals: np.ndarray, share: np.float32, best: np.ndarray) -> None:
    """Nothing; takes the means of a point into the largest ones, and sets its sums to 0."""
    for i in range(len(totals)):
        best[i] = max(best[i], totals[i] * share)
        totals[i] = 0.0
