"""The sums that keys of points are made of (`point_keys.py`), compiled: one reading of the numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory
from sipp.native.compiling import CompiledLoop, call_each, int_at, long_at, put_long
from sipp.native.threads import cut_evenly, threads_for


def sums_of_words(rows_CN: Tensor, factors_2N: Tensor) -> Tensor:
    """C x 2: the sums over the float32 numbers of a row, as 32-bit words, times two rows of factors, modulo 2^64."""
    rows_CN = rows_CN.contiguous()
    out = memory.blank(len(rows_CN), 2, dtype=torch.int64)
    given = memory.address(rows_CN), rows_CN.shape[1], memory.address(factors_2N, torch.int64)
    cuts = cut_evenly(len(rows_CN), threads_for(rows_CN))
    call_each(_add_words, [(*given, memory.address(out, torch.int64), *cut) for cut in cuts])
    return out


@CompiledLoop
def _add_words(rows_CN: int, n_values: int, factors_2N: int, out_C2: int, first: int, last: int) -> None:
    """Fills out[c] for a stretch of rows. A word is the bits of a number; those of -0 are those of 0."""
    for c in range(first, last):
        one, other = np.int64(0), np.int64(0)
        for k in range(n_values):
            bits = int_at(rows_CN, c * n_values + k)
            word = np.int64(bits if bits & np.int32(0x7FFFFFFF) != 0 else np.int32(0))
            one += word * long_at(factors_2N, k)
            other += word * long_at(factors_2N, n_values + k)
        put_long(out_C2, 2 * c, one)
        put_long(out_C2, 2 * c + 1, other)
