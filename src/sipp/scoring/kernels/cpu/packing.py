"""Compiled loops that read all weights or activations once: the layout for `block_loops.py`, the range of values."""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.host import compiled
from sipp.scoring.kernels.cpu.layout import RANK, SUM_BLOCK, PackedWeights


@compiled
def extremes(bits_BN: np.ndarray, found_BX: np.ndarray) -> None:
    """Fills found[b] with three numbers of each line of float32 bit patterns (int32).

    They are the largest as int32, the largest as uint32, and the smallest magnitude above 0 less one (uint32), so that
    0 wraps around to the largest. Integers, because NaN has an order too.
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
def pack(weight_GRK: np.ndarray, packed: PackedWeights, stretch: tuple[int, int]) -> None:
    """Lays a stretch of panels out as `denominators` reads them (`PackedWeights`)."""
    panels, magnitudes_GX, places_GNK, ends_GNCQ = packed
    n_groups, _, fan_in = weight_GRK.shape
    n_chunks, n_patterns = ends_GNCQ.shape[2:]
    pattern_K = np.empty(fan_in, np.int64)
    first_panel, last_panel = stretch
    for g in range(n_groups):
        for panel in range(first_panel, last_panel):
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
    """Sets, for a stretch of whole ranks, bit r % RANK of signs[g, k, r / RANK] where a byte is not 0."""
    n_groups, n_rows, fan_in = positive_GRK.shape
    bits_K = np.empty(fan_in, np.int16)
    first, last = stretch
    for g in range(n_groups):
        for start in range(first, last, RANK):
            bits_K[:] = 0
            for i in range(min(RANK, n_rows - start)):
                for k in range(fan_in):
                    bits_K[k] |= np.int16(positive_GRK[g, start + i, k]) << np.int16(i)
            signs_GKR[g, :, start // RANK] = bits_K
