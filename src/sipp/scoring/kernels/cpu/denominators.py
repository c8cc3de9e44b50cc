"""The denominators of T2, an ordinary product in which each weight belongs to one sign.

    d[2 r + s, p] = sum over k of  w_rk^s a_kp

Columns are sorted by the signs of a panel of three rows, so that each product goes to the sum of its own sign and the
other sum needs none. Terms are added in the same order whatever stands beside them: the same bits for any batch.
"""

from __future__ import annotations

from typing import Any

from sipp.native import (
    INT,
    VOID,
    CompiledLoop,
    calling,
    float_at,
    inlined,
    long_at,
    primitive,
    processor,
    put_float,
    put_int,
    put_long,
    vector,
)
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    INDEX_BYTES,
    LINE,
    PANEL,
    STRIP,
    STRIP_VECTORS,
    SUM_BLOCK,
    VECTOR,
    read_weights,
)

N_PATTERNS = 2**PANEL


def _panel(n_rows: int) -> Any:
    """A function: out[2 i + s, strip] += sum of magnitudes[j, i] * a[places[j], strip] over columns j, for rows i.

    Of the first chunk of columns, 0, it is = and not +=: what `out` held before is not read. Columns come sorted by the
    signs of their weights in these rows, bit i of the pattern for row i; those of pattern q end at ends[q].
    """

    @primitive(VOID, *[INT] * 6)
    def panel(b: Any, chunk: Any, a: Any, magnitudes: Any, places: Any, ends: Any, out: Any) -> None:
        sums = [vector.variables(b, [vector.constant(0.0, processor.LANES)] * STRIP_VECTORS) for _ in range(2 * n_rows)]
        start = vector.I64(0)
        for pattern in range(2**n_rows):
            stop = b.sext(vector.load(b, ends, vector.I32, pattern * INDEX_BYTES), vector.I64)
            with vector.each(b, start, stop) as j:
                place = b.sext(vector.load(b, vector.address_of(b, places, j, INDEX_BYTES), vector.I32), vector.I64)
                line = vector.address_of(b, a, place, LINE)
                terms = [vector.load(b, line, vector.of(processor.LANES), v * VECTOR) for v in range(STRIP_VECTORS)]
                for i in range(n_rows):
                    w = vector.splat(
                        b,
                        vector.load(
                            b,
                            vector.address_of(b, magnitudes, j, n_rows * vector.FLOAT_BYTES),
                            offset=i * vector.FLOAT_BYTES,
                        ),
                        processor.LANES,
                    )
                    for cell, term in zip(sums[2 * i + (pattern >> i & 1)], terms):
                        b.store(vector.fused(b, w, term, b.load(cell)), cell)
            start = stop
        cells = [(i * LINE + v * VECTOR, cell) for i, line in enumerate(sums) for v, cell in enumerate(line)]
        with b.if_then(b.icmp_signed("!=", chunk, vector.I64(0))):
            for offset, cell in cells:
                b.store(b.fadd(vector.load(b, out, vector.of(processor.LANES), offset), b.load(cell)), cell)
        for offset, cell in cells:
            vector.store(b, b.load(cell), out, offset)

    return panel


panel_3, panel_2, panel_1 = map(_panel, (3, 2, 1))


@primitive(VOID, INT, INT)
def copy_line(b: Any, source: Any, target: Any) -> None:
    for offset in range(0, LINE, VECTOR):
        vector.store(b, vector.load(b, source, vector.of(processor.LANES), offset), target, offset)


@inlined
def _copy_lines(source: int, source_step: int, n_lines: int, n_patches: int, block: int) -> None:
    """Copies the first patches of lines, so many bytes apart, into the lines of a block, zeros after."""
    for k in range(n_lines):
        line, to = source + k * source_step, block + k * LINE
        if n_patches >= BLOCK:
            copy_line(line, to)
        else:
            for p in range(n_patches):
                put_float(to, p, float_at(line, p))
            for p in range(n_patches, BLOCK):
                put_float(to, p, 0.0)


@inlined
def fill(target: int, n: int, value: float) -> None:
    """Sets n floats to this value."""
    for i in range(n):
        put_float(target, i, value)


@CompiledLoop
def denominators(a: int, weights_at: int, group: int, d: int) -> None:
    """Fills d[2 r + s, p] for one block of patches."""
    weights = read_weights(weights_at)
    fan_in, n_chunks = weights.fan_in, weights.n_chunks
    all_magnitudes = weights.magnitudes_GX + group * weights.n_rows * fan_in * vector.FLOAT_BYTES
    for chunk in range(n_chunks):
        start = chunk * SUM_BLOCK
        for panel in range(weights.n_panels):
            first = long_at(weights.panels, panel)
            n_rows, panel_of_all = long_at(weights.panels, panel + 1) - first, group * weights.n_panels + panel
            magnitudes = all_magnitudes + (first * fan_in + start * n_rows) * vector.FLOAT_BYTES
            places = weights.places_GNK + (panel_of_all * fan_in + start) * INDEX_BYTES
            ends = weights.ends_GNCQ + (panel_of_all * n_chunks + chunk) * N_PATTERNS * INDEX_BYTES
            for strip in range(0, BLOCK, STRIP):
                source, target = a + strip * vector.FLOAT_BYTES, d + 2 * first * LINE + strip * vector.FLOAT_BYTES
                if n_rows == 3:
                    panel_3(chunk, source, magnitudes, places, ends, target)
                elif n_rows == 2:
                    panel_2(chunk, source, magnitudes, places, ends, target)
                else:
                    panel_1(chunk, source, magnitudes, places, ends, target)


_call_denominators = calling(denominators)


@CompiledLoop
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
    weights, step = read_weights(weights_at), n_patches * vector.FLOAT_BYTES
    n_groups, n_rows = weights.n_groups, weights.n_rows
    for start in range(first, last, BLOCK):
        for g in range(n_groups):
            block = patches_GKP + g * weights.fan_in * step + start * vector.FLOAT_BYTES
            _copy_lines(block, step, weights.fan_in, last - start, a)
            _call_denominators(denominators, a, weights_at, g, d)
            for line in range(2 * n_rows):
                to = (((line & 1) * n_groups + g) * n_rows + (line >> 1)) * n_patches + start
                if last - start >= BLOCK:
                    copy_line(d + line * LINE, out + to * vector.FLOAT_BYTES)
                else:
                    for p in range(last - start):
                        put_float(out, to + p, float_at(d, line * BLOCK + p))


@CompiledLoop
def pack(weight_GRK: int, weights: int, pattern_K: int, filled: int, first_panel: int, last_panel: int) -> None:
    """Lays a stretch of panels out as `denominators` reads them (`PackedWeights`).

    It works in pattern_K, the pattern of each column, and filled[N_PATTERNS + 2]. A panel of fewer rows than three has
    one of them twice, whose sign is masked out.
    """
    packed = read_weights(weights)
    fan_in, n_chunks = packed.fan_in, packed.n_chunks
    for g in range(packed.n_groups):
        for panel in range(first_panel, last_panel):
            first = long_at(packed.panels, panel)
            n_rows, panel_of_all = long_at(packed.panels, panel + 1) - first, g * packed.n_panels + panel
            row_of_all, is_row = g * packed.n_rows + first, (1 << n_rows) - 1
            row_0 = weight_GRK + row_of_all * fan_in * vector.FLOAT_BYTES
            row_1 = row_0 + min(1, n_rows - 1) * fan_in * vector.FLOAT_BYTES
            row_2 = row_0 + (n_rows - 1) * fan_in * vector.FLOAT_BYTES
            for chunk in range(n_chunks):
                start = chunk * SUM_BLOCK
                stop = start + SUM_BLOCK if start + SUM_BLOCK < fan_in else fan_in
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
                magnitudes = packed.magnitudes_GX + (row_of_all * fan_in + start * n_rows) * vector.FLOAT_BYTES
                for k in range(start, stop):
                    q = long_at(pattern_K, k)
                    to = long_at(filled, q)
                    put_long(filled, q, to + 1)
                    put_int(places, to, k)
                    put_float(magnitudes, to * n_rows, abs(float_at(row_0, k)))
                    if n_rows == PANEL:
                        put_float(magnitudes, to * n_rows + 1, abs(float_at(row_1, k)))
                    put_float(magnitudes, to * n_rows + n_rows - 1, abs(float_at(row_2, k)))
