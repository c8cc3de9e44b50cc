"""The range of values of each line in one pass, on several threads if it is long enough.

It decides on scales, and on which points need float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory
from sipp.native.compiling import CompiledLoop, int_at, put_int
from sipp.native.machine_code import call_each
from sipp.native.threads import cut_evenly, threads_for
from sipp.scoring.kernels import checks, reference

_SIGN_BIT, _INFINITY_BITS = 1 << 31, 0x7F800000  # of float32


def extremes(values_BN: Tensor) -> Tensor:
    """3 x B: lowest up to 0, highest from 0, smallest magnitude above 0 or infinity of each line, in one reading.

    A NaN makes the highest (or, with its sign bit set, the lowest) NaN. Other dtypes than float32 go the slow way.
    """
    checks.check_lines("extremes", values_BN, device="cpu")
    if values_BN.dtype != torch.float32 or values_BN.stride(1) != 1:
        return reference.extremes(values_BN)
    found = memory.blank(3, len(values_BN))
    lines = memory.strided_address(values_BN), values_BN.stride(0), values_BN.shape[1]
    out = memory.address(found), len(values_BN)
    call_each(_find, [(*lines, *out, *cut) for cut in cut_evenly(len(values_BN), threads_for(values_BN))])
    return found


@CompiledLoop
def _find(bits_BN: int, step: int, n: int, found_XB: int, n_lines: int, first: int, last: int) -> None:
    """Fills found[:, b] with three float32 bit patterns of each line of n such patterns (int32), lines `step` apart.

    They are found as the largest int32, the largest uint32, and the smallest magnitude above 0 less one (uint32), so
    that 0 wraps around to the largest. Integers, because NaN has an order too.
    """
    for b in range(first, last):
        highest, wrapped, smallest = np.int32(-(2**31)), np.uint32(0), np.uint32(2**32 - 1)
        for i in range(n):
            value = int_at(bits_BN, b * step + i)
            bits = np.uint32(value)
            below = np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(1))
            highest = value if value > highest else highest  # Numba compiles a function for each `max`
            wrapped = bits if bits > wrapped else wrapped
            smallest = below if below < smallest else smallest
        put_int(found_XB, b, np.int32(wrapped) if wrapped > np.uint32(_SIGN_BIT) else np.int32(0))
        put_int(found_XB, n_lines + b, highest if highest > 0 else np.int32(0))
        put_int(found_XB, 2 * n_lines + b, min(np.int64(smallest) + 1, np.int64(_INFINITY_BITS)))
