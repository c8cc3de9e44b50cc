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
from sipp.scoring.kernels.cpu.block_loops import fill, read_scratch, read_weights, turn_rows
from sipp.scoring.kernels.cpu.host import Native
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    DOUBLE,
    FLOAT,
    LINE,
    MEAN_COLUMNS,
    NOTHING,
    PATCH_BYTES,
    RANK,
    RANK_BYTES,
    RANK_VECTOR,
    SIGN_BYTES,
    WHOLE,
    Calls,
    Layer,
    Scratch,
)
from sipp.scoring.kernels.cpu.llvm import (
    calling,
    double_at,
    float_at,
    long_at,
    product_and_sum,
    put_double,
    put_float,
    put_long,
    reading,
)
from sipp.scoring.kernels.cpu.mean_code import mean_column, mean_columns, sum_column, sum_columns

ONLY_SIGN, FIRST_SIGN, SECOND_SIGN, NO_TURN = 0, 1, 2, 3  # of a block's activations

_read_calls, _read_layer = reading(Calls), reading(Layer)
_call_2, _call_4, _call_6, _call_8, _call_11 = (calling(n) for n in (2, 4, 6, 8, 11))


@Native
def gather_beside(
    source: int, offsets: int, n_patches: int, fan: int, n_fan: int, factors: int, block: int, sums: int
) -> None:
    """Fills block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]) and its sums[p], in runs of patches.

    Those of a run lie side by side in memory. Where pieces overlap, the same values are written again.
    """
    first = 0
    while first < n_patches:
        last = _end_of_run(offsets, first, n_patches, 1)
        n, done = last - first, 0
        start, at = source + long_at(offsets, first) * FLOAT, first * FLOAT
        while n - done >= 16:
            i = done * FLOAT
            gather_16(start + i, fan, n_fan, factors + at + i, block + at + i, sums + at + i)
            done += 16
        while n >= 8 and done < n:
            i = min(done, n - 8) * FLOAT
            gather_8(start + i, fan, n_fan, factors + at + i, block + at + i, sums + at + i)
            done += 8
        while n >= 4 and done < n:
            i = min(done, n - 4) * FLOAT
            gather_4(start + i, fan, n_fan, factors + at + i, block + at + i, sums + at + i)
            done += 4
        _gather_rest(source, offsets, first + done, last, fan, n_fan, factors, block, sums)
        first = last


@Native
def gather_even(
    source: int, offsets: int, n_patches: int, fan: int, n_fan: int, factors: int, block: int, sums: int
) -> None:
    """The same in runs of every second value."""
    first = 0
    while first < n_patches:
        last = _end_of_run(offsets, first, n_patches, 2)
        n, done = last - first, 0
        start, at = source + long_at(offsets, first) * FLOAT, first * FLOAT
        while n - done >= 16:
            i = done * FLOAT
            gather_16_even(start + 2 * i, fan, n_fan, factors + at + i, block + at + i, sums + at + i)
            done += 16
        while n >= 8 and done < n:
            i = min(done, n - 8) * FLOAT
            gather_8_even(start + 2 * i, fan, n_fan, factors + at + i, block + at + i, sums + at + i)
            done += 8
        while n >= 4 and done < n:
            i = min(done, n - 4) * FLOAT
            gather_4_even(start + 2 * i, fan, n_fan, factors + at + i, block + at + i, sums + at + i)
            done += 4
        _gather_rest(source, offsets, first + done, last, fan, n_fan, factors, block, sums)
        first = last


@Native
def gather_apart(
    source: int, offsets: int, n_patches: int, fan: int, n_fan: int, factors: int, block: int, sums: int
) -> None:
    """The same of patches that lie anywhere; RANK at a time where the columns of each lie side by side."""
    done = 0
    if long_at(fan, n_fan - 1) - long_at(fan, 0) == n_fan - 1:
        while n_patches - done >= RANK:
            at, first = done * FLOAT, source + long_at(fan, 0) * FLOAT
            gather_lines(first, offsets + done * WHOLE, n_fan, factors + at, block + at, sums + at)
            done += RANK
    _gather_rest(source, offsets, done, n_patches, fan, n_fan, factors, block, sums)


def _end_of_run(offsets: int, first: int, n_patches: int, step: int) -> int:
    """Where the patches end that follow `first` in memory at this step."""
    last = first + 1
    while last < n_patches and long_at(offsets, last) - long_at(offsets, last - 1) == step:
        last += 1
    return last


def _gather_rest(
    source: int, offsets: int, first: int, last: int, fan: int, n_fan: int, factors: int, block: int, sums: int
) -> None:
    """Patch by patch."""
    for p in range(first, last):
        start, at = source + long_at(offsets, p) * FLOAT, p * FLOAT
        gather_1(start, fan, n_fan, factors + at, block + at, sums + at)


def _normalise(block: int, fan_in: int, sums: int, factors: int) -> None:
    """Divides every patch of the block by its sum (0 stays 0)."""
    for p in range(BLOCK):
        total = float_at(sums, p)
        put_float(factors, p, np.float32(1.0) / total if total > 0.0 else np.float32(0.0))
    for k in range(fan_in):
        scale_line(block + k * LINE, factors)


def _add_squares(row_factors: int, n_rows: int, turn: int, scratch: Scratch) -> None:
    """Fills `squares_XP` with a block's squared denominators, and squared outputs once they are complete.

    `turn`: ONLY_SIGN of the activations, FIRST_SIGN of two (their outputs wait), or SECOND_SIGN.
    """
    d, sums, waiting, squares = scratch.d_LP, scratch.sums_P, scratch.outputs_RP, scratch.squares_XP
    outputs = squares + 3 * BLOCK * DOUBLE
    for i in range(3 * BLOCK):
        put_double(squares, i, 0.0)
    for r in range(n_rows):
        positives, negatives, row_factor = d + 2 * r * LINE, d + (2 * r + 1) * LINE, double_at(row_factors, r)
        for p in range(BLOCK):  # loops without a branch, which a compiler turns into vectors
            scale = row_factor * float_at(sums, p)
            positive, negative = float_at(positives, p) * scale, float_at(negatives, p) * scale
            put_double(squares, p, product_and_sum(positive, positive, double_at(squares, p)))
            put_double(squares, BLOCK + p, product_and_sum(negative, negative, double_at(squares, BLOCK + p)))
            put_double(outputs, p, positive - negative)
        wait = waiting + r * BLOCK * DOUBLE
        if turn == FIRST_SIGN:
            for p in range(BLOCK):
                put_double(wait, p, double_at(outputs, p))
            continue
        if turn == SECOND_SIGN:
            for p in range(BLOCK):
                put_double(outputs, p, double_at(outputs, p) - double_at(wait, p))
        for p in range(BLOCK):
            output = double_at(outputs, p)
            put_double(squares, 2 * BLOCK + p, product_and_sum(output, output, double_at(squares, 2 * BLOCK + p)))


def _prepare(calls: Calls, layer: Layer, fan_in: int, start: int, stop: int, g: int, t: int, scratch: Scratch) -> None:
    """Lays the patches start..stop of group g and sign t out in `a_KP`, scaled to sum 1 each; zeros after them."""
    a, sums, offsets, factors = scratch.a_KP, scratch.sums_P, scratch.offsets_P, scratch.factors_P
    n_patches, n_positions = min(BLOCK, stop - start), layer.n_positions
    point = start // n_positions
    position = start - point * n_positions
    for p in range(n_patches):
        place = g * layer.group_stride + point * layer.point_stride + long_at(layer.positions, position)
        put_long(offsets, p, place)
        put_float(factors, p, float_at(layer.factors_TB, t * layer.n_points + point))
        position += 1
        if position == n_positions:
            point, position = point + 1, 0
    if n_patches < BLOCK:
        for k in range(fan_in):
            fill(a + k * LINE + n_patches * FLOAT, BLOCK - n_patches, 0.0)
        fill(sums + n_patches * FLOAT, BLOCK - n_patches, 0.0)
    _call_8(calls.gather, layer.source, offsets, n_patches, layer.fan, fan_in, factors, a, sums)
    _normalise(a, fan_in, sums, factors)


@Native
def reciprocals(
    calls_at: int,
    layer_at: int,
    weights_at: int,
    scratch_at: int,
    squares_QP: int,
    n_patches: int,
    start: int,
    stop: int,
    g: int,
    t: int,
    turn: int,
) -> None:
    """Lays one block of patches of group g and sign t out in `a_KP`, 1/D in `d_LP`, and adds their squares."""
    calls, layer = _read_calls(calls_at), _read_layer(layer_at)
    weights, scratch = read_weights(weights_at), read_scratch(scratch_at)
    n_rows, squares = weights.n_rows, scratch.squares_XP
    _prepare(calls, layer, weights.fan_in, start, stop, g, t, scratch)
    _call_4(calls.denominators, scratch.a_KP, weights_at, g, scratch.d_LP)
    _add_squares(layer.row_factors_GR + g * n_rows * DOUBLE, n_rows, turn, scratch)
    for x in range(3):  # the two quadrants of the sign t, and the whole output
        to, found = (2 * t + x if x < 2 else 4) * n_patches + start, squares + x * BLOCK * DOUBLE
        for p in range(stop - start):
            put_double(squares_QP, to + p, double_at(squares_QP, to + p) + double_at(found, p))
    for line in range(2 * n_rows):
        invert_line(scratch.d_LP + line * LINE)


def _turn_of(layer: Layer, t: int) -> int:
    """Which turn sign t of the activations has in a block; NO_TURN where there are none of it."""
    if not (layer.has_negative if t else layer.has_positive):
        return NO_TURN
    return FIRST_SIGN + t if layer.has_positive and layer.has_negative else ONLY_SIGN


@Native
def scan(
    calls_at: int,
    layer_at: int,
    weights_at: int,
    scratch_at: int,
    squares_QP: int,
    n_patches: int,
    first: int,
    last: int,
    best_GKX: int,
    best_step: int,
) -> None:
    """Takes a stretch of patches into the maxima of each group, `best_step` bytes apart, and the squares."""
    calls, layer = _read_calls(calls_at), _read_layer(layer_at)
    weights, scratch = read_weights(weights_at), read_scratch(scratch_at)
    fan_in, n_ranks = weights.fan_in, layer.n_ranks
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        for g in range(weights.n_groups):
            signs, best = layer.signs_GKR + g * fan_in * n_ranks * SIGN_BYTES, best_GKX + g * best_step
            for t in range(2):
                turn = _turn_of(layer, t)
                if turn == NO_TURN:
                    continue
                block = start, stop, g, t, turn
                _call_11(calls.reciprocals, calls_at, layer_at, weights_at, scratch_at, squares_QP, n_patches, *block)
                if calls.turn_lines == NOTHING:
                    _call_6(calls.raise_lines, scratch.a_KP, scratch.d_LP, weights.n_rows, fan_in, signs, best)
                else:
                    _call_2(calls.turn_lines, scratch_at, n_ranks)
                    _call_6(calls.raise_lines, scratch_at, signs, fan_in, n_ranks, best, 1)


@Native
def scan_means(
    calls_at: int,
    layer_at: int,
    weights_at: int,
    scratch_at: int,
    squares_QP: int,
    n_patches: int,
    starts: int,
    n_blocks: int,
    shares_B: int,
    totals_TGKR: int,
    best_GKR: int,
) -> None:
    """Takes the blocks from starts[i] to starts[i + 1] into the largest means of a point, and the squares.

    shares_B[b] is what a patch of point b counts. A block holds whole points, or a part of one: then its sums wait in
    `totals`, which are 0 before and after.
    """
    calls, layer = _read_calls(calls_at), _read_layer(layer_at)
    weights, scratch = read_weights(weights_at), read_scratch(scratch_at)
    n_each, n_groups, n_ranks = layer.n_positions, weights.n_groups, layer.n_ranks
    is_whole, n_sums = n_each <= BLOCK, weights.fan_in * n_ranks * RANK
    for i in range(n_blocks):
        start, stop = long_at(starts, i), long_at(starts, i + 1)
        n_here, shares = stop - start, shares_B + start // n_each * FLOAT
        for g in range(n_groups):
            signs, best = layer.signs_GKR + g * weights.fan_in * n_ranks * SIGN_BYTES, best_GKR + g * n_sums * FLOAT
            for t in range(2):
                turn = _turn_of(layer, t)
                if turn == NO_TURN:
                    continue
                block = start, stop, g, t, turn
                _call_11(calls.reciprocals, calls_at, layer_at, weights_at, scratch_at, squares_QP, n_patches, *block)
                turn_rows(scratch, n_ranks)
                totals = totals_TGKR + (t * n_groups + g) * n_sums * FLOAT
                out, n_summed = (best, n_each) if is_whole else (totals, n_here)
                _call_8(calls.add_means, scratch_at, n_here, n_summed, signs, weights.fan_in, n_ranks, shares, out)
                if not is_whole and stop % n_each == 0:
                    _settle(totals, n_sums, float_at(shares, 0), best)


@Native
def add_means(
    scratch_at: int, n_patches: int, n_each: int, signs: int, fan_in: int, n_ranks: int, shares: int, out: int
) -> None:
    """Takes the means over the patches of whole points, n_each of n_patches at a time, into the largest, out[k, r]."""
    scratch = read_scratch(scratch_at)
    signs_step, out_step = n_ranks * SIGN_BYTES, n_ranks * RANK_VECTOR
    for rank in range(n_ranks):
        k = 0
        while k < fan_in:
            is_wide = fan_in - k >= MEAN_COLUMNS
            at, to = signs + k * signs_step + rank * SIGN_BYTES, out + k * out_step + rank * RANK_VECTOR
            for p in range(0, n_patches, n_each):  # here, so that what is raised stays in the cache
                share = float_at(shares, p // n_each)
                line, rows = scratch.a_KP + k * LINE + p * FLOAT, scratch.turned + rank * RANK_BYTES + p * PATCH_BYTES
                if is_wide:
                    mean_columns(n_each, line, rows, at, signs_step, to, out_step, share)
                else:
                    mean_column(n_each, line, rows, at, signs_step, to, out_step, share)
            k += MEAN_COLUMNS if is_wide else 1


@Native
def add_part(
    scratch_at: int, n_patches: int, n_each: int, signs: int, fan_in: int, n_ranks: int, shares: int, out: int
) -> None:
    """Adds the patches of a part of one point to its sums, out[k, r]; n_each and `shares` are not used."""
    scratch = read_scratch(scratch_at)
    signs_step, out_step = n_ranks * SIGN_BYTES, n_ranks * RANK_VECTOR
    for rank in range(n_ranks):
        k, rows = 0, scratch.turned + rank * RANK_BYTES
        while k < fan_in:
            at, to = signs + k * signs_step + rank * SIGN_BYTES, out + k * out_step + rank * RANK_VECTOR
            line = scratch.a_KP + k * LINE
            if fan_in - k >= MEAN_COLUMNS:
                sum_columns(n_patches, line, rows, at, signs_step, to, out_step, 0.0)
                k += MEAN_COLUMNS
            else:
                sum_column(n_patches, line, rows, at, signs_step, to, out_step, 0.0)
                k += 1


def _settle(totals: int, n: int, share: np.float32, best: int) -> None:
    """Takes the means of a point into the largest ones, and sets its sums to 0."""
    for i in range(n):
        put_float(best, i, max(float_at(best, i), float_at(totals, i) * share))
        put_float(totals, i, 0.0)
