"""Compiled loops over weights and activations: their layout for `block_loops.py`, their range of values."""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.block_loops import SUM_BLOCK
from sipp.scoring.kernels.cpu.compiling import compiled
from sipp.scoring.kernels.cpu.vector_code import RANK


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
def pack(
    weight_GRK: np.ndarray,
    panels: np.ndarray,
    magnitudes_GX: np.ndarray,
    places_GNK: np.ndarray,
    ends_GNCQ: np.ndarray,
    stretch: tuple[int, int],
) -> None:
    """Nothing; lays a stretch of panels, of the rows from panels[n] to panels[n + 1], out as `denominators` reads them.

    In every SUM_BLOCK of columns they are sorted by the signs of the panel's weights: places[n] says which column is
    where, ends[n, c, q] where those of pattern q end, magnitudes has the panel's |w| in that order. Columns without a
    weight come last, after all ends.
    """
    n_groups, _, fan_in = weight_GRK.shape
    n_chunks, n_patterns = ends_GNCQ.shape[2:]
    pattern_K = np.empty(fan_in, np.int64)
    for g in range(n_groups):
        for panel in range(stretch[0], stretch[1]):
            first, n_rows = panels[panel], panels[panel + 1] - panels[panel]
            pattern_K[:] = 0
            for k in range(fan_in):
                is_empty = True
                for i in range(n_rows):
                    w = weight_GRK[g, first + i, k]
                    pattern_K[k] |= np.int64(w < 0.0) << i
                    is_empty &= w == 0.0
                if is_empty:
                    pattern_K[k] = n_patterns
            for chunk in range(n_chunks):
                start, stop = chunk * SUM_BLOCK, min((chunk + 1) * SUM_BLOCK, fan_in)
                filled = np.zeros(n_patterns + 2, np.int64)
                for k in range(start, stop):
                    filled[pattern_K[k] + 1] += 1
                for q in range(n_patterns):
                    filled[q + 1] += filled[q]
                    ends_GNCQ[g, panel, chunk, q] = filled[q + 1]
                for k in range(start, stop):
                    at = start + filled[pattern_K[k]]
                    filled[pattern_K[k]] += 1
                    places_GNK[g, panel, at] = k
                    for i in range(n_rows):
                        magnitudes_GX[g, first * fan_in + at * n_rows + i] = abs(weight_GRK[g, first + i, k])


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
