"""Compiled loops over the windows of a layer: block by block of patches, their reciprocals, then maxima or means."""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.block_code import (
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
from sipp.scoring.kernels.cpu.block_loops import denominators, raise_best, turn_lines, turn_rows
from sipp.scoring.kernels.cpu.every_product import raise_by_all
from sipp.scoring.kernels.cpu.host import compiled
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    FLOAT,
    LINE,
    MEAN_COLUMNS,
    PATCH_BYTES,
    RANK,
    RANK_BYTES,
    RANK_VECTOR,
    SIGN_BYTES,
    Layer,
    Scratch,
)
from sipp.scoring.kernels.cpu.llvm import product_and_sum
from sipp.scoring.kernels.cpu.mean_code import mean_column, mean_columns, sum_column, sum_columns

ONLY_SIGN, FIRST_SIGN, SECOND_SIGN = 0, 1, 2  # of a block's activations


@compiled
def _gather(source: int, offsets: np.ndarray, fan: np.ndarray, factors: int, block: int, sums: int) -> None:
    """Fills block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]) and its sums[p], in runs of equal stride.

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
    """Divides every patch of the block by its sum (0 stays 0)."""
    factors = np.empty(BLOCK, np.float32)
    for p in range(BLOCK):
        factors[p] = np.float32(1.0) / sums[p] if sums[p] > 0.0 else np.float32(0.0)
    for k in range(len(block)):
        scale_line(block[k].ctypes.data, factors.ctypes.data)


@compiled
def _add_squares(row_factors: np.ndarray, turn: int, scratch: Scratch) -> None:
    """Adds a block's squared denominators, and squared outputs once they are complete, to `squares_XP`.

    `turn`: ONLY_SIGN of the activations, FIRST_SIGN of two (their outputs wait), or SECOND_SIGN.
    """
    d, sums, waiting, squares = scratch.d_LP, scratch.sums_P, scratch.outputs_RP, scratch.squares_XP
    outputs = np.empty(BLOCK)
    for r in range(len(row_factors)):
        for p in range(BLOCK):  # loops without a branch, which a compiler turns into vectors
            scale = row_factors[r] * sums[p]
            positive, negative = d[2 * r, p] * scale, d[2 * r + 1, p] * scale
            squares[0, p] = product_and_sum(positive, positive, squares[0, p])
            squares[1, p] = product_and_sum(negative, negative, squares[1, p])
            outputs[p] = positive - negative
        if turn == FIRST_SIGN:
            waiting[r] = outputs
            continue
        if turn == SECOND_SIGN:
            for p in range(BLOCK):
                outputs[p] -= waiting[r, p]
        for p in range(BLOCK):
            squares[2, p] = product_and_sum(outputs[p], outputs[p], squares[2, p])


@compiled
def _prepare(layer: Layer, start: int, stop: int, g: int, t: int, scratch: Scratch) -> None:
    """Lays the patches start..stop of group g and sign t out in `a_KP`, scaled to sum 1 each; zeros after them."""
    a, sums, positions, factors_B = scratch.a_KP, scratch.sums_P, layer.positions, layer.factors_TB[t]
    offsets, factors = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.float32)
    n_patches = min(BLOCK, stop - start)
    point, position = divmod(start, len(positions))
    for p in range(n_patches):
        offsets[p] = g * layer.group_stride + point * layer.point_stride + positions[position]
        factors[p] = factors_B[point]
        position += 1
        if position == len(positions):
            point, position = point + 1, 0
    if n_patches < BLOCK:
        a[:, n_patches:] = 0.0
        sums[n_patches:] = 0.0
    source, to, totals = layer.source.ctypes.data, a.ctypes.data, sums.ctypes.data
    _gather(source, offsets[:n_patches], layer.fan, factors.ctypes.data, to, totals)
    _normalise(a, sums)


@compiled
def _occurring(factors_TB: np.ndarray) -> tuple[bool, bool]:
    """Whether there are positive, and negative, activations."""
    return bool(np.any(factors_TB[0] != 0.0)), bool(np.any(factors_TB[1] != 0.0))


@compiled
def _reciprocals(
    layer: Layer, start: int, stop: int, g: int, t: int, turn: int, scratch: Scratch, squares_QP: np.ndarray
) -> None:
    """Lays one block of patches of group g and sign t out in `a_KP`, 1/D in `d_LP`, and adds their squares."""
    row_factors, squares = layer.row_factors_GR[g], scratch.squares_XP
    squares[:] = 0.0
    _prepare(layer, start, stop, g, t, scratch)
    lines = scratch.d_LP[: 2 * len(row_factors)]
    denominators(scratch.a_KP.ctypes.data, layer.weights, g, lines)
    _add_squares(row_factors, turn, scratch)
    for p in range(stop - start):
        squares_QP[2 * t, start + p] += squares[0, p]
        squares_QP[2 * t + 1, start + p] += squares[1, p]
        squares_QP[4, start + p] += squares[2, p]
    for line in range(len(lines)):
        invert_line(lines[line].ctypes.data)


@compiled
def scan(
    layer: Layer,
    stretch: tuple[int, int],
    scratch: Scratch,
    best_GKX: np.ndarray,
    every_product: bool,
    squares_QP: np.ndarray,
) -> None:
    """Takes a stretch of patches into the maxima and the squares."""
    n_groups, n_rows = layer.row_factors_GR.shape
    occurs = _occurring(layer.factors_TB)
    first, last = stretch
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        for g in range(n_groups):
            for t in range(2):
                if not occurs[t]:
                    continue
                turn = (FIRST_SIGN + t) if occurs[0] and occurs[1] else ONLY_SIGN
                _reciprocals(layer, start, stop, g, t, turn, scratch, squares_QP)
                if every_product:
                    a = scratch.a_KP.ctypes.data
                    raise_by_all(a, scratch.d_LP, n_rows, layer.signs_GKR[g], best_GKX[g])
                else:
                    turn_lines(scratch)
                    raise_best(scratch, layer.signs_GKR[g], best_GKX[g], True)


@compiled
def scan_means(
    layer: Layer,
    starts: np.ndarray,
    shares_B: np.ndarray,
    scratch: Scratch,
    totals_TGKR: np.ndarray,
    best_GKR: np.ndarray,
    squares_QP: np.ndarray,
) -> None:
    """Takes the blocks from starts[i] to starts[i + 1] into the largest means of a point, and the squares.

    shares_B[b] is what a patch of point b counts. A block holds whole points, or a part of one: then its sums wait in
    `totals`, which are 0 before and after.
    """
    n_each, occurs = len(layer.positions), _occurring(layer.factors_TB)
    is_whole = n_each <= BLOCK
    for i in range(len(starts) - 1):
        start, stop = starts[i], starts[i + 1]
        for g in range(len(layer.signs_GKR)):
            for t in range(2):
                if not occurs[t]:
                    continue
                turn = (FIRST_SIGN + t) if occurs[0] and occurs[1] else ONLY_SIGN
                _reciprocals(layer, start, stop, g, t, turn, scratch, squares_QP)
                turn_rows(scratch.d_LP, scratch.turned, scratch.scales)
                n_patches, shares = stop - start, shares_B[start // n_each :]
                out = best_GKR[g] if is_whole else totals_TGKR[t, g]
                n_summed = n_each if is_whole else n_patches
                _add_means(scratch, n_patches, n_summed, layer.signs_GKR[g], shares, out, is_whole)
                if not is_whole and stop % n_each == 0:
                    _settle(totals_TGKR[t, g].reshape(-1), shares[0], best_GKR[g].reshape(-1))


@compiled
def _add_means(
    scratch: Scratch,
    n_patches: int,
    n_each: int,
    signs: np.ndarray,
    shares: np.ndarray,
    out: np.ndarray,
    is_whole: bool,
) -> None:
    """Takes the sums over patches, n_each of n_patches at a time, into out[k, r]."""
    a, turned = scratch.a_KP.ctypes.data, scratch.turned.ctypes.data
    fan_in, n_ranks = signs.shape
    signs_step, out_step = n_ranks * SIGN_BYTES, n_ranks * RANK_VECTOR
    for rank in range(n_ranks):
        k = 0
        while k < fan_in:
            is_wide = fan_in - k >= MEAN_COLUMNS
            at, to = signs.ctypes.data + k * signs_step + rank * SIGN_BYTES, out[k].ctypes.data + rank * RANK_VECTOR
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
            k += MEAN_COLUMNS if is_wide else 1


@compiled
def _settle(totals: np.ndarray, share: np.float32, best: np.ndarray) -> None:
    """Takes the means of a point into the largest ones, and sets its sums to 0."""
    for i in range(len(totals)):
        best[i] = max(best[i], totals[i] * share)
        totals[i] = 0.0
