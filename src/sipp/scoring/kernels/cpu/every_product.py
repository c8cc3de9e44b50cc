"""The maxima where rows and columns are few: every product, patches side by side.

There, finding out what can be left out (`maxima.py`) costs more than it spares. Reciprocals take the place of their
denominators and no product is tested: each weight has LANES maxima, one for each lane of a vector, joined when all
patches are through. They have to fit the first cache.
"""

from __future__ import annotations

from typing import Any

from sipp.native import INT, VOID, CompiledLoop, primitive, processor, vector
from sipp.scoring.kernels.cpu.blocks import reciprocal
from sipp.scoring.kernels.cpu.layout import LINE, ROW_TILE, SIGN_BYTES, VECTOR, read_scratch


@primitive(VOID, INT)
def invert_line(b: Any, line: Any) -> None:
    """line[p] = 1 / line[p]."""
    for offset in range(0, LINE, VECTOR):
        vector.store(b, reciprocal(b, vector.load(b, line, vector.of(processor.LANES), offset)), line, offset)


def _line_and_bits(b: Any, line: Any, signs: Any) -> tuple[list[Any], Any]:
    vectors = [vector.load(b, line, vector.of(processor.LANES), offset) for offset in range(0, LINE, VECTOR)]
    return vectors, b.zext(vector.load(b, signs, vector.I16), vector.I64)


def _raise_row(b: Any, vectors: list[Any], row: Any, bits: Any, d: Any, best: Any) -> None:
    positive = vector.address_of(b, d, row, 2 * LINE)
    line = b.select(b.trunc(b.lshr(bits, row), vector.I1), positive, b.add(positive, vector.I64(LINE)))
    out = vector.address_of(b, best, row, processor.LANES * vector.FLOAT_BYTES)
    products = [b.fmul(x, vector.load(b, line, vector.of(processor.LANES), i * VECTOR)) for i, x in enumerate(vectors)]
    vector.store(b, vector.tree(b, vector.maximum, [*products, vector.load(b, out, vector.of(processor.LANES))]), out)


@primitive(VOID, *[INT] * 5)
def raise_rows(b: Any, n_rows: Any, line: Any, d: Any, best: Any, signs: Any) -> None:
    """best[r, lane] = the largest of best[r, lane] and of line[p] * d[2 r + s, p] over the lane's patches p.

    For up to ROW_TILE rows; s is the sign of the weight of row r, bit r of what lies at `signs`.
    """
    vectors, bits = _line_and_bits(b, line, signs)
    with vector.each(b, 0, n_rows) as row:
        _raise_row(b, vectors, row, bits, d, best)


@primitive(VOID, *[INT] * 4)
def raise_rank(b: Any, line: Any, d: Any, best: Any, signs: Any) -> None:
    """The same for ROW_TILE rows, without a loop."""
    vectors, bits = _line_and_bits(b, line, signs)
    for row in map(vector.I64, range(ROW_TILE)):
        _raise_row(b, vectors, row, bits, d, best)


@CompiledLoop
def raise_by_all(scratch_at: int, signs: int, n_rows: int, fan_in: int, best: int) -> None:
    """Raises best[k, r * LANES + lane] to the largest product of the lane."""
    scratch = read_scratch(scratch_at)
    a, d = scratch.a_KP, scratch.d_LP
    n_tiles = -(-n_rows // ROW_TILE)
    for line in range(2 * n_rows):
        invert_line(d + line * LINE)
    for k in range(fan_in):
        line, column, column_signs = (
            a + k * LINE,
            best + k * n_rows * processor.LANES * vector.FLOAT_BYTES,
            signs + k * n_tiles * SIGN_BYTES,
        )
        for first in range(0, n_rows, ROW_TILE):
            lines, maxima = d + first * 2 * LINE, column + first * processor.LANES * vector.FLOAT_BYTES
            bits = column_signs + first // ROW_TILE * SIGN_BYTES
            if n_rows - first >= ROW_TILE:
                raise_rank(line, lines, maxima, bits)
            else:
                raise_rows(n_rows - first, line, lines, maxima, bits)
