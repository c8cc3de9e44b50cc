"""Compiled loops over one block of patches, laid out as in `layout.py`: denominators, reciprocals, maxima.

No loop holds the Python lock.
"""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.block_code import copy_line, panel_1, panel_2, panel_3
from sipp.scoring.kernels.cpu.host import compiled
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    FLOAT,
    INDEX,
    LINE,
    MOST_RANKS,
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


@compiled
def denominators(a: int, weights: PackedWeights, group: int, d: np.ndarray) -> None:
    """Fills d[2 r + s, p] with sum over k of w_k^s a_k (T2), always in the same order of terms."""
    panels, fan_in = weights.panels, weights.places_GNK.shape[2]
    d[:] = 0.0
    for chunk in range(weights.ends_GNCQ.shape[2]):
        start = chunk * SUM_BLOCK
        for panel in range(len(panels) - 1):
            first, n_rows = panels[panel], panels[panel + 1] - panels[panel]
            magnitudes = weights.magnitudes_GX[group].ctypes.data + (first * fan_in + start * n_rows) * FLOAT
            places = weights.places_GNK[group, panel].ctypes.data + start * INDEX
            ends = weights.ends_GNCQ[group, panel, chunk].ctypes.data
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
def turn_rows(d: np.ndarray, turned: np.ndarray, totals: np.ndarray) -> None:
    """Lays the reciprocals of a block out rows side by side, and fills totals[rank, s, r] with their sums."""
    totals[:] = 0.0
    for rank in range(len(turned)):
        for s in range(2):
            line = d[2 * RANK * rank + s].ctypes.data
            turn(line, 2 * LINE, turned[rank, 0, s].ctypes.data, totals[rank, s].ctypes.data)


@compiled
def turn_lines(scratch: Scratch) -> None:
    """Lays the reciprocals of a block out rows side by side, scales their lines, notes the patches' reach.

    A line is divided by its mean. One that is 0 in the whole block can raise nothing: its floor keeps it out of bars.
    """
    turned, scales, floors = scratch.turned, scratch.scales, scratch.floors
    n_ranks = len(turned)
    turn_rows(scratch.d_LP, turned, scales)
    flat_scales, flat_floors = scales.reshape(-1), floors.reshape(-1)
    for i in range(len(flat_scales)):
        total = flat_scales[i]
        flat_floors[i] = np.float32(0.0 if total > 0.0 else LARGEST_BAR)
        flat_scales[i] = min(np.float32(BLOCK) / total, np.float32(LARGEST_SCALE)) if total > 0.0 else np.float32(0.0)
    rank, band = 0, 0
    while rank < n_ranks:
        n = band_ranks(rank, n_ranks)
        reaches(turned[rank].ctypes.data, scales[rank].ctypes.data, n, scratch.reach[band].ctypes.data)
        rank, band = rank + n, band + 1


@compiled
def raise_best(scratch: Scratch, signs: np.ndarray, best: np.ndarray, skip: bool) -> int:
    """Raises best[k, r] to the largest product of the block; gives the number of (row, column, patch) triples computed.

    Skipping is exact: line k, patch p is left out of a band where
    a_kp * max_r (u_rp * scale_r) <= min_r (best_kr * scale_r) less the rounding of these products (BAR_SLACK); then
    a_kp * u_rp <= best_kr for every row r of the band. (Inputs are finite; bars that are not normal are not trusted.)
    """
    fan_in, n_ranks = signs.shape
    a, turned, scales, floors = scratch.a_KP.ctypes.data, scratch.turned, scratch.scales, scratch.floors
    n_computed = 0
    bars, masks = np.empty(fan_in, np.float32), np.full(fan_in, np.int64(-1))
    rank, band = 0, 0
    while rank < n_ranks:
        n = band_ranks(rank, n_ranks)
        rows, reach_at = turned.ctypes.data + rank * RANK_BYTES, scratch.reach[band].ctypes.data
        scale, floor = scales.ctypes.data + rank * PATCH_BYTES, floors.ctypes.data + rank * PATCH_BYTES
        best_at, best_step = best.ctypes.data + rank * RANK_VECTOR, n_ranks * RANK_VECTOR
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
def copy_lines(source: np.ndarray, start: int, last: int, block: np.ndarray, first_line: int, step: int) -> None:
    """Copies patches start.. of every line of `source` into every `step`-th line of the block, zeros after."""
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
    best_GKR: np.ndarray,
    skip: bool,
) -> None:
    """Takes a stretch of patches into the maxima of their products."""
    first, last = stretch
    for g in range(len(patches_GKP)):
        for start in range(first, last, BLOCK):
            copy_lines(patches_GKP[g], start, last, scratch.a_KP, 0, 1)
            for s in range(2):
                copy_lines(inverse_SGRP[s, g], start, last, scratch.d_LP, s, 2)
            turn_lines(scratch)
            raise_best(scratch, signs_GKR[g], best_GKR[g], skip)


@compiled
def sums(
    patches_GKP: np.ndarray,
    weights: PackedWeights,
    stretch: tuple[int, int],
    a: np.ndarray,
    d: np.ndarray,
    sums_SGRP: np.ndarray,
) -> None:
    """Fills a stretch of the denominators."""
    first, last = stretch
    for start in range(first, last, BLOCK):
        n_patches = min(BLOCK, last - start)
        for g in range(len(patches_GKP)):
            copy_lines(patches_GKP[g], start, last, a, 0, 1)
            denominators(a.ctypes.data, weights, g, d)
            for line in range(len(d)):
                sums_SGRP[line & 1, g, line >> 1, start : start + n_patches] = d[line, :n_patches]
