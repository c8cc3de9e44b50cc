"""The range of values of each line in one reading, on threads where there is enough to read."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sipp.scoring.kernels import boundary, reference
from sipp.scoring.kernels.cpu import packing
from sipp.scoring.kernels.cpu.host import run_parallel

SHARED_VALUES = 2**17  # fewer than this many are read sooner than a second thread is there

_SIGN_BIT, _INFINITY_BITS = 1 << 31, 0x7F800000  # of float32


def extremes(values_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lowest up to 0, highest from 0, smallest magnitude above 0 or infinity) of each line, in one reading.

    A NaN makes the highest (or, with its sign bit set, the lowest) NaN. Other dtypes than float32 go the slow way.
    """
    boundary.check_lines("extremes", values_BN, device="cpu")
    if values_BN.dtype != torch.float32 or values_BN.stride(1) != 1:
        return reference.extremes(values_BN)
    found = boundary.zeros(len(values_BN), 3, dtype=torch.int64)

    stretches = cuts_of(len(values_BN), n_threads(values_BN))

    def work(i: int) -> None:
        first, last = stretches[i]
        lines = values_BN[first:last].detach()
        step, n = lines.stride(0), lines.shape[1]
        packing.extremes(lines.data_ptr(), last - first, step, n, boundary.address(found[first:last], torch.int64))

    run_parallel(work, len(stretches))
    signed, unsigned, below = found.unbind(1)
    highest = torch.where(signed > 0, signed, 0).to(torch.int32).view(torch.float32)
    lowest = torch.where(unsigned > _SIGN_BIT, unsigned - 2 * _SIGN_BIT, 0).to(torch.int32).view(torch.float32)
    smallest = (below + 1).clamp(max=_INFINITY_BITS).to(torch.int32).view(torch.float32)
    return lowest, highest, smallest


def n_threads(values: Tensor) -> int:
    """How many threads read through these values once."""
    return torch.get_num_threads() if values.numel() >= SHARED_VALUES else 1


def cuts_of(n: int, n_parts: int) -> list[tuple[int, int]]:
    """0..n cut into at most n_parts stretches of nearly the same length."""
    cuts = [n * i // n_parts for i in range(n_parts + 1)]
    return [(first, last) for first, last in pairwise(cuts) if last > first] or [(0, 0)]
