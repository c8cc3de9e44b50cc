"""Compiled loops of the CPU kernels over blocks of patches, laid out as `vectors.py` says; they hold no Python lock."""

from __future__ import annotations

import numpy as np

from sipp.kernels.bands import (
    LARGEST_BAR,
    LEAST_BAR,
    PATCH_BYTES,
    RANK_BYTES,
    SIGN_BYTES,
    above,
    above_zero,
    bar_1,
    bar_2,
    bar_4,
    bit_count,
    highest,
    raise_1,
    raise_2,
    raise_4,
    reaches,
    turn,
)
from sipp.kernels.compiling import compiled
from sipp.kernels.few import raise_lanes
from sipp.kernels.vectors import (
    BLOCK,
    FLOAT,
    INDEX,
    LANES,
    LINE,
    MOST_RANKS,
    RANK,
    STRIP,
    copy_line,
    gather_1,
    gather_4,
    gather_4_even,
    gather_8,
    gather_8_even,
    gather_16,
    gather_16_even,
    invert_line,
    panel_1,
    panel_2,
    panel_3,
    scale_line,
)

SUM_BLOCK = 512  # terms summed before they join the total: bounds the rounding error of long sums (fixed: same bits)
NEAR_PEAK = 0.875  # patches this near a column's peak set its first bar
LARGEST_SCALE = 2.0**100  # of a line: any number serves, if its products stay finite


Packed = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # see `packing.pack`


@compiled
def denominators(a: int, packed: Packed, group: int, d: np.ndarray) -> None:
    """Nothing; fills d[2 r + s, p] with sum over k of w_k^s a_k (T2), always in the same order of terms."""
    panels, magnitudes_GX, places_GNK, ends_GNCQ = packed
    fan_in = places_GNK.shape[2]
    d[:] = 0.0
    for chunk in range(ends_GNCQ.shape[2]):
        start = chunk * SUM_BLOCK
        for panel in range(len(panels) - 1):
            first, n_rows = panels[panel], panels[panel + 1] - panels[panel]
            magnitudes = magnitudes_GX[group].ctypes.data + (first * fan_in + start * n_rows) * FLOAT
            places = places_GNK[group, panel].ctypes.data + start * INDEX
            ends = ends_GNCQ[group, panel, chunk].ctypes.data
            for strip in range(0, BLOCK, STRIP):
                source, target = a + strip * FLOAT, d[2 * first].ctypes.data + strip * FLOAT
                if n_rows == 3:
                    panel_3(source, magnitudes, places, ends, target)
                elif n_rows == 2:
                    panel_2(source, magnitudes, places, ends, target)
                else:
                    panel_1(source, magnitudes, places, ends, target)


@compiled
def band_ranks(first: int, n_ranks: int) -> int:
    """How many ranks the band has that starts at this one: 4, 2 or 1."""
    left = min(n_ranks - first, MOST_RANKS)
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@compiled
def turn_lines(d: np.ndarray, turned: np.ndarray, scales: np.ndarray, floors: np.ndarray, reach: np.ndarray) -> None:
    """Nothing; lays the reciprocals of a block out rows side by side, scales their lines, notes the patches' reach.

    A line is divided by its mean. One that is 0 in the whole block can raise nothing: its floor keeps it out of bars.
    """
    n_ranks = len(turned)
    scales[:] = 0.0
    for rank in range(n_ranks):
        for s in range(2):
            line = d[2 * RANK * rank + s].ctypes.data
            turn(line, 2 * LINE, turned[rank, 0, s].ctypes.data, scales[rank, s].ctypes.data)
    flat_scales, flat_floors = scales.reshape(-1), floors.reshape(-1)
    for i in range(len(flat_scales)):
        total = flat_scales[i]
        flat_floors[i] = np.float32(0.0 if total > 0.0 else LARGEST_BAR)
        flat_scales[i] = min(np.float32(BLOCK) / total, np.float32(LARGEST_SCALE)) if total > 0.0 else np.float32(0.0)
    rank, band = 0, 0
    while rank < n_ranks:
        n = band_ranks(rank, n_ranks)
        reaches(turned[rank].ctypes.data, scales[rank].ctypes.data, n, reach[band].ctypes.data)
        rank, band = rank + n, band + 1


@compiled
def raise_best(
    a: int,
    turned: np.ndarray,
    scales: np.ndarray,
    floors: np.ndarray,
    reach: np.ndarray,
    signs: np.ndarray,
    best: np.ndarray,
    skip: bool,
) -> int:
    """The number of (row, column, patch) triples computed; raises best[k, r] to the largest product of the block.

    `a` is the address of the block's patches. Skipping is exact: line k, patch p is left out of a band where
    a_kp * max_r (u_rp * scale_r) <= min_r (best_kr * scale_r) less the rounding of these products (BAR_SLACK); then
    a_kp * u_rp <= best_kr for every row r of the band. (Inputs are finite; bars that are not normal are not trusted.)
    """
    fan_in, n_ranks = signs.shape
    n_computed = 0
    bars, masks = np.empty(fan_in, np.float32), np.full(fan_in, np.int64(-1))
    rank, band = 0, 0
    while rank < n_ranks:
        n = band_ranks(rank, n_ranks)
        rows, reach_at = turned.ctypes.data + rank * RANK_BYTES, reach[band].ctypes.data
        scale, floor = scales.ctypes.data + rank * PATCH_BYTES, floors.ctypes.data + rank * PATCH_BYTES
        best_at, best_step = best.ctypes.data + rank * RANK * FLOAT, n_ranks * RANK * FLOAT
        signs_at, signs_step = signs.ctypes.data + rank * SIGN_BYTES, n_ranks * SIGN_BYTES
        if skip:  # three loops: what the first two find is there before the third has to branch on it
            for k in range(fan_in):
                bars[k] = _bar(n, best_at + k * best_step, scale, floor, signs_at + k * signs_step)
            for k in range(fan_in):
                masks[k] = above(a + k * LINE, reach_at, bars[k])
        for k in range(fan_in):
            line, column, column_signs = a + k * LINE, best_at + k * best_step, signs_at + k * signs_step
            mask = masks[k]
            if skip and bars[k] < LEAST_BAR:  # a maximum is 0 yet: the likeliest patches first, so that they set a bar
                bar, peak = bars[k], highest(line, reach_at)
                if peak >= LEAST_BAR:
                    mask = above(line, reach_at, peak * np.float32(NEAR_PEAK))
                    n_computed += bit_count(mask) * n * RANK
                    _raise(n, mask, line, rows, column, column_signs)
                    bar = _bar(n, column, scale, floor, column_signs)
                mask = above(line, reach_at, bar) if bar >= LEAST_BAR else above_zero(line)
            if mask != 0:
                n_computed += bit_count(mask) * n * RANK
                _raise(n, mask, line, rows, column, column_signs)
        rank, band = rank + n, band + 1
    return n_computed


@compiled
def raise_few(a: int, step: int, d: np.ndarray, n_rows: int, signs: np.ndarray, best: np.ndarray) -> int:
    """The number of triples computed: all; raises best[k, r * LANES + lane] to the largest product of the lane.

    `a` is the address of the block's patches, their lines `step` bytes apart; d holds the reciprocals.
    """
    fan_in, n_ranks = signs.shape
    lines, maxima, bits = d.ctypes.data, best.ctypes.data, signs.ctypes.data
    for k in range(fan_in):
        for rank in range(n_ranks):
            first = rank * RANK
            raise_lanes(
                min(RANK, n_rows - first),
                a + k * step,
                lines + first * 2 * LINE,
                maxima + (k * n_rows + first) * LANES * FLOAT,
                bits + (k * n_ranks + rank) * SIGN_BYTES,
            )
    return n_rows * fan_in * BLOCK


@compiled
def _bar(n_ranks: int, best: int, scales: int, floors: int, signs: int) -> np.float32:
    if n_ranks == 4:
        return bar_4(best, scales, floors, signs)
    if n_ranks == 2:
        return bar_2(best, scales, floors, signs)
    return bar_1(best, scales, floors, signs)


@compiled
def _raise(n_ranks: int, mask: int, line: int, turned: int, best: int, signs: int) -> None:
    if n_ranks == 4:
        raise_4(mask, line, turned, best, signs)
    elif n_ranks == 2:
        raise_2(mask, line, turned, best, signs)
    else:
        raise_1(mask, line, turned, best, signs)


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
            squares[0, p] += positive * positive
            squares[1, p] += negative * negative
            outputs[p] = positive - negative
        if turn == 1:
            z[r] = outputs
            continue
        if turn == 2:
            for p in range(BLOCK):
                outputs[p] -= z[r, p]
        for p in range(BLOCK):
            squares[2, p] += outputs[p] * outputs[p]


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


Scratch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@compiled
def scan(
    source: np.ndarray,
    strides: tuple[int, int],
    positions: np.ndarray,
    fan: np.ndarray,
    factors_TB: np.ndarray,
    packed: Packed,
    signs_GKR: np.ndarray,
    row_factors_GR: np.ndarray,
    stretch: tuple[int, int],
    scratch: Scratch,
    best_GKX: np.ndarray,
    is_few: bool,
    squares_QP: np.ndarray,
) -> int:
    """The number of triples computed; takes a stretch of patches into the maxima and the squares.

    Patch p is position p % n of point p / n, n = len(positions); value k of group g of it lies in `source` at
    point * strides[0] + g * strides[1] + positions[p % n] + fan[k]. factors_TB[t, b] scales the activations of point
    b that have sign t; it is 0 where there are none.
    """
    a, d, z, turned, scales, floors, reach = scratch
    n_groups, n_rows = row_factors_GR.shape
    first, last = stretch
    occurs = (np.any(factors_TB[0] != 0.0), np.any(factors_TB[1] != 0.0))
    both = occurs[0] and occurs[1]
    sums = np.empty(BLOCK, np.float32)
    squares = np.empty((3, BLOCK))
    n_computed = 0
    for start in range(first, last, BLOCK):
        place = (start, last, strides[0])
        for g in range(n_groups):
            for t in range(2):
                if not occurs[t]:
                    continue
                _prepare(source, g * strides[1], place, positions, fan, factors_TB[t], a, sums)
                lines = d[: 2 * n_rows]
                denominators(a.ctypes.data, packed, g, lines)
                squares[:] = 0.0
                _add_squares(lines, row_factors_GR[g], sums, z, (1 + t) if both else 0, squares)
                for p in range(min(BLOCK, last - start)):
                    squares_QP[2 * t, start + p] += squares[0, p]
                    squares_QP[2 * t + 1, start + p] += squares[1, p]
                    squares_QP[4, start + p] += squares[2, p]
                for line in range(2 * n_rows):
                    invert_line(lines[line].ctypes.data)
                if is_few:
                    n_computed += raise_few(a.ctypes.data, LINE, d, n_rows, signs_GKR[g], best_GKX[g])
                    continue
                turn_lines(d, turned, scales, floors, reach)
                n_computed += raise_best(a.ctypes.data, turned, scales, floors, reach, signs_GKR[g], best_GKX[g], True)
    return n_computed


@compiled
def _copy_lines(source: np.ndarray, start: int, last: int, block: np.ndarray, first_line: int, step: int) -> None:
    """Nothing; copies patches start.. of every line of `source` into every `step`-th line of the block, zeros after."""
    n_patches = min(BLOCK, last - start)
    for k in range(len(source)):
        line = first_line + k * step
        if n_patches == BLOCK:
            copy_line(source[k].ctypes.data + start * FLOAT, block[line].ctypes.data)
        else:
            block[line, :n_patches] = source[k, start:last]
            block[line, n_patches:] = 0.0


@compiled
def product(
    patches_GKP: np.ndarray,
    inverse_SGRP: np.ndarray,
    signs_GKR: np.ndarray,
    stretch: tuple[int, int],
    scratch: Scratch,
    best_GKX: np.ndarray,
    is_few: bool,
    skip: bool,
) -> int:
    """The number of triples computed; takes a stretch of patches into the maxima of their products."""
    a, d, _, turned, scales, floors, reach = scratch
    n_rows, n_patches = inverse_SGRP.shape[2:]
    first, last = stretch
    n_computed = 0
    for g in range(len(patches_GKP)):
        for start in range(first, last, BLOCK):
            for s in range(2):
                _copy_lines(inverse_SGRP[s, g], start, last, d, s, 2)
            if is_few and last - start >= BLOCK:  # each line is read once: where it is
                source, step = patches_GKP[g].ctypes.data + start * FLOAT, n_patches * FLOAT
            else:
                _copy_lines(patches_GKP[g], start, last, a, 0, 1)
                source, step = a.ctypes.data, LINE
            if is_few:
                n_computed += raise_few(source, step, d, n_rows, signs_GKR[g], best_GKX[g])
                continue
            turn_lines(d, turned, scales, floors, reach)
            n_computed += raise_best(source, turned, scales, floors, reach, signs_GKR[g], best_GKX[g], skip)
    return n_computed


@compiled
def sums(
    patches_GKP: np.ndarray,
    packed: Packed,
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
            denominators(a.ctypes.data, packed, g, d)
            for line in range(len(d)):
                sums_SGRP[line & 1, g, line >> 1, start : start + n_patches] = d[line, :n_patches]
