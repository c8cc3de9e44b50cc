"""Compiled loops over weights and activations as they come: their layout for `simd.py`, their range of values."""

from __future__ import annotations

import numpy as np

from sipp.kernels.compiling import compiled
from sipp.kernels.simd import panel_lines
from sipp.kernels.vectors import RANK


@compiled
def extremes(bits_BN: np.ndarray, found_BX: np.ndarray) -> None:
    """Nothing; for each line of float32 bit patterns (int32): largest as int32, largest as uint32, and the smallest
    magnitude above 0 less one (uint32), so that 0 wraps around to the largest. Integers, because NaN has an order too.
    """
    for b in range(len(bits_BN)):
        line = bits_BN[b]
        highest, wrapped, smallest = np.int32(-(2**31)), np.uint32(0), np.uint32(2**32 - 1)
        for i in range(len(line)):
            bits = np.uint32(line[i])
            highest = max(highest, line[i])
            wrapped = max(wrapped, bits)
            smallest = min(smallest, np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(1)))
        found_BX[b, 0], found_BX[b, 1], found_BX[b, 2] = highest, wrapped, smallest


@compiled
def pack(weight_GRK: np.ndarray, panels_GX: np.ndarray, stretch: tuple[int, int]) -> None:
    """Nothing; lays a stretch of rows out as `denominators` reads them."""
    n_groups, n_rows, fan_in = weight_GRK.shape
    for g in range(n_groups):
        panel = 0
        for r in range(stretch[0], stretch[1]):
            line = 2 * r
            n_lines = panel_lines(panel, 2 * n_rows)
            while line >= panel + n_lines:
                panel += n_lines
                n_lines = panel_lines(panel, 2 * n_rows)
            at = panel * fan_in + line - panel
            for k in range(fan_in):
                w = weight_GRK[g, r, k]
                panels_GX[g, at + k * n_lines] = max(w, np.float32(0.0))
                panels_GX[g, at + k * n_lines + 1] = max(-w, np.float32(0.0))


@compiled
def pack_signs(positive_GRK: np.ndarray, signs_GKR: np.ndarray, stretch: tuple[int, int]) -> None:
    """Nothing; for a stretch of whole ranks, sets bit r % RANK of signs[g, k, r / RANK] where a byte is not 0."""
    n_groups, n_rows, fan_in = positive_GRK.shape
    bits_K = np.empty(fan_in, np.int16)
    for g in range(n_groups):
        for start in range(stretch[0], stretch[1], RANK):
            bits_K[:] = 0
            for i in range(min(RANK, n_rows - start)):
                for k in range(fan_in):
                    bits_K[k] |= np.int16(positive_GRK[g, start + i, k]) << np.int16(i)
            signs_GKR[g, :, start // RANK] = bits_K
