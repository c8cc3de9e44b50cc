"""The maxima over patches of T2: which patches can raise a maximum of a column, and raising it by those.

A band is a run of tiles of ROW_TILE rows. For a column k and a band, patch p can only matter where its activation times
its reach (the largest of the band's reciprocals at p, each divided by its own line's mean) is above the column's bar
(the smallest of the band's maxima of that column, divided the same way). One number per patch and one per column
replace the band's rows in that test (`../skipping.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipp.native import (
    INT,
    REAL,
    VOID,
    CompiledLoop,
    calling,
    float_at,
    inlined,
    long_at,
    primitive,
    put_float,
    put_long,
    vector,
)
from sipp.scoring.kernels.cpu.blocks import NO_SIGN, lay_out, reciprocal, which_sign
from sipp.scoring.kernels.cpu.denominators import fill
from sipp.scoring.kernels.cpu.every_product import raise_by_all
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    LINE,
    MOST_TILES,
    NOTHING,
    PATCH_BYTES,
    ROW_TILE,
    SIGN_BYTES,
    TILE_BYTES,
    TILE_VECTOR,
    Scratch,
    read_calls,
    read_layer,
    read_scratch,
    read_weights,
)
from sipp.scoring.kernels.skipping import BAR_SLACK, LARGEST_BAR, LARGEST_SCALE, LEAST_BAR, LEAST_REACH

NEAR_PEAK = 0.875  # patches this near a column's peak set its first bar

_tile = vector.of(ROW_TILE)

# --- Vector code ------------------------------------------------------------------------------------------------------


def _transpose_code(n_lines: int) -> Any:
    """A function: transposed[p, 0, r] = 1 / lines[r, p] for lines `step` bytes apart, 0 after them; their sums[r] grow.

    The dividers work while lanes are exchanged.
    """

    @primitive(VOID, *[INT] * 4)
    def transpose(b: Any, lines: Any, step: Any, transposed_at: Any, sums: Any) -> None:
        padding = [vector.constant(0.0, ROW_TILE)] * (ROW_TILE - n_lines)
        with vector.each(b, 0, BLOCK, ROW_TILE) as first:
            line, target = vector.address_of(b, lines, first), vector.address_of(b, transposed_at, first, PATCH_BYTES)
            lines_here = (vector.load(b, b.add(line, b.mul(step, vector.I64(r))), _tile) for r in range(n_lines))
            vectors = vector.transposed(b, [*(reciprocal(b, values) for values in lines_here), *padding])
            for p, values in enumerate(vectors):
                vector.store(b, values, target, p * PATCH_BYTES)
            total = vector.tree(b, lambda b, x, y: b.fadd(x, y), vectors)
            vector.store(b, b.fadd(vector.load(b, sums, _tile), total), sums)

    return transpose


transpose_tile, transpose_line = _transpose_code(ROW_TILE), _transpose_code(1)


@primitive(VOID, *[INT] * 4)
def reaches(b: Any, inverses: Any, scales: Any, n_tiles: Any, reach: Any) -> None:
    """reach[p] = the largest of inverses[tile, p, s, r] * scales[tile, s, r] over the tiles, at least LEAST_REACH."""
    with vector.each(b, 0, BLOCK, ROW_TILE) as first:
        cells = vector.variables(b, [vector.constant(LEAST_REACH, ROW_TILE)] * ROW_TILE)
        with vector.each(b, 0, n_tiles) as tile:
            scale = vector.address_of(b, scales, tile, PATCH_BYTES)
            rows = vector.address_of(b, vector.address_of(b, inverses, tile, TILE_BYTES), first, PATCH_BYTES)
            for sign in (0, TILE_VECTOR):
                factor = vector.load(b, scale, _tile, sign)
                for p, cell in enumerate(cells):
                    value = b.fmul(vector.load(b, rows, _tile, p * PATCH_BYTES + sign), factor)
                    b.store(vector.maximum(b, value, b.load(cell)), cell)
        found = vector.tree(b, vector.maximum, vector.transposed(b, [b.load(cell) for cell in cells]))
        vector.store(b, found, vector.address_of(b, reach, first))


def sign_flags(b: Any, signs: Any) -> Any:
    """The ROW_TILE bits at an address as flags: where weights are positive."""
    return b.bitcast(vector.load(b, signs, vector.I16), vector.of(ROW_TILE, vector.I1))


def _signs(b: Any, signs: Any, n_tiles: int) -> list[Any]:
    return [sign_flags(b, b.add(signs, vector.I64(i * SIGN_BYTES))) for i in range(n_tiles)]


def _of_sign(b: Any, positive: Any, address: Any, offset: int) -> Any:
    """For each row the value of its weight's own sign: the first of two vectors where it is positive."""
    return b.select(
        positive, vector.load(b, address, _tile, offset), vector.load(b, address, _tile, offset + TILE_VECTOR)
    )


def _bar_code(n_tiles: int) -> Any:
    """A function: the bar of a column: the least of best[r] * scales[r], at least floors[r], over the band's rows."""

    @primitive(REAL, *[INT] * 4)
    def bar(b: Any, best: Any, scales: Any, floors: Any, signs: Any) -> Any:
        least = vector.constant(LARGEST_BAR, ROW_TILE)
        for tile, positive in enumerate(_signs(b, signs, n_tiles)):
            scale, floor = (_of_sign(b, positive, address, tile * PATCH_BYTES) for address in (scales, floors))
            least = vector.minimum(
                b, vector.maximum(b, b.fmul(vector.load(b, best, _tile, tile * TILE_VECTOR), scale), floor), least
            )
        return b.fmul(vector.across(b, vector.minimum, least), vector.constant(BAR_SLACK, 1))

    return bar


def _mask(b: Any, flags: list[Any]) -> Any:
    """The flags of BLOCK patches, ROW_TILE in a vector, as the bits of one integer."""
    return vector.tree(
        b,
        lambda b, x, y: b.or_(x, y),
        [
            b.shl(b.zext(b.bitcast(flag, vector.I16), vector.I64), vector.I64(i * ROW_TILE))
            for i, flag in enumerate(flags)
        ],
    )


@primitive(INT, INT, INT, REAL)
def above(b: Any, line: Any, reach: Any, bar: Any) -> Any:
    """Bit p: line[p] * reach[p] is above the bar."""
    limit = vector.splat(b, bar, ROW_TILE)
    pieces = range(0, LINE, TILE_VECTOR)
    products = [b.fmul(vector.load(b, line, _tile, offset), vector.load(b, reach, _tile, offset)) for offset in pieces]
    return _mask(b, [b.fcmp_ordered(">", product, limit) for product in products])


@primitive(REAL, INT, INT)
def highest(b: Any, line: Any, reach: Any) -> Any:
    """The largest of line[p] * reach[p]."""
    pieces = range(0, LINE, TILE_VECTOR)
    products = [b.fmul(vector.load(b, line, _tile, offset), vector.load(b, reach, _tile, offset)) for offset in pieces]
    return vector.across(b, vector.maximum, vector.tree(b, vector.maximum, products))


@primitive(INT, INT)
def above_zero(b: Any, line: Any) -> Any:
    """Bit p: line[p] is above 0."""
    pieces = range(0, LINE, TILE_VECTOR)
    return _mask(
        b,
        [b.fcmp_ordered(">", vector.load(b, line, _tile, offset), vector.constant(0.0, ROW_TILE)) for offset in pieces],
    )


def _raise_code(n_tiles: int, n_at_once: int) -> Any:
    """A function: best[r] = the largest of best[r] and of line[p] * inverses[r, p] over the patches p in `mask`, not 0.

    Patches go `n_at_once` together; where fewer are left, the last one counts again, which changes no maximum and
    spares a branch that nothing could predict.
    """

    @primitive(VOID, *[INT] * 5)
    def raise_column(b: Any, mask: Any, line: Any, inverses: Any, best: Any, signs: Any) -> None:
        positive = _signs(b, signs, n_tiles)
        cells = vector.variables(b, [vector.load(b, best, _tile, tile * TILE_VECTOR) for tile in range(n_tiles)])
        left = vector.variables(b, [mask])[0]
        again, done = b.append_basic_block("again"), b.append_basic_block("done")
        b.branch(again)
        b.position_at_end(again)
        rest, patches = b.load(left), list[Any]()
        for _ in range(n_at_once):
            patch = b.cttz(rest, vector.I1(0))
            patches.append(
                b.select(b.icmp_unsigned("==", rest, vector.I64(0)), patches[-1], patch) if patches else patch
            )
            rest = b.and_(rest, b.sub(rest, vector.I64(1)))
        b.store(rest, left)
        values = [vector.splat(b, vector.load(b, vector.address_of(b, line, patch)), ROW_TILE) for patch in patches]
        rows = [vector.address_of(b, inverses, patch, PATCH_BYTES) for patch in patches]
        for tile, cell in enumerate(cells):
            inverse = [_of_sign(b, positive[tile], row, tile * TILE_BYTES) for row in rows]
            found = vector.tree(b, vector.maximum, [b.fmul(x, y) for x, y in zip(values, inverse)])
            b.store(vector.maximum(b, found, b.load(cell)), cell)
        b.cbranch(b.icmp_unsigned("!=", rest, vector.I64(0)), again, done)
        b.position_at_end(done)
        for tile, cell in enumerate(cells):
            vector.store(b, b.load(cell), best, tile * TILE_VECTOR)

    return raise_column


bar_1, bar_2, bar_4 = (_bar_code(n) for n in (1, 2, 4))
raise_1, raise_2, raise_4 = _raise_code(1, 8), _raise_code(2, 4), _raise_code(4, 4)


@primitive(INT, INT)
def bit_count(b: Any, bits: Any) -> Any:
    return b.ctpop(bits)


# --- Loops ------------------------------------------------------------------------------------------------------------


@inlined
def band_tiles(first: int, n_tiles: int) -> int:
    """How many tiles the band has that starts at this one: 4, 2 or 1."""
    left = min(n_tiles - first, MOST_TILES)
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@inlined
def transpose_rows(scratch: Scratch, n_rows: int, n_tiles: int) -> None:
    """Lays the reciprocals of a block out rows side by side, and fills scales[tile, s, r] with their sums.

    Groups of one row, as depthwise convolutions have, spare the division of the padding.
    """
    fill(scratch.scales, n_tiles * 2 * ROW_TILE, 0.0)
    for tile in range(n_tiles):
        for s in range(2):
            line, sign = scratch.d_LP + (2 * ROW_TILE * tile + s) * LINE, s * TILE_VECTOR
            to, sums = scratch.transposed + tile * TILE_BYTES + sign, scratch.scales + tile * PATCH_BYTES + sign
            if n_rows == 1:
                transpose_line(line, 2 * LINE, to, sums)
            else:
                transpose_tile(line, 2 * LINE, to, sums)


@CompiledLoop
def transpose_lines(scratch_at: int, n_rows: int, n_tiles: int) -> None:
    """Lays the reciprocals of a block out rows side by side, scales their lines, notes the patches' reach.

    A line is divided by its mean. One that is 0 in the whole block can raise nothing: its floor keeps it out of bars.
    """
    scratch = read_scratch(scratch_at)
    transpose_rows(scratch, n_rows, n_tiles)
    for i in range(n_tiles * 2 * ROW_TILE):
        total = float_at(scratch.scales, i)
        is_zero = not total > 0.0
        put_float(scratch.floors, i, np.float32(LARGEST_BAR) if is_zero else np.float32(0.0))
        scale = np.float32(0.0) if is_zero else min(np.float32(BLOCK) / total, np.float32(LARGEST_SCALE))
        put_float(scratch.scales, i, scale)
    tile, band = 0, 0
    while tile < n_tiles:
        n = band_tiles(tile, n_tiles)
        inverses, scales = scratch.transposed + tile * TILE_BYTES, scratch.scales + tile * PATCH_BYTES
        reaches(inverses, scales, n, scratch.reach + band * LINE)
        tile, band = tile + n, band + 1


@CompiledLoop
def raise_best(scratch_at: int, signs: int, n_rows: int, fan_in: int, best: int) -> None:
    """Raises best[k, r] to the largest product of the block; counts the (row, column, patch) triples computed."""
    scratch = read_scratch(scratch_at)
    a, bars, masks = scratch.a_KP, scratch.bars_K, scratch.masks_K
    n_tiles = -(-n_rows // ROW_TILE)
    best_step, signs_step = n_tiles * TILE_VECTOR, n_tiles * SIGN_BYTES
    n_computed = 0
    tile, band = 0, 0
    while tile < n_tiles:
        n = band_tiles(tile, n_tiles)
        rows, reach = scratch.transposed + tile * TILE_BYTES, scratch.reach + band * LINE
        scale, floor = scratch.scales + tile * PATCH_BYTES, scratch.floors + tile * PATCH_BYTES
        best_at, signs_at = best + tile * TILE_VECTOR, signs + tile * SIGN_BYTES
        # three loops: what the first two find is there before the third has to branch on it
        for k in range(fan_in):
            put_float(bars, k, _bar(n, best_at + k * best_step, scale, floor, signs_at + k * signs_step))
        for k in range(fan_in):
            put_long(masks, k, above(a + k * LINE, reach, float_at(bars, k)))
        for k in range(fan_in):
            line, column, column_signs = a + k * LINE, best_at + k * best_step, signs_at + k * signs_step
            mask = long_at(masks, k)
            if float_at(bars, k) < LEAST_BAR:  # a maximum is 0 yet: the likeliest patches first set a bar
                bar, peak = float_at(bars, k), highest(line, reach)
                if peak >= LEAST_BAR:
                    mask = above(line, reach, peak * np.float32(NEAR_PEAK))
                    n_computed += bit_count(mask) * n * ROW_TILE
                    _raise(n, mask, line, rows, column, column_signs)
                    bar = _bar(n, column, scale, floor, column_signs)
                mask = above(line, reach, bar) if bar >= LEAST_BAR else above_zero(line)
            if mask != 0:
                n_computed += bit_count(mask) * n * ROW_TILE
                _raise(n, mask, line, rows, column, column_signs)
        tile, band = tile + n, band + 1
    put_long(scratch.n_computed, 0, long_at(scratch.n_computed, 0) + n_computed)


@inlined
def _bar(n_tiles: int, best: int, scales: int, floors: int, signs: int) -> np.float32:
    if n_tiles == 4:
        return bar_4(best, scales, floors, signs)
    if n_tiles == 2:
        return bar_2(best, scales, floors, signs)
    return bar_1(best, scales, floors, signs)


@inlined
def _raise(n_tiles: int, mask: int, line: int, inverses: int, best: int, signs: int) -> None:
    if n_tiles == 4:
        raise_4(mask, line, inverses, best, signs)
    elif n_tiles == 2:
        raise_2(mask, line, inverses, best, signs)
    else:
        raise_1(mask, line, inverses, best, signs)


_call_lay_out, _call_transpose_lines = calling(lay_out), calling(transpose_lines)
_call_raise_lines = calling(raise_best, raise_by_all)


@CompiledLoop
def scan(
    calls_at: int,
    layer_at: int,
    weights_at: int,
    scratch_at: int,
    squares_QX: int,
    n_squares: int,
    first: int,
    last: int,
    best_GKX: int,
    best_step: int,
) -> None:
    """Takes a stretch of patches into the maxima of each group, `best_step` bytes apart, and the squares."""
    calls, layer = read_calls(calls_at), read_layer(layer_at)
    weights = read_weights(weights_at)
    n_rows, fan_in = weights.n_rows, weights.fan_in
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        for g in range(weights.n_groups):
            signs, best = layer.signs_GKR + g * fan_in * layer.n_tiles * SIGN_BYTES, best_GKX + g * best_step
            for t in range(2):
                which = which_sign(layer, t)
                if which == NO_SIGN:
                    continue
                block = start, stop, g, t, which
                of_all = calls_at, layer_at, weights_at, scratch_at, squares_QX, n_squares
                _call_lay_out(calls.lay_out, *of_all, *block)
                if calls.transpose_lines != NOTHING:
                    _call_transpose_lines(calls.transpose_lines, scratch_at, n_rows, layer.n_tiles)
                _call_raise_lines(calls.raise_lines, scratch_at, signs, n_rows, fan_in, best)
