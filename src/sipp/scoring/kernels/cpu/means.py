"""The means over a point's patches (T3): sums of products for a few columns at once, rows side by side.

Each weight takes the reciprocal of its own sign, chosen patch by patch: a choice leaves the units that multiply free.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipp.native import INT, REAL, VOID, CompiledLoop, calling, float_at, inlined, long_at, primitive, put_float, vector
from sipp.scoring.kernels.cpu.blocks import NO_SIGN, lay_out, which_sign
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    FEW_COLUMNS,
    LINE,
    MEAN_COLUMNS,
    PATCH_BYTES,
    ROW_TILE,
    SIGN_BYTES,
    TILE_BYTES,
    TILE_VECTOR,
    read_calls,
    read_layer,
    read_scratch,
    read_weights,
)
from sipp.scoring.kernels.cpu.maxima import sign_flags, transpose_rows


def _mean(n_columns: int, is_whole: bool) -> Any:
    """A function: takes the sums over n patches p of line[k, p] * rows[p, s] into out[k], s the sign of the weight.

    Of a whole point: out[k] = max(out[k], sum * share). Of a part: out[k] += sum, and `share` is not used.
    """
    kind = vector.of(ROW_TILE)

    @primitive(VOID, *[INT] * 7, REAL)
    def mean(
        b: Any, n: Any, line: Any, rows: Any, signs: Any, signs_step: Any, out: Any, out_step: Any, share: Any
    ) -> None:
        sums = vector.variables(b, [vector.constant(0.0, ROW_TILE)] * n_columns)
        flags = [sign_flags(b, b.add(signs, b.mul(signs_step, vector.I64(k)))) for k in range(n_columns)]
        with vector.each(b, 0, n) as p:
            row, value_at = vector.address_of(b, rows, p, PATCH_BYTES), vector.address_of(b, line, p)
            positive, negative = (vector.load(b, row, kind, s * TILE_VECTOR) for s in range(2))
            for k, cell in enumerate(sums):
                value = vector.splat(b, vector.load(b, value_at, offset=k * LINE), ROW_TILE)
                b.store(vector.fused(b, value, b.select(flags[k], positive, negative), b.load(cell)), cell)
        for k, cell in enumerate(sums):
            total, to = b.load(cell), b.add(out, b.mul(out_step, vector.I64(k)))
            if is_whole:
                vector.store(
                    b, vector.maximum(b, b.fmul(total, vector.splat(b, share, ROW_TILE)), vector.load(b, to, kind)), to
                )
            else:
                vector.store(b, b.fadd(total, vector.load(b, to, kind)), to)

    return mean


mean_many, mean_few, mean_one = (_mean(n, True) for n in (MEAN_COLUMNS, FEW_COLUMNS, 1))
sum_many, sum_few, sum_one = (_mean(n, False) for n in (MEAN_COLUMNS, FEW_COLUMNS, 1))


@inlined
def _n_at_once(n_left: int) -> int:
    """How many of the columns that are left are summed side by side: one alone waits for its own last sum."""
    if n_left >= MEAN_COLUMNS:
        return MEAN_COLUMNS
    return FEW_COLUMNS if n_left >= FEW_COLUMNS else 1


@CompiledLoop
def add_means(
    scratch_at: int, n_patches: int, n_each: int, signs: int, fan_in: int, n_tiles: int, shares: int, out: int
) -> None:
    """Takes the means over the patches of whole points, n_each of n_patches at a time, into the largest, out[k, r]."""
    scratch = read_scratch(scratch_at)
    signs_step, out_step = n_tiles * SIGN_BYTES, n_tiles * TILE_VECTOR
    for tile in range(n_tiles):
        k = 0
        while k < fan_in:
            n = _n_at_once(fan_in - k)
            sign, to = signs + k * signs_step + tile * SIGN_BYTES, out + k * out_step + tile * TILE_VECTOR
            for p in range(0, n_patches, n_each):  # here, so that what is raised stays in the cache
                share = float_at(shares, p // n_each)
                line = scratch.a_KP + k * LINE + p * vector.FLOAT_BYTES
                rows = scratch.transposed + tile * TILE_BYTES + p * PATCH_BYTES
                if n == MEAN_COLUMNS:
                    mean_many(n_each, line, rows, sign, signs_step, to, out_step, share)
                elif n == FEW_COLUMNS:
                    mean_few(n_each, line, rows, sign, signs_step, to, out_step, share)
                else:
                    mean_one(n_each, line, rows, sign, signs_step, to, out_step, share)
            k += n


@CompiledLoop
def add_part(
    scratch_at: int, n_patches: int, n_each: int, signs: int, fan_in: int, n_tiles: int, shares: int, out: int
) -> None:
    """Adds the patches of a part of one point to its sums, out[k, r]; n_each and `shares` are not used."""
    scratch = read_scratch(scratch_at)
    signs_step, out_step = n_tiles * SIGN_BYTES, n_tiles * TILE_VECTOR
    for tile in range(n_tiles):
        k, rows = 0, scratch.transposed + tile * TILE_BYTES
        while k < fan_in:
            n, line = _n_at_once(fan_in - k), scratch.a_KP + k * LINE
            sign, to = signs + k * signs_step + tile * SIGN_BYTES, out + k * out_step + tile * TILE_VECTOR
            if n == MEAN_COLUMNS:
                sum_many(n_patches, line, rows, sign, signs_step, to, out_step, 0.0)
            elif n == FEW_COLUMNS:
                sum_few(n_patches, line, rows, sign, signs_step, to, out_step, 0.0)
            else:
                sum_one(n_patches, line, rows, sign, signs_step, to, out_step, 0.0)
            k += n


@inlined
def _settle(totals: int, n: int, share: np.float32, best: int) -> None:
    """Takes the means of a point into the largest ones, and sets its sums to 0."""
    for i in range(n):
        put_float(best, i, max(float_at(best, i), float_at(totals, i) * share))
        put_float(totals, i, 0.0)


_call_lay_out, _call_add_means = calling(lay_out), calling(add_means, add_part)


@CompiledLoop
def scan_means(
    calls_at: int,
    layer_at: int,
    weights_at: int,
    scratch_at: int,
    squares_QX: int,
    n_squares: int,
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
    calls, layer = read_calls(calls_at), read_layer(layer_at)
    weights, scratch = read_weights(weights_at), read_scratch(scratch_at)
    n_each, n_groups, n_tiles = layer.n_positions, weights.n_groups, layer.n_tiles
    is_whole, n_sums = n_each <= BLOCK, weights.fan_in * n_tiles * ROW_TILE
    for i in range(n_blocks):
        start, stop = long_at(starts, i), long_at(starts, i + 1)
        n_here, shares = stop - start, shares_B + start // n_each * vector.FLOAT_BYTES
        for g in range(n_groups):
            signs, best = (
                layer.signs_GKR + g * weights.fan_in * n_tiles * SIGN_BYTES,
                best_GKR + g * n_sums * vector.FLOAT_BYTES,
            )
            for t in range(2):
                which = which_sign(layer, t)
                if which == NO_SIGN:
                    continue
                block = start, stop, g, t, which
                of_all = calls_at, layer_at, weights_at, scratch_at, squares_QX, n_squares
                _call_lay_out(calls.lay_out, *of_all, *block)
                transpose_rows(scratch, weights.n_rows, n_tiles)
                totals = totals_TGKR + (t * n_groups + g) * n_sums * vector.FLOAT_BYTES
                out, n_summed = (best, n_each) if is_whole else (totals, n_here)
                sizes = n_here, n_summed, signs, weights.fan_in, n_tiles
                _call_add_means(calls.add_means, scratch_at, *sizes, shares, out)
                if not is_whole and stop % n_each == 0:
                    _settle(totals, n_sums, float_at(shares, 0), best)
