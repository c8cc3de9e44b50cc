"""Vector code for the maxima where rows and columns are few: every product, patches side by side.

There, finding out what can be left out (`bands.py`) costs more than it spares. Nothing is laid out anew and nothing is
tested: each weight has LANES maxima, one for each lane of a vector, joined when all patches are through. They have to
fit the first cache.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from sipp.kernels.vectors import FLOAT, I1, I64, LANES, LINE, RANK, VECTOR, larger, load, primitive, store, tree

MOST_WEIGHTS = 512  # of a group, rows times fan-in: their maxima take 32 KiB

_bits = ir.IntType(RANK)


@primitive(types.none, *[types.int64] * 5)
def raise_lanes(b: Any, n_rows: Any, line: Any, d: Any, best: Any, signs: Any) -> None:
    """best[r, lane] = the largest of best[r, lane] and of line[p] * d[2 r + s, p] over the lane's patches p.

    For up to RANK rows; s is the sign of the weight of row r, bit r of what lies at `signs`.
    """
    vectors = [load(b, line, offset) for offset in range(0, LINE, VECTOR)]
    cell = cgutils.alloca_once(b, _bits)
    b.store(b.load(b.inttoptr(signs, _bits.as_pointer()), align=RANK // 8, typ=_bits), cell)
    with cgutils.for_range(b, n_rows) as row:
        bits = b.load(cell)
        b.store(b.lshr(bits, _bits(1)), cell)
        at = b.add(d, b.mul(row.index, I64(2 * LINE)))
        at = b.select(b.trunc(bits, I1), at, b.add(at, I64(LINE)))
        out = b.add(best, b.mul(row.index, I64(LANES * FLOAT)))
        products = [b.fmul(x, load(b, at, i * VECTOR)) for i, x in enumerate(vectors)]
        store(b, tree(b, larger, [*products, load(b, out)]), out)
