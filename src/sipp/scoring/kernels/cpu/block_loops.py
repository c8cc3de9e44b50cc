"""Compiled loops over one block of patches, laid out as in `layout.py`: denominators, reciprocals, maxima.

No loop holds the Python lock.
"""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.block_code import copy_line, panel_1, panel_2, panel_3
from sipp.scoring.kernels.cpu.host import Native
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    FLOAT,
    INDEX,
    LINE,
    MOST_RANKS,
    PANEL,
    PATCH_BYTES,
    RANK,
    RANK_BYTES,
    RANK_VECTOR,
    SIGN_BYTES,
    STRIP,
    SUM_BLOCK,
    PackedWeights,
    Scratch,
)
from sipp.scoring.kernels.cpu.llvm import (
    calling,
    float_at,
    long_at,
    put_float,
    put_long,
    reading,
)
from sipp.scoring.kernels.cpu.skip_code import (
    LARGEST_BAR,
    LEAST_BAR,
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

NEAR_PEAK = 0.875  # patches this near a column's peak set its first bar
LARGEST_SCALE = 2.0**100  # of a line: any number serves, if its products stay finite
N_PATTERNS = 2**PANEL

read_weights, read_scratch = reading(PackedWeights), reading(Scratch)
_call_2, _call_4, _call_6 = (calling(n) for n in (2, 4, 6))


def fill(at: int, n: int, value: float) -> None:
    """Sets n floats to this value."""
    for i in range(n):
        put_float(at, i, value)


@Native
def denominators(a: int, weights_at: int, group: int, d: int) -> None:
    """Fills d[2 r + s, p] with sum over k of w_k^s a_k (T2), always in the same order of terms."""
    weights = read_weights(weights_at)
    fan_in, n_chunks = weights.fan_in, weights.n_chunks
    all_magnitudes = weights.magnitudes_GX + group * weights.n_rows * fan_in * FLOAT
    fill(d, 2 * weights.n_rows * BLOCK, 0.0)
    for chunk in range(n_chunks):
        start = chunk * SUM_BLOCK
        for panel in range(weights.n_panels):
            first = long_at(weights.panels, panel)
            n_rows, panel_of_all = long_at(weights.panels, panel + 1) - first, group * weights.n_panels + panel
            magnitudes = all_magnitudes + (first * fan_in + start * n_rows) * FLOAT
            places = weights.places_GNK + (panel_of_all * fan_in + start) * INDEX
            ends = weights.ends_GNCQ + (panel_of_all * n_chunks + chunk) * N_PATTERNS * INDEX
            for strip in range(0, BLOCK, STRIP):
                source, target = a + strip * FLOAT, d + 2 * first * LINE + strip * FLOAT
                if n_rows == 3:
                    panel_3(source, magnitudes, places, ends, target)
                elif n_rows == 2:
                    panel_2(source, magnitudes, places, ends, target)
                else:
                    panel_1(source, magnitudes, places, ends, target)


def band_ranks(first: int, n_ranks: int) -> int:
    """How many ranks the band has that starts at this one: 4, 2 or 1."""
    left = min(n_ranks - first, MOST_RANKS)
    return 4 if left >= 4 else (2 if left >= 2 else 1)


def turn_rows(scratch: Scratch, n_ranks: int) -> None:
    """Lays the reciprocals of a block out rows side by side, and fills scales[rank, s, r] with their sums."""
    fill(scratch.scales, n_ranks * 2 * RANK, 0.0)
    for rank in range(n_ranks):
        for s in range(2):
            line, turned = scratch.d_LP + (2 * RANK * rank + s) * LINE, scratch.turned + rank * RANK_BYTES
            turn(line, 2 * LINE, turned + s * RANK_VECTOR, scratch.scales + rank * PATCH_BYTES + s * RANK_VECTOR)


@Native
def turn_lines(scratch_at: int, n_ranks: int) -> None:
    """Lays the reciprocals of a block out rows side by side, scales their lines, notes the patches' reach.

    A line is divided by its mean. One that is 0 in the whole block can raise nothing: its floor keeps it out of bars.
    """
    scratch = read_scratch(scratch_at)
    turn_rows(scratch, n_ranks)
    for i in range(n_ranks * 2 * RANK):
        total = float_at(scratch.scales, i)
        is_zero = not total > 0.0
        put_float(scratch.floors, i, np.float32(LARGEST_BAR) if is_zero else np.float32(0.0))
        scale = np.float32(0.0) if is_zero else min(np.float32(BLOCK) / total, np.float32(LARGEST_SCALE))
        put_float(scratch.scales, i, scale)
    rank, band = 0, 0
    while rank < n_ranks:
        n = band_ranks(rank, n_ranks)
        turned, scales = scratch.turned + rank * RANK_BYTES, scratch.scales + rank * PATCH_BYTES
        reaches(turned, scales, n, scratch.reach + band * LINE)
        rank, band = rank + n, band + 1


@Native
def raise_best(scratch_at: int, signs: int, fan_in: int, n_ranks: int, best: int, skip: int) -> None:
    """Raises best[k, r] to the largest product of the block; counts the (row, column, patch) triples computed.

    Skipping is exact: line k, patch p is left out of a band where
    a_kp * max_r (u_rp * scale_r) <= min_r (best_kr * scale_r) less the rounding of these products (BAR_SLACK); then
    a_kp * u_rp <= best_kr for every row r of the band. (Inputs are finite; bars that are not normal are not trusted.)
    """
    scratch = read_scratch(scratch_at)
    a, bars, masks = scratch.a_KP, scratch.bars_K, scratch.masks_K
    best_step, signs_step = n_ranks * RANK_VECTOR, n_ranks * SIGN_BYTES
    n_computed = 0
    rank, band = 0, 0
    while rank < n_ranks:
        n = band_ranks(rank, n_ranks)
        rows, reach = scratch.turned + rank * RANK_BYTES, scratch.reach + band * LINE
        scale, floor = scratch.scales + rank * PATCH_BYTES, scratch.floors + rank * PATCH_BYTES
        best_at, signs_at = best + rank * RANK_VECTOR, signs + rank * SIGN_BYTES
        # three loops: what the first two find is there before the third has to branch on it
        for k in range(fan_in if skip else 0):
            put_float(bars, k, _bar(n, best_at + k * best_step, scale, floor, signs_at + k * signs_step))
        for k in range(fan_in):
            put_long(masks, k, above(a + k * LINE, reach, float_at(bars, k)) if skip else -1)
        for k in range(fan_in):
            line, column, column_signs = a + k * LINE, best_at + k * best_step, signs_at + k * signs_step
            mask = long_at(masks, k)
            if skip and float_at(bars, k) < LEAST_BAR:  # a maximum is 0 yet: the likeliest patches first set a bar
                bar, peak = float_at(bars, k), highest(line, reach)
                if peak >= LEAST_BAR:
                    mask = above(line, reach, peak * np.float32(NEAR_PEAK))
                    n_computed += bit_count(mask) * n * RANK
                    _raise(n, mask, line, rows, column, column_signs)
                    bar = _bar(n, column, scale, floor, column_signs)
                mask = above(line, reach, bar) if bar >= LEAST_BAR else above_zero(line)
            if mask != 0:
                n_computed += bit_count(mask) * n * RANK
                _raise(n, mask, line, rows, column, column_signs)
        rank, band = rank + n, band + 1
    put_long(scratch.n_computed, 0, long_at(scratch.n_computed, 0) + n_computed)


def _bar(n_ranks: int, best: int, scales: int, floors: int, signs: int) -> np.float32:
    if n_ranks == 4:
        return bar_4(best, scales, floors, signs)
    if n_ranks == 2:
        return bar_2(best, scales, floors, signs)
    return bar_1(best, scales, floors, signs)


def _raise(n_ranks: int, mask: int, line: int, turned: int, best: int, signs: int) -> None:
    if n_ranks == 4:
        raise_4(mask, line, turned, best, signs)
    elif n_ranks == 2:
        raise_2(mask, line, turned, best, signs)
    else:
        raise_1(mask, line, turned, best, signs)


def copy_lines(source: int, source_step: int, n_lines: int, n_patches: int, block: int, block_step: int) -> None:
    """Copies the first patches of lines into lines of a block, zeros after; both so many bytes apart."""
    for k in range(n_lines):
        line, to = source + k * source_step, block + k * block_step
        if n_patches >= BLOCK:
            copy_line(line, to)
        else:
            for p in range(n_patches):
                put_float(to, p, float_at(line, p))
            for p in range(n_patches, BLOCK):
                put_float(to, p, 0.0)


@Native
def product(
    patches_GKP: int,
    inverse_SGRP: int,
    signs_GKR: int,
    sizes: int,
    first: int,
    last: int,
    scratch_at: int,
    best_GKR: int,
    skip: int,
    turn_lines: int,
    raise_best: int,
) -> None:
    """Takes a stretch of patches into the maxima of their products. `sizes`: groups, rows, fan-in, ranks, patches."""
    scratch = read_scratch(scratch_at)
    n_groups, n_rows, fan_in = long_at(sizes, 0), long_at(sizes, 1), long_at(sizes, 2)
    n_ranks, step = long_at(sizes, 3), long_at(sizes, 4) * FLOAT
    for g in range(n_groups):
        signs, best = signs_GKR + g * fan_in * n_ranks * SIGN_BYTES, best_GKR + g * fan_in * n_ranks * RANK_VECTOR
        for start in range(first, last, BLOCK):
            left, at = last - start, start * FLOAT
            copy_lines(patches_GKP + g * fan_in * step + at, step, fan_in, left, scratch.a_KP, LINE)
            for s in range(2):
                inverse = inverse_SGRP + (s * n_groups + g) * n_rows * step + at
                copy_lines(inverse, step, n_rows, left, scratch.d_LP + s * LINE, 2 * LINE)
            _call_2(turn_lines, scratch_at, n_ranks)
            _call_6(raise_best, scratch_at, signs, fan_in, n_ranks, best, skip)


@Native
def sums(
    patches_GKP: int,
    weights_at: int,
    denominators: int,
    n_patches: int,
    first: int,
    last: int,
    a: int,
    d: int,
    out: int,
) -> None:
    """Fills a stretch of the denominators out[s, g, r, p]."""
    weights, step = read_weights(weights_at), n_patches * FLOAT
    n_groups, n_rows = weights.n_groups, weights.n_rows
    for start in range(first, last, BLOCK):
        for g in range(n_groups):
            block = patches_GKP + g * weights.fan_in * step + start * FLOAT
            copy_lines(block, step, weights.fan_in, last - start, a, LINE)
            _call_4(denominators, a, weights_at, g, d)
            for line in range(2 * n_rows):
                to = (((line & 1) * n_groups + g) * n_rows + (line >> 1)) * n_patches + start
                for p in range(min(BLOCK, last - start)):
                    put_float(out, to + p, float_at(d, line * BLOCK + p))
