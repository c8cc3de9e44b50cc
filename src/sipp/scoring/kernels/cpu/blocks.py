"""A block of patches out of the windows of a layer: laid out, its denominators and their squares.

A ratio does not change when its patch is scaled (T2), so each patch is divided by its sum: float32 does not overflow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipp.native import (
    INT,
    INT64_BYTES,
    VOID,
    CompiledLoop,
    calling,
    double_at,
    float_at,
    inlined,
    long_at,
    primitive,
    processor,
    put_double,
    put_float,
    put_long,
    vector,
)
from sipp.scoring.kernels.cpu.denominators import denominators, fill
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    LINE,
    ROW_TILE,
    VECTOR,
    Calls,
    Layer,
    Scratch,
    read_calls,
    read_layer,
    read_scratch,
    read_weights,
)

ONLY_SIGN, FIRST_SIGN, SECOND_SIGN, NO_SIGN = 0, 1, 2, 3  # of a block's activations
DOUBLE_BYTES = 8  # bytes

# --- Gathering patches ------------------------------------------------------------------------------------------------


def _gather(n: int, step: int = 1) -> Any:
    """A function: target[k, i] = max(0, source[fan[k] + step i] * factor[i]) for n patches i, and their sums over k.

    Rows of images are short, so there are several widths. Nothing beyond the last value needed is read: with step 2 the
    second half comes from a vector that ends there.
    """
    kind, zero = vector.of(n), vector.constant(0.0, n)

    @primitive(VOID, *[INT] * 6)
    def gather(b: Any, source: Any, fan: Any, n_fan: Any, factor: Any, target: Any, sums: Any) -> None:
        scale, (total,) = vector.load(b, factor, kind), vector.variables(b, [zero])
        with vector.each(b, 0, n_fan) as k:
            start = vector.address_of(b, source, vector.load(b, vector.address_of(b, fan, k, INT64_BYTES), vector.I64))
            value = vector.load(b, start, kind)
            if step == 2:
                end = vector.load(b, start, kind, (n - 1) * vector.FLOAT_BYTES)
                value = vector.pick(b, value, end, [*range(0, n, 2), *range(n + 1, 2 * n, 2)])
            value = vector.maximum(b, b.fmul(value, scale), zero)
            vector.store(b, value, vector.address_of(b, target, k, LINE))
            b.store(b.fadd(b.load(total), value), total)
        vector.store(b, b.load(total), sums)

    return gather


gather_16, gather_8, gather_4, gather_1 = (_gather(n) for n in (16, 8, 4, 1))
gather_16_even, gather_8_even, gather_4_even = (_gather(n, 2) for n in (16, 8, 4))


@primitive(VOID, *[INT] * 6)
def gather_lines(b: Any, source: Any, offsets: Any, n_fan: Any, factors: Any, target: Any, sums: Any) -> None:
    """The same for ROW_TILE patches i whose columns lie side by side: column k of patch i is source[offsets[i] + k]."""
    kind, zero = vector.of(ROW_TILE), vector.constant(0.0, ROW_TILE)
    scale, (total,) = vector.load(b, factors, kind), vector.variables(b, [zero])
    starts = [
        vector.address_of(b, source, vector.load(b, offsets, vector.I64, i * INT64_BYTES)) for i in range(ROW_TILE)
    ]

    def take(value: Any, to: Any, offset: int) -> None:
        value = vector.maximum(b, b.fmul(value, scale), zero)
        vector.store(b, value, to, offset)
        b.store(b.fadd(b.load(total), value), total)

    whole = b.mul(b.udiv(n_fan, vector.I64(ROW_TILE)), vector.I64(ROW_TILE))
    with vector.each(b, 0, whole, ROW_TILE) as first:
        for k, value in enumerate(
            vector.transposed(b, [vector.load(b, vector.address_of(b, start, first), kind) for start in starts])
        ):
            take(value, vector.address_of(b, target, first, LINE), k * LINE)
    with vector.each(b, whole, n_fan) as k:
        value = zero
        for i, start in enumerate(starts):
            value = b.insert_element(value, vector.load(b, vector.address_of(b, start, k), vector.F32), vector.I32(i))
        take(value, vector.address_of(b, target, k, LINE), 0)
    vector.store(b, b.load(total), sums)


@inlined
def _gather_piece(n: int, step: int, source: int, fan: int, n_fan: int, factors: int, block: int, sums: int) -> None:
    if step == 2:
        if n == 16:
            gather_16_even(source, fan, n_fan, factors, block, sums)
        elif n == 8:
            gather_8_even(source, fan, n_fan, factors, block, sums)
        else:
            gather_4_even(source, fan, n_fan, factors, block, sums)
    elif n == 16:
        gather_16(source, fan, n_fan, factors, block, sums)
    elif n == 8:
        gather_8(source, fan, n_fan, factors, block, sums)
    else:
        gather_4(source, fan, n_fan, factors, block, sums)


@CompiledLoop
def gather_runs(
    source: int, offsets: int, n_patches: int, fan: int, n_fan: int, factors: int, block: int, sums: int, step: int
) -> None:
    """Fills block[k, p] = max(0, source[offsets[p] + fan[k]] * factors[p]) and its sums[p], in runs of patches.

    Those of a run lie `step` (1 or 2) apart in memory. Where pieces overlap, the same values are written again.
    """
    first = 0
    while first < n_patches:
        last = _end_of_run(offsets, first, n_patches, step)
        n, done = last - first, 0
        start, to = source + long_at(offsets, first) * vector.FLOAT_BYTES, first * vector.FLOAT_BYTES
        for width in (16, 8, 4):
            least = width if width == 16 else 1  # of what is left: narrower pieces may overlap the one before
            while n >= width and n - done >= least:
                i = min(done, n - width) * vector.FLOAT_BYTES
                moved = to + i
                _gather_piece(width, step, start + step * i, fan, n_fan, factors + moved, block + moved, sums + moved)
                done += width
        _gather_rest(source, offsets, first + done, last, fan, n_fan, factors, block, sums)
        first = last


@CompiledLoop
def gather_apart(
    source: int, offsets: int, n_patches: int, fan: int, n_fan: int, factors: int, block: int, sums: int, step: int
) -> None:
    """The same of patches that lie anywhere; ROW_TILE at a time where the columns of each lie side by side."""
    done = 0
    if _end_of_run(fan, 0, n_fan, 1) == n_fan:
        while n_patches - done >= ROW_TILE:
            to, first = done * vector.FLOAT_BYTES, source + long_at(fan, 0) * vector.FLOAT_BYTES
            gather_lines(first, offsets + done * INT64_BYTES, n_fan, factors + to, block + to, sums + to)
            done += ROW_TILE
    _gather_rest(source, offsets, done, n_patches, fan, n_fan, factors, block, sums)


@inlined
def _end_of_run(offsets: int, first: int, n_patches: int, step: int) -> int:
    """Where the patches end that follow `first` in memory at this step."""
    last = first + 1
    while last < n_patches and long_at(offsets, last) - long_at(offsets, last - 1) == step:
        last += 1
    return last


@inlined
def _gather_rest(
    source: int, offsets: int, first: int, last: int, fan: int, n_fan: int, factors: int, block: int, sums: int
) -> None:
    """Patch by patch."""
    for p in range(first, last):
        start, to = source + long_at(offsets, p) * vector.FLOAT_BYTES, p * vector.FLOAT_BYTES
        gather_1(start, fan, n_fan, factors + to, block + to, sums + to)


# --- The block --------------------------------------------------------------------------------------------------------

_call_gather, _call_denominators = calling(gather_runs, gather_apart), calling(denominators)


@primitive(VOID, INT, INT)
def scale_line(b: Any, line: Any, factors: Any) -> None:
    """line[p] *= factors[p]."""
    for offset in range(0, LINE, VECTOR):
        product = b.fmul(
            vector.load(b, line, vector.of(processor.LANES), offset),
            vector.load(b, factors, vector.of(processor.LANES), offset),
        )
        vector.store(b, product, line, offset)


@inlined
def _normalise(block: int, fan_in: int, sums: int, factors: int) -> None:
    """Divides every patch of the block by its sum (0 stays 0)."""
    for p in range(BLOCK):
        total = float_at(sums, p)
        put_float(factors, p, np.float32(1.0) / total if total > 0.0 else np.float32(0.0))
    for k in range(fan_in):
        scale_line(block + k * LINE, factors)


@inlined
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
            fill(a + k * LINE + n_patches * vector.FLOAT_BYTES, BLOCK - n_patches, 0.0)
        fill(sums + n_patches * vector.FLOAT_BYTES, BLOCK - n_patches, 0.0)
    _call_gather(calls.gather, layer.source, offsets, n_patches, layer.fan, fan_in, factors, a, sums, layer.step)
    _normalise(a, fan_in, sums, factors)


def reciprocal(b: Any, denominator: Any) -> Any:
    """1 / D, 0 where D is 0 (T2)."""
    zero, one = (vector.constant(value, denominator.type.count) for value in (0.0, 1.0))
    return b.select(b.fcmp_ordered(">", denominator, zero), b.fdiv(one, denominator), zero)


def _squares_code(which: int) -> Any:
    """A function: fills out[x, p] with sums over the rows: of squared denominators of both signs, of squared outputs.

    `which`: ONLY_SIGN of the activations, FIRST_SIGN of two (their outputs wait, and are not squared), or SECOND_SIGN.
    """
    lanes = processor.LANES // 2
    kind, narrow = vector.of(lanes, vector.F64), vector.of(lanes)

    @primitive(VOID, *[INT] * 6)
    def squares(b: Any, d: Any, sums: Any, row_factors: Any, n_rows: Any, waiting: Any, out: Any) -> None:
        with vector.each(b, 0, BLOCK, lanes) as first:
            totals = vector.variables(b, [vector.constant(0.0, lanes, vector.F64)] * 3)
            patch_sums = b.fpext(vector.load(b, vector.address_of(b, sums, first), narrow), kind)
            with vector.each(b, 0, n_rows) as r:
                scale = b.fmul(
                    vector.splat(
                        b, vector.load(b, vector.address_of(b, row_factors, r, DOUBLE_BYTES), vector.F64), lanes
                    ),
                    patch_sums,
                )
                line, wait = (
                    vector.address_of(b, vector.address_of(b, d, r, 2 * LINE), first),
                    vector.address_of(b, vector.address_of(b, waiting, r, BLOCK * DOUBLE_BYTES), first, DOUBLE_BYTES),
                )
                values = [b.fmul(b.fpext(vector.load(b, line, narrow, s * LINE), kind), scale) for s in range(2)]
                output = b.fsub(*values)
                if which == FIRST_SIGN:
                    vector.store(b, output, wait)
                elif which == SECOND_SIGN:
                    values.append(b.fsub(output, vector.load(b, wait, kind)))
                else:
                    values.append(output)
                for cell, value in zip(totals, values):
                    b.store(vector.fused(b, value, value, b.load(cell)), cell)
            for x, cell in enumerate(totals):
                vector.store(b, b.load(cell), vector.address_of(b, out, first, DOUBLE_BYTES), x * BLOCK * DOUBLE_BYTES)

    return squares


squares_only, squares_first, squares_second = map(_squares_code, (ONLY_SIGN, FIRST_SIGN, SECOND_SIGN))


@inlined
def _add_squares(found: int, n: int, out: int, n_summed: int) -> None:
    """Adds the squares of n patches to theirs, or their sum, in their order, to the one of all."""
    if n_summed == 1:
        for p in range(n):
            put_double(out, p, double_at(out, p) + double_at(found, p))
    else:
        total = 0.0
        for p in range(n):
            total += double_at(found, p)
        put_double(out, 0, double_at(out, 0) + total)


@CompiledLoop
def lay_out(
    calls_at: int,
    layer_at: int,
    weights_at: int,
    scratch_at: int,
    squares_QX: int,
    n_squares: int,
    start: int,
    stop: int,
    g: int,
    t: int,
    which: int,
) -> None:
    """Lays one block of patches of group g and sign t out in `a_KP`, D in `d_LP`, and adds the squares of D.

    These are of the four quadrants 2 t + s, and then of the outputs.
    """
    calls, layer = read_calls(calls_at), read_layer(layer_at)
    weights, scratch = read_weights(weights_at), read_scratch(scratch_at)
    n_rows, squares = weights.n_rows, scratch.squares_XP
    _prepare(calls, layer, weights.fan_in, start, stop, g, t, scratch)
    _call_denominators(calls.denominators, scratch.a_KP, weights_at, g, scratch.d_LP)
    row_factors = layer.row_factors_GR + g * n_rows * DOUBLE_BYTES
    if which == ONLY_SIGN:
        squares_only(scratch.d_LP, scratch.sums_P, row_factors, n_rows, scratch.outputs_RP, squares)
    elif which == FIRST_SIGN:
        squares_first(scratch.d_LP, scratch.sums_P, row_factors, n_rows, scratch.outputs_RP, squares)
    else:
        squares_second(scratch.d_LP, scratch.sums_P, row_factors, n_rows, scratch.outputs_RP, squares)
    for x in range(3):  # the two quadrants of the sign t, and the whole output
        to = (2 * t + x if x < 2 else 4) * n_squares + start // layer.n_summed
        _add_squares(squares + x * BLOCK * DOUBLE_BYTES, stop - start, squares_QX + to * DOUBLE_BYTES, layer.n_summed)


@inlined
def which_sign(layer: Layer, t: int) -> int:
    """Which of a block's signs sign t of the activations is; NO_SIGN where there are none of it."""
    if not (layer.has_negative if t else layer.has_positive):
        return NO_SIGN
    return FIRST_SIGN + t if layer.has_positive and layer.has_negative else ONLY_SIGN
