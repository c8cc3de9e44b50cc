"""The compiled loops of the CPU kernel: a stretch of patches, block by block, into the ratios of one layer (README.md).

A ratio does not change when its patch is scaled (T2), so each patch is divided by its sum: float32 does not overflow.
Loops take whole numbers, sizes and addresses; records of them are read with `compiling.reading`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sipp.native import compiling
from sipp.scoring.kernels import vector_code as code
from sipp.scoring.kernels.protocol import LARGEST_BAR, LARGEST_SCALE, LEAST_BAR
from sipp.scoring.kernels.vector_code import (
    BLOCK,
    DOUBLE_BYTES,
    FEW_COLUMNS,
    FLOAT_BYTES,
    INDEX_BYTES,
    LINE,
    LONG_BYTES,
    MEAN_COLUMNS,
    MOST_TILES,
    N_PATTERNS,
    PANEL,
    PATCH_BYTES,
    ROW_TILE,
    SIGN_BYTES,
    STRIP,
    TILE_BYTES,
    TILE_VECTOR,
    VECTOR,
)

SUM_BLOCK = 512  # terms summed before they join the total: bounds the rounding error of long sums (fixed: same bits)
NEAR_PEAK = 0.875  # patches this near a column's peak set its first bar
SKIPPING, EVERY_PRODUCT, MEANS = range(3)  # what is done with a block of patches: `way`
_SIGN_BIT, _INFINITY_BITS = 1 << 31, 0x7F800000  # of float32

inlined, CompiledLoop = compiling.inlined, compiling.CompiledLoop
float_at, double_at, long_at = compiling.float_at, compiling.double_at, compiling.long_at
put_float, put_double, put_long = compiling.put_float, compiling.put_double, compiling.put_long
int_at, put_int = compiling.int_at, compiling.put_int

# --- Records ----------------------------------------------------------------------------------------------------------

Address = int  # of what Python holds while the loops run


class Weights(NamedTuple):
    """The weights of some rows, laid out once.

    Panel n has the rows from panels[n] to panels[n + 1]. In every SUM_BLOCK c of columns, those of a panel are sorted
    by the signs of its weights: bit i of a pattern q is set where the weight of its row i is negative.
    """

    n_groups: int
    n_rows: int
    fan_in: int
    n_tiles: int
    n_panels: int
    panels: Address
    magnitudes_GX: Address  # |w| in that order, the rows of a panel side by side
    places_GNK: Address  # which column stands there
    ends_GNCQ: Address  # where the columns of pattern q end; after all ends come columns without a weight
    signs_GKR: Address  # ROW_TILE bits for every column and tile of rows, set where the weight is positive
    row_factors_GR: Address  # take the scale of the weights out of norms


class Job(NamedTuple):
    """One call: windows, and what is asked of them.

    Patch p is position p % n of point p / n, n = n_positions. Value k of its group g lies in `source` at
    point * point_stride + g * group_stride + positions[p % n] + fan[k].
    """

    n_points: int
    n_positions: int
    point_stride: int
    group_stride: int
    positions: Address
    fan: Address
    step: int  # how far most patches lie from the one before; 0: neither one nor two
    source: Address  # where the windows begin
    factors_TB: Address  # scales the activations of point b that have sign t; 0 where there are none
    has_positive: int  # whether any activation is
    has_negative: int
    way: int
    shares_B: Address  # of MEANS: what a patch of point b counts
    n_summed: int  # patches whose squares are one sum: BLOCK where blocks are of one point each, else 1
    n_squares: int
    squares_QX: Address  # of the four quadrants 2 t + s, and then of the outputs


class Scratch(NamedTuple):
    """Addresses of what one thread works in: a block of patches, its denominators, their reciprocals."""

    a_KP: int  # the patches
    d_LP: int  # line 2 r + s: denominators of row r and sign s
    outputs_RP: int  # of the first sign of the activations, until the second is there; float64
    sums_P: int  # of each patch before it was divided by it
    squares_XP: int  # of both signs of weights, and of the outputs; float64
    offsets_P: int  # where each patch lies in the windows
    factors_P: int  # what each patch is multiplied by
    transposed: int  # [r / ROW_TILE, p, s, r % ROW_TILE] their reciprocals with rows side by side
    scales: int  # [r / ROW_TILE, s, r % ROW_TILE] 1 / mean of each line of them
    floors: int  # the same shape: keeps lines of zeros out of bars
    reach: int  # [band, p]
    bars_K: int
    masks_K: int  # bit p: patch p is above the bar of the column


_read_weights, _read_job, _read_scratch = map(compiling.reading, (Weights, Job, Scratch))

# --- Gathering patches ------------------------------------------------------------------------------------------------


@inlined
def _fill(target: int, n: int, value: float) -> None:
    """Sets n floats to this value."""
    for i in range(n):
        put_float(target, i, value)


@inlined
def _end_of_run(offsets: int, first: int, n_patches: int, step: int) -> int:
    """Where the patches end that follow `first` in memory at this step."""
    last = first + 1
    while last < n_patches and long_at(offsets, last) - long_at(offsets, last - 1) == step:
        last += 1
    return last


@inlined
def _gather_piece(n: int, step: int, source: int, fan: int, n_fan: int, factors: int, block: int, sums: int) -> None:
    if step == 2:
        if n == 16:
            code.gather_16_even(source, fan, n_fan, factors, block, sums)
        elif n == 8:
            code.gather_8_even(source, fan, n_fan, factors, block, sums)
        else:
            code.gather_4_even(source, fan, n_fan, factors, block, sums)
    elif n == 16:
        code.gather_16(source, fan, n_fan, factors, block, sums)
    elif n == 8:
        code.gather_8(source, fan, n_fan, factors, block, sums)
    else:
        code.gather_4(source, fan, n_fan, factors, block, sums)


@inlined
def _gather(job: Job, offsets: int, n_patches: int, n_fan: int, factors: int, block: int, sums: int) -> None:
    """Fills block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]) and its sums[p].

    Patches go together where they lie one or two apart in memory (pieces may overlap: the same values are written
    again), and ROW_TILE of those that lie anywhere if the columns of each lie side by side.
    """
    source, fan = job.source, job.fan
    are_lines = job.step == 0 and _end_of_run(fan, 0, n_fan, 1) == n_fan
    first = 0
    while first < n_patches:
        to, done, last = first * FLOAT_BYTES, 0, first + 1
        if job.step != 0:
            last = _end_of_run(offsets, first, n_patches, job.step)
            n, start = last - first, source + long_at(offsets, first) * FLOAT_BYTES
            for width in (16, 8, 4):
                least = width if width == 16 else 1  # of what is left: narrower pieces may overlap the one before
                while n >= width and n - done >= least:
                    i = min(done, n - width) * FLOAT_BYTES
                    piece = block + to + i
                    at = start + job.step * i
                    _gather_piece(width, job.step, at, fan, n_fan, factors + to + i, piece, sums + to + i)
                    done += width
        elif are_lines and n_patches - first >= ROW_TILE:
            start = source + long_at(fan, 0) * FLOAT_BYTES
            code.gather_lines(start, offsets + first * LONG_BYTES, n_fan, factors + to, block + to, sums + to)
            last, done = first + ROW_TILE, ROW_TILE
        for p in range(first + done, last):
            start, to = source + long_at(offsets, p) * FLOAT_BYTES, p * FLOAT_BYTES
            code.gather_1(start, fan, n_fan, factors + to, block + to, sums + to)
        first = last


@inlined
def _lay_out(job: Job, fan_in: int, start: int, stop: int, g: int, t: int, scratch: Scratch) -> None:
    """Lays the patches start..stop of group g and sign t out in `a_KP`, scaled to sum 1 each; zeros after them."""
    a, sums, offsets, factors = scratch.a_KP, scratch.sums_P, scratch.offsets_P, scratch.factors_P
    n_patches, n_positions = stop - start, job.n_positions
    point = start // n_positions
    position = start - point * n_positions
    for p in range(n_patches):
        place = g * job.group_stride + point * job.point_stride + long_at(job.positions, position)
        put_long(offsets, p, place)
        put_float(factors, p, float_at(job.factors_TB, t * job.n_points + point))
        position += 1
        if position == n_positions:
            point, position = point + 1, 0
    if n_patches < BLOCK:
        for k in range(fan_in):
            _fill(a + k * LINE + n_patches * FLOAT_BYTES, BLOCK - n_patches, 0.0)
        _fill(sums + n_patches * FLOAT_BYTES, BLOCK - n_patches, 0.0)
    _gather(job, offsets, n_patches, fan_in, factors, a, sums)
    for p in range(BLOCK):
        total = float_at(sums, p)
        put_float(factors, p, np.float32(1.0) / total if total > 0.0 else np.float32(0.0))
    for k in range(fan_in):
        code.scale_line(a + k * LINE, factors)


# --- Denominators and norms -------------------------------------------------------------------------------------------


@inlined
def _denominators(weights: Weights, a: int, group: int, d: int) -> None:
    """Fills d[2 r + s, p], the sum over k of w_rk^s a_kp, for one block of patches: an ordinary product (T2)."""
    fan_in = weights.fan_in
    all_magnitudes = weights.magnitudes_GX + group * weights.n_rows * fan_in * FLOAT_BYTES
    n_chunks = -(-fan_in // SUM_BLOCK)
    for chunk in range(n_chunks):
        start = chunk * SUM_BLOCK
        for panel in range(weights.n_panels):
            first = long_at(weights.panels, panel)
            n_rows, panel_of_all = long_at(weights.panels, panel + 1) - first, group * weights.n_panels + panel
            magnitudes = all_magnitudes + (first * fan_in + start * n_rows) * FLOAT_BYTES
            places = weights.places_GNK + (panel_of_all * fan_in + start) * INDEX_BYTES
            ends = weights.ends_GNCQ + (panel_of_all * n_chunks + chunk) * N_PATTERNS * INDEX_BYTES
            for strip in range(0, BLOCK, STRIP):
                source, target = a + strip * FLOAT_BYTES, d + 2 * first * LINE + strip * FLOAT_BYTES
                if n_rows == 3:
                    code.panel_3(chunk, source, magnitudes, places, ends, target)
                elif n_rows == 2:
                    code.panel_2(chunk, source, magnitudes, places, ends, target)
                else:
                    code.panel_1(chunk, source, magnitudes, places, ends, target)


@inlined
def _add_squares(job: Job, weights: Weights, start: int, n: int, g: int, t: int, scratch: Scratch) -> None:
    """Adds the squares of the denominators to those of the points: of both quadrants of sign t, of the outputs."""
    d, sums, waiting, found = scratch.d_LP, scratch.sums_P, scratch.outputs_RP, scratch.squares_XP
    n_rows = weights.n_rows
    row_factors = weights.row_factors_GR + g * n_rows * DOUBLE_BYTES
    n_kinds = 3
    if job.has_positive == 0 or job.has_negative == 0:
        code.squares_only(d, sums, row_factors, n_rows, waiting, found)
    elif t == 0:
        code.squares_first(d, sums, row_factors, n_rows, waiting, found)
        n_kinds = 2  # the outputs wait for the other sign
    else:
        code.squares_second(d, sums, row_factors, n_rows, waiting, found)
    for x in range(n_kinds):
        to = ((2 * t + x if x < 2 else 4) * job.n_squares + start // job.n_summed) * DOUBLE_BYTES + job.squares_QX
        values = found + x * BLOCK * DOUBLE_BYTES
        if job.n_summed == 1:
            for p in range(n):
                put_double(to, p, double_at(to, p) + double_at(values, p))
        else:
            total = 0.0
            for p in range(n):
                total += double_at(values, p)
            put_double(to, 0, double_at(to, 0) + total)


# --- The maxima over patches (T2) -------------------------------------------------------------------------------------


@inlined
def _raise_by_all(scratch: Scratch, signs: int, n_rows: int, fan_in: int, best: int) -> None:
    """Raises best[k, r * LANES + lane] to the largest product of the lane: all are computed.

    Where rows and columns are few, finding out what can be left out costs more than it spares. Each weight has LANES
    maxima, one for each lane of a vector, joined when all patches are through. They have to fit the first cache.
    """
    n_tiles = -(-n_rows // ROW_TILE)
    for line in range(2 * n_rows):
        code.invert_line(scratch.d_LP + line * LINE)
    for k in range(fan_in):
        line, column, column_signs = (
            scratch.a_KP + k * LINE,
            best + k * n_rows * VECTOR,
            signs + k * n_tiles * SIGN_BYTES,
        )
        for tile in range(n_tiles):
            first = tile * ROW_TILE
            lines, bits = scratch.d_LP + first * 2 * LINE, column_signs + tile * SIGN_BYTES
            code.raise_rows(min(ROW_TILE, n_rows - first), line, lines, column + first * VECTOR, bits)


@inlined
def _band_tiles(first: int, n_tiles: int) -> int:
    """How many tiles the band has that starts at this one: 4, 2 or 1."""
    left = min(n_tiles - first, MOST_TILES)
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@inlined
def _transpose(scratch: Scratch, n_rows: int, n_tiles: int) -> None:
    """Lays the reciprocals of a block out rows side by side, and fills scales[tile, s, r] with their sums.

    Groups of one row, as depthwise convolutions have, spare the division of the padding.
    """
    _fill(scratch.scales, n_tiles * 2 * ROW_TILE, 0.0)
    for tile in range(n_tiles):
        for s in range(2):
            line, sign = scratch.d_LP + (2 * ROW_TILE * tile + s) * LINE, s * TILE_VECTOR
            to, sums = scratch.transposed + tile * TILE_BYTES + sign, scratch.scales + tile * PATCH_BYTES + sign
            if n_rows == 1:
                code.transpose_line(line, 2 * LINE, to, sums)
            else:
                code.transpose_tile(line, 2 * LINE, to, sums)


@inlined
def _find_reach(scratch: Scratch, n_tiles: int) -> None:
    """Scales the lines of reciprocals, and notes the patches' reach.

    A line is divided by its mean. One that is 0 in the whole block can raise nothing: its floor keeps it out of bars.
    """
    for i in range(n_tiles * 2 * ROW_TILE):
        total = float_at(scratch.scales, i)
        is_zero = not total > 0.0
        put_float(scratch.floors, i, np.float32(LARGEST_BAR) if is_zero else np.float32(0.0))
        scale = np.float32(0.0) if is_zero else min(np.float32(BLOCK) / total, np.float32(LARGEST_SCALE))
        put_float(scratch.scales, i, scale)
    tile, band = 0, 0
    while tile < n_tiles:
        n = _band_tiles(tile, n_tiles)
        inverses, scales = scratch.transposed + tile * TILE_BYTES, scratch.scales + tile * PATCH_BYTES
        code.reaches(inverses, scales, n, scratch.reach + band * LINE)
        tile, band = tile + n, band + 1


@inlined
def _raise_by_bars(scratch: Scratch, signs: int, n_tiles: int, fan_in: int, best: int) -> None:
    """Raises best[k, r] to the largest product of the block.

    A band is a run of tiles of ROW_TILE rows. For a column k and a band, patch p can only matter where its activation
    times its reach (the largest of the band's reciprocals at p, each divided by its own line's mean) is above the
    column's bar (the smallest of the band's maxima of that column, divided the same way). One number per patch and one
    per column replace the band's rows in that test (`protocol.py`).
    """
    a, bars, masks = scratch.a_KP, scratch.bars_K, scratch.masks_K
    best_step, signs_step = n_tiles * TILE_VECTOR, n_tiles * SIGN_BYTES
    tile, band = 0, 0
    while tile < n_tiles:
        n = _band_tiles(tile, n_tiles)
        rows, reach = scratch.transposed + tile * TILE_BYTES, scratch.reach + band * LINE
        scale, floor = scratch.scales + tile * PATCH_BYTES, scratch.floors + tile * PATCH_BYTES
        best_at, signs_at = best + tile * TILE_VECTOR, signs + tile * SIGN_BYTES
        # three loops: what the first two find is there before the third has to branch on it
        for k in range(fan_in):
            put_float(bars, k, _bar(n, best_at + k * best_step, scale, floor, signs_at + k * signs_step))
        for k in range(fan_in):
            put_long(masks, k, code.above(a + k * LINE, reach, float_at(bars, k)))
        for k in range(fan_in):
            line, column, column_signs = a + k * LINE, best_at + k * best_step, signs_at + k * signs_step
            mask = long_at(masks, k)
            if float_at(bars, k) < LEAST_BAR:  # a maximum is 0 yet: the likeliest patches first set a bar
                bar, peak = float_at(bars, k), code.highest(line, reach)
                if peak >= LEAST_BAR:
                    mask = code.above(line, reach, peak * np.float32(NEAR_PEAK))
                    _raise(n, mask, line, rows, column, column_signs)
                    bar = _bar(n, column, scale, floor, column_signs)
                mask = code.above(line, reach, bar) if bar >= LEAST_BAR else code.above_zero(line)
            if mask != 0:
                _raise(n, mask, line, rows, column, column_signs)
        tile, band = tile + n, band + 1


@inlined
def _bar(n_tiles: int, best: int, scales: int, floors: int, signs: int) -> np.float32:
    if n_tiles == 4:
        return code.bar_4(best, scales, floors, signs)
    if n_tiles == 2:
        return code.bar_2(best, scales, floors, signs)
    return code.bar_1(best, scales, floors, signs)


@inlined
def _raise(n_tiles: int, mask: int, line: int, inverses: int, best: int, signs: int) -> None:
    if n_tiles == 4:
        code.raise_4(mask, line, inverses, best, signs)
    elif n_tiles == 2:
        code.raise_2(mask, line, inverses, best, signs)
    else:
        code.raise_1(mask, line, inverses, best, signs)


# --- The means over a point's patches (T3) ----------------------------------------------------------------------------


@inlined
def _add_means(
    scratch: Scratch, n_patches: int, n_each: int, signs: int, fan_in: int, n_tiles: int, shares: int, out: int
) -> None:
    """Takes the sums over each n_each of n_patches into out[k, r]: means of whole points, or the sums of a part.

    `shares` is 0 for a part. Few columns are summed side by side: one alone waits for its own last sum.
    """
    signs_step, out_step = n_tiles * SIGN_BYTES, n_tiles * TILE_VECTOR
    for tile in range(n_tiles):
        k = 0
        while k < fan_in:
            left = fan_in - k
            n = MEAN_COLUMNS if left >= MEAN_COLUMNS else (FEW_COLUMNS if left >= FEW_COLUMNS else 1)
            sign, to = signs + k * signs_step + tile * SIGN_BYTES, out + k * out_step + tile * TILE_VECTOR
            for p in range(0, n_patches, n_each):  # here, so that what is raised stays in the cache
                share = float_at(shares, p // n_each) if shares != 0 else np.float32(0.0)
                line = scratch.a_KP + k * LINE + p * FLOAT_BYTES
                rows = scratch.transposed + tile * TILE_BYTES + p * PATCH_BYTES
                if n == MEAN_COLUMNS:
                    code.mean_many(n_each, line, rows, sign, signs_step, to, out_step, share)
                elif n == FEW_COLUMNS:
                    code.mean_few(n_each, line, rows, sign, signs_step, to, out_step, share)
                else:
                    code.mean_one(n_each, line, rows, sign, signs_step, to, out_step, share)
            k += n


@inlined
def _settle(totals: int, n: int, share: np.float32, best: int) -> None:
    """Takes the means of a point into the largest ones, and sets its sums to 0."""
    for i in range(n):
        put_float(best, i, max(float_at(best, i), float_at(totals, i) * share))
        put_float(totals, i, 0.0)


# --- A stretch of patches ---------------------------------------------------------------------------------------------


@CompiledLoop
def take_in(
    weights_at: int, job_at: int, scratch_at: int, best_GX: int, group_step: int, totals_TGX: int, first: int, last: int
) -> None:
    """Takes the patches first..last into the largest ratios (or means) of each group, and adds their squares.

    The ratios of a group lie `group_step` bytes after those of the one before. For means a block holds whole points, or
    a part of one: then its sums wait in `totals`, which are 0 before and after.
    """
    weights, job, scratch = _read_weights(weights_at), _read_job(job_at), _read_scratch(scratch_at)
    n_rows, fan_in, n_tiles, n_each = weights.n_rows, weights.fan_in, weights.n_tiles, job.n_positions
    of_parts = job.way == MEANS and n_each > BLOCK
    at_once = n_each * (BLOCK // n_each) if job.way == MEANS and not of_parts else BLOCK
    start = first
    while start < last:
        stop, point = min(start + at_once, last), start // n_each
        if of_parts:
            stop = min(stop, (point + 1) * n_each)
        shares = job.shares_B + point * FLOAT_BYTES
        for g in range(weights.n_groups):
            signs, best = weights.signs_GKR + g * fan_in * n_tiles * SIGN_BYTES, best_GX + g * group_step
            for t in range(2):
                if (job.has_negative if t == 1 else job.has_positive) == 0:
                    continue
                _lay_out(job, fan_in, start, stop, g, t, scratch)
                _denominators(weights, scratch.a_KP, g, scratch.d_LP)
                _add_squares(job, weights, start, stop - start, g, t, scratch)
                if job.way == EVERY_PRODUCT:
                    _raise_by_all(scratch, signs, n_rows, fan_in, best)
                    continue
                _transpose(scratch, n_rows, n_tiles)
                if job.way == SKIPPING:
                    _find_reach(scratch, n_tiles)
                    _raise_by_bars(scratch, signs, n_tiles, fan_in, best)
                    continue
                totals = totals_TGX + (t * weights.n_groups + g) * group_step
                out, n_summed, of_point = (totals, stop - start, 0) if of_parts else (best, n_each, shares)
                _add_means(scratch, stop - start, n_summed, signs, fan_in, n_tiles, of_point, out)
                if of_parts and stop % n_each == 0:
                    _settle(totals, fan_in * n_tiles * ROW_TILE, float_at(shares, 0), best)
        start = stop


# --- Weights and ranges -----------------------------------------------------------------------------------------------


@CompiledLoop
def pack(weight_GRK: int, weights_at: int, pattern_K: int, filled: int, first_panel: int, last_panel: int) -> None:
    """Lays a stretch of panels out as the denominators read them (`Weights`).

    It works in pattern_K, the pattern of each column, and filled[N_PATTERNS + 2]. A panel of fewer rows than three has
    one of them twice, whose sign is masked out.
    """
    packed = _read_weights(weights_at)
    fan_in = packed.fan_in
    n_chunks = -(-fan_in // SUM_BLOCK)
    for g in range(packed.n_groups):
        for panel in range(first_panel, last_panel):
            first = long_at(packed.panels, panel)
            n_rows, panel_of_all = long_at(packed.panels, panel + 1) - first, g * packed.n_panels + panel
            row_of_all, is_row = g * packed.n_rows + first, (1 << n_rows) - 1
            row_0 = weight_GRK + row_of_all * fan_in * FLOAT_BYTES
            row_1 = row_0 + min(1, n_rows - 1) * fan_in * FLOAT_BYTES
            row_2 = row_0 + (n_rows - 1) * fan_in * FLOAT_BYTES
            for chunk in range(n_chunks):
                start = chunk * SUM_BLOCK
                stop = min(start + SUM_BLOCK, fan_in)
                for q in range(N_PATTERNS + 2):
                    put_long(filled, q, 0)
                for k in range(start, stop):
                    w_0, w_1, w_2 = float_at(row_0, k), float_at(row_1, k), float_at(row_2, k)
                    q = ((w_0 < 0.0) | (w_1 < 0.0) << 1 | (w_2 < 0.0) << 2) & is_row
                    if (w_0 == 0.0) & (w_1 == 0.0) & (w_2 == 0.0):
                        q = N_PATTERNS
                    put_long(pattern_K, k, q)
                    put_long(filled, q + 1, long_at(filled, q + 1) + 1)
                for q in range(N_PATTERNS):
                    end = long_at(filled, q) + long_at(filled, q + 1)
                    put_long(filled, q + 1, end)
                    put_int(packed.ends_GNCQ, (panel_of_all * n_chunks + chunk) * N_PATTERNS + q, end)
                places = packed.places_GNK + (panel_of_all * fan_in + start) * INDEX_BYTES
                magnitudes = packed.magnitudes_GX + (row_of_all * fan_in + start * n_rows) * FLOAT_BYTES
                for k in range(start, stop):
                    q = long_at(pattern_K, k)
                    to = long_at(filled, q)
                    put_long(filled, q, to + 1)
                    put_int(places, to, k)
                    put_float(magnitudes, to * n_rows, abs(float_at(row_0, k)))
                    if n_rows == PANEL:
                        put_float(magnitudes, to * n_rows + 1, abs(float_at(row_1, k)))
                    put_float(magnitudes, to * n_rows + n_rows - 1, abs(float_at(row_2, k)))


@CompiledLoop
def find_extremes(bits_BN: int, step: int, n: int, found_XB: int, n_lines: int, first: int, last: int) -> None:
    """Fills found[:, b] with three float32 bit patterns of each line of n such patterns (int32), lines `step` apart.

    They are found as the largest int32, the largest uint32, and the smallest magnitude above 0 less one (uint32), so
    that 0 wraps around to the largest. Integers, because NaN has an order too.
    """
    for b in range(first, last):
        highest, wrapped, smallest = np.int32(-(2**31)), np.uint32(0), np.uint32(2**32 - 1)
        for i in range(n):
            value = int_at(bits_BN, b * step + i)
            bits = np.uint32(value)
            below = np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(1))
            highest = value if value > highest else highest  # Numba compiles a function for each `max`
            wrapped = bits if bits > wrapped else wrapped
            smallest = below if below < smallest else smallest
        put_int(found_XB, b, np.int32(wrapped) if wrapped > np.uint32(_SIGN_BIT) else np.int32(0))
        put_int(found_XB, n_lines + b, highest if highest > 0 else np.int32(0))
        put_int(found_XB, 2 * n_lines + b, min(np.int64(smallest) + 1, np.int64(_INFINITY_BITS)))
