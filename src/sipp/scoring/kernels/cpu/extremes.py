"""The range of values of each line in one reading, on threads where there is enough to read.

It decides on scales, and on which points need float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory
from sipp.native.compiling import Native, int_at, put_long
from sipp.native.threads import cut_evenly, run_parallel, threads_for
from sipp.scoring.kernels import checks, reference

_SIGN_BIT, _INFINITY_BITS = 1 << 31, 0x7F800000  # of float32


def extremes(values_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lowest up to 0, highest from 0, smallest magnitude above 0 or infinity) of each line, in one reading.

    A NaN makes the highest (or, with its sign bit set, the lowest) NaN. Other dtypes than float32 go the slow way.
    """
    checks.check_lines("extremes", values_BN, device="cpu")
    if values_BN.dtype != torch.float32 or values_BN.stride(1) != 1:
        return reference.extremes(values_BN)
    found = memory.zeros(len(values_BN), 3, dtype=torch.int64)

    stretches = cut_evenly(len(values_BN), threads_for(values_BN))

    def work(i: int) -> None:
        first, last = stretches[i]
        lines = values_BN[first:last].detach()
        step, n = lines.stride(0), lines.shape[1]
        _find(memory.strided_address(lines), last - first, step, n, memory.address(found[first:last], torch.int64))

    run_parallel(work, len(stretches))
    signed, unsigned, below = found.unbind(1)
    highest = torch.where(signed > 0, signed, 0).to(torch.int32).view(torch.float32)
    lowest = torch.where(unsigned > _SIGN_BIT, unsigned - 2 * _SIGN_BIT, 0).to(torch.int32).view(torch.float32)
    smallest = (below + 1).clamp(max=_INFINITY_BITS).to(torch.int32).view(torch.float32)
    return lowest, highest, smallest


@Native
def _find(bits_BN: int, n_lines: int, step: int, n: int, found_BX: int) -> None:
    """Fills found[b] with three numbers of each line of n float32 bit patterns (int32), lines `step` apart.

    They are the largest as int32, the largest as uint32, and the smallest magnitude above 0 less one (uint32), so that
    0 wraps around to the largest. Integers, because NaN has an order too.
    """
    for b in range(n_lines):
        highest, wrapped, smallest = np.int32(-(2**31)), np.uint32(0), np.uint32(2**32 - 1)
        for i in range(n):
            value = int_at(bits_BN, b * step + i)
            bits = np.uint32(value)
            below = np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(1))
            highest = value if value > highest else highest  # Numba compiles a function for each `max`
            wrapped = bits if bits > wrapped else wrapped
            smallest = below if below < smallest else smallest
        put_long(found_BX, 3 * b, highest)
        put_long(found_BX, 3 * b + 1, wrapped)
        put_long(found_BX, 3 * b + 2, smallest)
