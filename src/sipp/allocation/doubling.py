"""Vector code for the hottest loop of the curves: N doubled for a row, N_SUMS weights at a time.

The same operations in the same order as the loop in `curves.py`, which does what is left of a row, and all of it where
no vector code is written for the processor. Sums in memory kept that loop at half of this speed.
"""

from __future__ import annotations

from typing import Any

from sipp.allocation.row_loops import N_SUMS, compiled_rows
from sipp.native.compiling import DOUBLE, INT, primitive
from sipp.native.instructions import F64, I64, at, constant, each, fused, load, splat, store, variables, vector
from sipp.native.processor import HAS_VECTOR_CODE

NOTHING = 1e-200  # less than this is left of a weight: 0, before it is a subnormal number, which is slow
_WIDTH, _BYTES = 8, 8  # numbers of a vector, bytes of a number
_vector = vector(_WIDTH, F64)


def _all(value: float) -> Any:
    return constant(value, _WIDTH, F64)


@primitive(INT, INT, DOUBLE, *[INT] * 4)
def _double_blocks(b: Any, n: Any, n_draws: Any, rates: Any, hits: Any, lefts: Any, sums: Any) -> Any:
    """How many of n weights it took, in whole N_SUMS: hits and lefts are doubled, sums[3, N_SUMS] hold their terms."""
    whole = b.mul(b.udiv(n, I64(N_SUMS)), I64(N_SUMS))
    cells = [variables(b, [_all(0.0)] * (N_SUMS // _WIDTH)) for _ in range(3)]
    draws = splat(b, n_draws, _WIDTH)
    with each(b, 0, whole, N_SUMS) as first:
        for v, (kept, gain, curvature) in enumerate(zip(*cells)):
            i = b.add(first, I64(v * _WIDTH))
            hit_at, left_at = at(b, hits, i, _BYTES), at(b, lefts, i, _BYTES)
            hit, left = load(b, hit_at, _vector), load(b, left_at, _vector)
            hit = b.fmul(hit, b.fsub(_all(2.0), hit))
            square = b.fmul(left, left)
            square = b.select(b.fcmp_ordered(">", square, _all(NOTHING)), square, _all(0.0))
            left = b.select(b.fcmp_ordered("<", hit, _all(0.5)), b.fsub(_all(1.0), hit), square)
            store(b, hit, hit_at)
            store(b, left, left_at)
            y = b.fmul(load(b, at(b, rates, i, _BYTES), _vector), draws)
            falling = b.fmul(y, left)
            b.store(b.fadd(b.load(kept), hit), kept)
            b.store(b.fadd(b.load(gain), falling), gain)
            b.store(fused(b, falling, y, b.load(curvature)), curvature)
    for i, cell in enumerate(cell for line in cells for cell in line):
        store(b, b.load(cell), sums, i * _WIDTH * _BYTES)
    return whole


@compiled_rows
def _no_blocks(n: int, n_draws: float, rates: int, hits: int, lefts: int, sums: int) -> int:
    """0 weights: the loop of `curves.py` does all of them."""
    return 0


double_blocks: Any = _double_blocks if HAS_VECTOR_CODE else _no_blocks
