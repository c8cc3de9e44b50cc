"""The innermost functions of the CPU kernel, in LLVM instructions: what must stay in registers does (README.md).

Each takes addresses and numbers; `loops.py` calls them. A BLOCK of patches is laid out with one LINE for each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sipp.native import compiling, processor, vector
from sipp.scoring.kernels.protocol import BAR_SLACK, LARGEST_BAR, LEAST_REACH

# --- Sizes ------------------------------------------------------------------------------------------------------------

BLOCK = 64  # patches laid out at once: one bit of an integer each
ROW_TILE = 16  # rows side by side
MOST_TILES = processor.REGISTERS // 8  # of a band: as many maxima stay in registers
PANEL = 3  # rows of one register tile of the ordinary product, both signs of each
N_PATTERNS = 2**PANEL  # of the signs of the weights of a panel
STRIP_VECTORS = processor.REGISTERS // 8  # 2 x PANEL x STRIP_VECTORS sums: 24 of 32 registers, or 12 of 16
LANES = processor.LANES
STRIP = LANES * STRIP_VECTORS  # patches of one register tile of the ordinary product
MEAN_COLUMNS = 6 if processor.WIDE else 2  # of the sums for means: their signs have 7 registers (or few) to stay in
FEW_COLUMNS = MEAN_COLUMNS // 2  # of those that are left

# In bytes
FLOAT_BYTES, LONG_BYTES, DOUBLE_BYTES, INDEX_BYTES = vector.FLOAT_BYTES, vector.LONG_BYTES, 8, 4
VECTOR = LANES * FLOAT_BYTES
LINE = BLOCK * FLOAT_BYTES  # one column of a block
TILE_VECTOR = ROW_TILE * FLOAT_BYTES  # one patch, one tile, one sign in `transposed`
PATCH_BYTES = 2 * TILE_VECTOR  # one patch and one tile: both signs
TILE_BYTES = BLOCK * PATCH_BYTES  # one tile of a block
SIGN_BYTES = ROW_TILE // 8  # one tile in `signs`

VOID, INT, REAL = compiling.VOID, compiling.INT, compiling.REAL
primitive = compiling.primitive
address_of, each, load, store, variables = vector.address_of, vector.each, vector.load, vector.store, vector.variables
maximum, splat, tree = vector.maximum, vector.splat, vector.tree
I64 = vector.I64
_wide, _tile = vector.of(LANES), vector.of(ROW_TILE)

# --- Gathering patches ------------------------------------------------------------------------------------------------


def _gather(n: int, step: int = 1) -> Any:
    """A function: target[k, i] = max(0, source[fan[k] + step i] * factor[i]) for n patches i, and their sums over k.

    Rows of images are short, so there are several widths. Nothing beyond the last value needed is read: with step 2 the
    second half comes from a vector that ends there.
    """
    kind, zero = vector.of(n), vector.constant(0.0, n)

    @primitive(VOID, *[INT] * 6)
    def gather(b: Any, source: Any, fan: Any, n_fan: Any, factor: Any, target: Any, sums: Any) -> None:
        scale, (total,) = load(b, factor, kind), variables(b, [zero])
        with each(b, 0, n_fan) as k:
            start = address_of(b, source, load(b, address_of(b, fan, k, LONG_BYTES), I64))
            value = load(b, start, kind)
            if step == 2:
                end = load(b, start, kind, (n - 1) * FLOAT_BYTES)
                value = vector.pick(b, value, end, [*range(0, n, 2), *range(n + 1, 2 * n, 2)])
            value = maximum(b, b.fmul(value, scale), zero)
            store(b, value, address_of(b, target, k, LINE))
            b.store(b.fadd(b.load(total), value), total)
        store(b, b.load(total), sums)

    return gather


gather_16, gather_8, gather_4, gather_1 = (_gather(n) for n in (16, 8, 4, 1))
gather_16_even, gather_8_even, gather_4_even = (_gather(n, 2) for n in (16, 8, 4))


@primitive(VOID, *[INT] * 6)
def gather_lines(b: Any, source: Any, offsets: Any, n_fan: Any, factors: Any, target: Any, sums: Any) -> None:
    """The same for ROW_TILE patches i whose columns lie side by side: column k of patch i is source[offsets[i] + k]."""
    zero = vector.constant(0.0, ROW_TILE)
    scale, (total,) = load(b, factors, _tile), variables(b, [zero])
    starts = [address_of(b, source, load(b, offsets, I64, i * LONG_BYTES)) for i in range(ROW_TILE)]

    def take(value: Any, to: Any, offset: int) -> None:
        value = maximum(b, b.fmul(value, scale), zero)
        store(b, value, to, offset)
        b.store(b.fadd(b.load(total), value), total)

    whole = b.mul(b.udiv(n_fan, I64(ROW_TILE)), I64(ROW_TILE))
    with each(b, 0, whole, ROW_TILE) as first:
        lines = [load(b, address_of(b, start, first), _tile) for start in starts]
        for k, value in enumerate(vector.transposed(b, lines)):
            take(value, address_of(b, target, first, LINE), k * LINE)
    with each(b, whole, n_fan) as k:
        value = zero
        for i, start in enumerate(starts):
            value = b.insert_element(value, load(b, address_of(b, start, k)), vector.I32(i))
        take(value, address_of(b, target, k, LINE), 0)
    store(b, b.load(total), sums)


@primitive(VOID, INT, INT)
def scale_line(b: Any, line: Any, factors: Any) -> None:
    """line[p] *= factors[p]."""
    for offset in range(0, LINE, VECTOR):
        store(b, b.fmul(load(b, line, _wide, offset), load(b, factors, _wide, offset)), line, offset)


# --- Denominators and norms -------------------------------------------------------------------------------------------


def _panel(n_rows: int) -> Any:
    """A function: out[2 i + s, strip] += sum of magnitudes[j, i] * a[places[j], strip] over columns j, for rows i.

    Of the first chunk of columns, 0, it is = and not +=: what `out` held before is not read. Columns come sorted by the
    signs of their weights in these rows, bit i of the pattern for row i; those of pattern q end at ends[q]. So each
    product goes to the sum of its own sign, and the other sum needs none. Terms are added in the same order whatever
    stands beside them: the same bits for any batch.
    """

    @primitive(VOID, *[INT] * 6)
    def panel(b: Any, chunk: Any, a: Any, magnitudes: Any, places: Any, ends: Any, out: Any) -> None:
        sums = [variables(b, [vector.constant(0.0, LANES)] * STRIP_VECTORS) for _ in range(2 * n_rows)]
        start = I64(0)
        for pattern in range(2**n_rows):
            stop = b.sext(load(b, ends, vector.I32, pattern * INDEX_BYTES), I64)
            with each(b, start, stop) as j:
                place = b.sext(load(b, address_of(b, places, j, INDEX_BYTES), vector.I32), I64)
                line = address_of(b, a, place, LINE)
                terms = [load(b, line, _wide, i * VECTOR) for i in range(STRIP_VECTORS)]
                weights = address_of(b, magnitudes, j, n_rows * FLOAT_BYTES)
                for i in range(n_rows):
                    w = splat(b, load(b, weights, offset=i * FLOAT_BYTES), LANES)
                    for cell, term in zip(sums[2 * i + (pattern >> i & 1)], terms):
                        b.store(vector.fused(b, w, term, b.load(cell)), cell)
            start = stop
        cells = [(i * LINE + j * VECTOR, cell) for i, line in enumerate(sums) for j, cell in enumerate(line)]
        with b.if_then(b.icmp_signed("!=", chunk, I64(0))):
            for offset, cell in cells:
                b.store(b.fadd(load(b, out, _wide, offset), b.load(cell)), cell)
        for offset, cell in cells:
            store(b, b.load(cell), out, offset)

    return panel


panel_3, panel_2, panel_1 = map(_panel, (3, 2, 1))

ONLY_SIGN, FIRST_SIGN, SECOND_SIGN = range(3)  # of a block's activations


def _squares_code(which: int) -> Any:
    """A function: fills out[x, p] with sums over the rows: of squared denominators of both signs, of squared outputs.

    `which`: ONLY_SIGN of the activations, FIRST_SIGN of two (their outputs wait, and are not squared), or SECOND_SIGN.
    """
    lanes = LANES // 2
    kind, narrow = vector.of(lanes, vector.F64), vector.of(lanes)

    @primitive(VOID, *[INT] * 6)
    def squares(b: Any, d: Any, sums: Any, row_factors: Any, n_rows: Any, waiting: Any, out: Any) -> None:
        with each(b, 0, BLOCK, lanes) as first:
            totals = variables(b, [vector.constant(0.0, lanes, vector.F64)] * 3)
            patch_sums = b.fpext(load(b, address_of(b, sums, first), narrow), kind)
            with each(b, 0, n_rows) as r:
                factor = load(b, address_of(b, row_factors, r, DOUBLE_BYTES), vector.F64)
                scale = b.fmul(splat(b, factor, lanes), patch_sums)
                line = address_of(b, address_of(b, d, r, 2 * LINE), first)
                wait = address_of(b, address_of(b, waiting, r, BLOCK * DOUBLE_BYTES), first, DOUBLE_BYTES)
                values = [b.fmul(b.fpext(load(b, line, narrow, s * LINE), kind), scale) for s in range(2)]
                output = b.fsub(*values)
                if which == FIRST_SIGN:
                    store(b, output, wait)
                else:
                    values.append(output if which == ONLY_SIGN else b.fsub(output, load(b, wait, kind)))
                for cell, value in zip(totals, values):
                    b.store(vector.fused(b, value, value, b.load(cell)), cell)
            for x, cell in enumerate(totals):
                store(b, b.load(cell), address_of(b, out, first, DOUBLE_BYTES), x * BLOCK * DOUBLE_BYTES)

    return squares


squares_only, squares_first, squares_second = map(_squares_code, (ONLY_SIGN, FIRST_SIGN, SECOND_SIGN))


def _reciprocal(b: Any, denominator: Any) -> Any:
    """1 / D, 0 where D is 0 (T2)."""
    zero, one = vector.like(denominator, 0.0), vector.like(denominator, 1.0)
    return b.select(b.fcmp_ordered(">", denominator, zero), b.fdiv(one, denominator), zero)


# --- Every product: patches side by side ------------------------------------------------------------------------------


@primitive(VOID, INT)
def invert_line(b: Any, line: Any) -> None:
    """line[p] = 1 / line[p]."""
    for offset in range(0, LINE, VECTOR):
        store(b, _reciprocal(b, load(b, line, _wide, offset)), line, offset)


@primitive(VOID, *[INT] * 5)
def raise_rows(b: Any, n_rows: Any, line: Any, d: Any, best: Any, signs: Any) -> None:
    """best[r, lane] = the largest of best[r, lane] and of line[p] * d[2 r + s, p] over the lane's patches p.

    For up to ROW_TILE rows; s is the sign of the weight of row r, bit r of what lies at `signs`.
    """
    vectors = [load(b, line, _wide, offset) for offset in range(0, LINE, VECTOR)]
    bits = b.zext(load(b, signs, vector.I16), I64)
    with each(b, 0, n_rows) as row:
        positive = address_of(b, d, row, 2 * LINE)
        inverse = b.select(b.trunc(b.lshr(bits, row), vector.I1), positive, b.add(positive, I64(LINE)))
        out = address_of(b, best, row, VECTOR)
        products = [b.fmul(x, load(b, inverse, _wide, i * VECTOR)) for i, x in enumerate(vectors)]
        store(b, tree(b, maximum, [*products, load(b, out, _wide)]), out)


# --- Those that can matter: rows side by side -------------------------------------------------------------------------


def _transpose_code(n_lines: int) -> Any:
    """A function: transposed[p, 0, r] = 1 / lines[r, p] for lines `step` bytes apart, 0 after them; their sums[r] grow.

    The dividers work while lanes are exchanged.
    """

    @primitive(VOID, *[INT] * 4)
    def transpose(b: Any, lines: Any, step: Any, transposed_at: Any, sums: Any) -> None:
        padding = [vector.constant(0.0, ROW_TILE)] * (ROW_TILE - n_lines)
        with each(b, 0, BLOCK, ROW_TILE) as first:
            line, target = address_of(b, lines, first), address_of(b, transposed_at, first, PATCH_BYTES)
            lines_here = (load(b, b.add(line, b.mul(step, I64(r))), _tile) for r in range(n_lines))
            vectors = vector.transposed(b, [*(_reciprocal(b, values) for values in lines_here), *padding])
            for p, values in enumerate(vectors):
                store(b, values, target, p * PATCH_BYTES)
            total = tree(b, lambda b, x, y: b.fadd(x, y), vectors)
            store(b, b.fadd(load(b, sums, _tile), total), sums)

    return transpose


transpose_tile, transpose_line = _transpose_code(ROW_TILE), _transpose_code(1)


@primitive(VOID, *[INT] * 4)
def reaches(b: Any, inverses: Any, scales: Any, n_tiles: Any, reach: Any) -> None:
    """reach[p] = the largest of inverses[tile, p, s, r] * scales[tile, s, r] over the tiles, at least LEAST_REACH."""
    with each(b, 0, BLOCK, ROW_TILE) as first:
        cells = variables(b, [vector.constant(LEAST_REACH, ROW_TILE)] * ROW_TILE)
        with each(b, 0, n_tiles) as tile:
            scale = address_of(b, scales, tile, PATCH_BYTES)
            rows = address_of(b, address_of(b, inverses, tile, TILE_BYTES), first, PATCH_BYTES)
            for sign in (0, TILE_VECTOR):
                factor = load(b, scale, _tile, sign)
                for p, cell in enumerate(cells):
                    value = b.fmul(load(b, rows, _tile, p * PATCH_BYTES + sign), factor)
                    b.store(maximum(b, value, b.load(cell)), cell)
        found = tree(b, maximum, vector.transposed(b, [b.load(cell) for cell in cells]))
        store(b, found, address_of(b, reach, first))


def _flags(b: Any, signs: Any, step: Any, n: int) -> list[Any]:
    """ROW_TILE flags, set where weights are positive, from each of n places so many bytes apart."""
    places = [b.add(signs, b.mul(step, I64(i))) for i in range(n)]
    return [b.bitcast(load(b, place, vector.I16), vector.of(ROW_TILE, vector.I1)) for place in places]


def _of_sign(b: Any, positive: Any, address: Any, offset: int) -> Any:
    """For each row the value of its weight's own sign: the first of two vectors where it is positive."""
    return b.select(positive, load(b, address, _tile, offset), load(b, address, _tile, offset + TILE_VECTOR))


def _bar_code(n_tiles: int) -> Any:
    """A function: the bar of a column: the least of best[r] * scales[r], at least floors[r], over the band's rows."""

    @primitive(REAL, *[INT] * 4)
    def bar(b: Any, best: Any, scales: Any, floors: Any, signs: Any) -> Any:
        least = vector.constant(LARGEST_BAR, ROW_TILE)
        for tile, positive in enumerate(_flags(b, signs, I64(SIGN_BYTES), n_tiles)):
            scale, floor = (_of_sign(b, positive, address, tile * PATCH_BYTES) for address in (scales, floors))
            scaled = b.fmul(load(b, best, _tile, tile * TILE_VECTOR), scale)
            least = vector.minimum(b, maximum(b, scaled, floor), least)
        return b.fmul(vector.across(b, vector.minimum, least), vector.constant(BAR_SLACK, 1))

    return bar


def _products(b: Any, line: Any, reach: Any) -> list[Any]:
    """line[p] * reach[p], ROW_TILE patches in a vector."""
    return [b.fmul(load(b, line, _tile, at), load(b, reach, _tile, at)) for at in range(0, LINE, TILE_VECTOR)]


def _mask(b: Any, values: Sequence[Any], limit: Any) -> Any:
    """Bit p: value p is above the limit."""
    flags = [b.fcmp_ordered(">", value, limit) for value in values]
    bits = [b.zext(b.bitcast(flag, vector.I16), I64) for flag in flags]
    return tree(b, lambda b, x, y: b.or_(x, y), [b.shl(one, I64(i * ROW_TILE)) for i, one in enumerate(bits)])


@primitive(INT, INT, INT, REAL)
def above(b: Any, line: Any, reach: Any, bar: Any) -> Any:
    """Bit p: line[p] * reach[p] is above the bar."""
    return _mask(b, _products(b, line, reach), splat(b, bar, ROW_TILE))


@primitive(INT, INT)
def above_zero(b: Any, line: Any) -> Any:
    """Bit p: line[p] is above 0."""
    values = [load(b, line, _tile, at) for at in range(0, LINE, TILE_VECTOR)]
    return _mask(b, values, vector.constant(0.0, ROW_TILE))


@primitive(REAL, INT, INT)
def highest(b: Any, line: Any, reach: Any) -> Any:
    """The largest of line[p] * reach[p]."""
    return vector.across(b, maximum, tree(b, maximum, _products(b, line, reach)))


def _raise_code(n_tiles: int, n_at_once: int) -> Any:
    """A function: best[r] = the largest of best[r] and of line[p] * inverses[r, p] over the patches p in `mask`, not 0.

    Patches go `n_at_once` together; where fewer are left, the last one counts again, which changes no maximum and
    spares a branch that nothing could predict.
    """

    @primitive(VOID, *[INT] * 5)
    def raise_column(b: Any, mask: Any, line: Any, inverses: Any, best: Any, signs: Any) -> None:
        positive = _flags(b, signs, I64(SIGN_BYTES), n_tiles)
        cells = variables(b, [load(b, best, _tile, tile * TILE_VECTOR) for tile in range(n_tiles)])
        left = variables(b, [mask])[0]
        again, done = b.append_basic_block("again"), b.append_basic_block("done")
        b.branch(again)
        b.position_at_end(again)
        rest, patches = b.load(left), list[Any]()
        for _ in range(n_at_once):
            patch, is_last = b.cttz(rest, vector.I1(0)), b.icmp_unsigned("==", rest, I64(0))
            patches.append(b.select(is_last, patches[-1], patch) if patches else patch)
            rest = b.and_(rest, b.sub(rest, I64(1)))
        b.store(rest, left)
        values = [splat(b, load(b, address_of(b, line, patch)), ROW_TILE) for patch in patches]
        rows = [address_of(b, inverses, patch, PATCH_BYTES) for patch in patches]
        for tile, cell in enumerate(cells):
            inverse = [_of_sign(b, positive[tile], row, tile * TILE_BYTES) for row in rows]
            found = tree(b, maximum, [b.fmul(x, y) for x, y in zip(values, inverse)])
            b.store(maximum(b, found, b.load(cell)), cell)
        b.cbranch(b.icmp_unsigned("!=", rest, I64(0)), again, done)
        b.position_at_end(done)
        for tile, cell in enumerate(cells):
            store(b, b.load(cell), best, tile * TILE_VECTOR)

    return raise_column


bar_1, bar_2, bar_4 = (_bar_code(n) for n in (1, 2, 4))
raise_1, raise_2, raise_4 = _raise_code(1, 8), _raise_code(2, 4), _raise_code(4, 4)

# --- Means ------------------------------------------------------------------------------------------------------------


def _mean(n_columns: int) -> Any:
    """A function: takes the sums over n patches p of line[k, p] * rows[p, s] into out[k], s the sign of the weight.

    Of a whole point: out[k] = max(out[k], sum * share). Of a part, whose share is 0: out[k] += sum. Each weight takes
    the reciprocal of its own sign, chosen patch by patch: a choice leaves the units that multiply free.
    """

    @primitive(VOID, *[INT] * 7, REAL)
    def mean(
        b: Any, n: Any, line: Any, rows: Any, signs: Any, signs_step: Any, out: Any, out_step: Any, share: Any
    ) -> None:
        sums = variables(b, [vector.constant(0.0, ROW_TILE)] * n_columns)
        flags = _flags(b, signs, signs_step, n_columns)
        with each(b, 0, n) as p:
            row, value_at = address_of(b, rows, p, PATCH_BYTES), address_of(b, line, p)
            positive, negative = (load(b, row, _tile, s * TILE_VECTOR) for s in range(2))
            for k, cell in enumerate(sums):
                value = splat(b, load(b, value_at, offset=k * LINE), ROW_TILE)
                b.store(vector.fused(b, value, b.select(flags[k], positive, negative), b.load(cell)), cell)
        places = [b.add(out, b.mul(out_step, I64(k))) for k in range(n_columns)]
        with b.if_else(b.fcmp_ordered(">", share, vector.constant(0.0, 1))) as (whole, part):
            with whole:
                factor = splat(b, share, ROW_TILE)
                for to, cell in zip(places, sums):
                    store(b, maximum(b, b.fmul(b.load(cell), factor), load(b, to, _tile)), to)
            with part:
                for to, cell in zip(places, sums):
                    store(b, b.fadd(b.load(cell), load(b, to, _tile)), to)

    return mean


mean_many, mean_few, mean_one = map(_mean, (MEAN_COLUMNS, FEW_COLUMNS, 1))
