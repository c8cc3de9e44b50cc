"""Vector code for the means over a point's patches (T3): sums of products for a few columns at once, rows side by side.

Both signs of the reciprocals are summed, and each weight takes the sum of its own: to choose among them patch by patch
would cost as much.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from sipp.scoring.kernels.cpu.layout import FLOAT, LINE, MEAN_COLUMNS, PATCH_BYTES, RANK, RANK_VECTOR
from sipp.scoring.kernels.cpu.llvm import F32, I64, fused, larger, load, primitive, splat, store
from sipp.scoring.kernels.cpu.skip_code import sign_flags

_rank = ir.VectorType(F32, RANK)
_ZERO = ir.Constant(_rank, [0.0] * RANK)


def _mean(n_columns: int, is_whole: bool) -> Any:
    """A function: takes the sums over n patches p of line[k, p] * rows[p, s] into out[k], s the sign of the weight.

    Of a whole point: out[k] = max(out[k], sum * share). Of a part: out[k] += sum, and `share` is not used.
    """

    @primitive(types.none, *[types.int64] * 7, types.float32)
    def mean(
        b: Any, n: Any, line: Any, rows: Any, signs: Any, signs_step: Any, out: Any, out_step: Any, share: Any
    ) -> None:
        sums = [[cgutils.alloca_once(b, _rank) for _ in range(2)] for _ in range(n_columns)]
        for cell in (cell for pair in sums for cell in pair):
            b.store(_ZERO, cell)
        with cgutils.for_range(b, n) as patch:
            at = b.add(rows, b.mul(patch.index, I64(PATCH_BYTES)))
            inverse = [load(b, at, s * RANK_VECTOR, _rank) for s in range(2)]
            value_at = b.add(line, b.mul(patch.index, I64(FLOAT)))
            for k, pair in enumerate(sums):
                value = splat(b, load(b, value_at, k * LINE, F32), _rank)
                for cell, vector in zip(pair, inverse):
                    b.store(fused(b, value, vector, b.load(cell)), cell)
        for k, (positive, negative) in enumerate(sums):
            is_positive = sign_flags(b, b.add(signs, b.mul(signs_step, I64(k))))
            total = b.select(is_positive, b.load(positive), b.load(negative))
            to = b.add(out, b.mul(out_step, I64(k)))
            if is_whole:
                store(b, larger(b, b.fmul(total, splat(b, share, _rank)), load(b, to, 0, _rank)), to)
            else:
                store(b, b.fadd(total, load(b, to, 0, _rank)), to)

    return mean


mean_columns, mean_column = _mean(MEAN_COLUMNS, True), _mean(1, True)
sum_columns, sum_column = _mean(MEAN_COLUMNS, False), _mean(1, False)
