"""Compiled loops that read all weights or activations once: the layout for `block_loops.py`, the range of values."""

from __future__ import annotations

import numpy as np

from sipp.scoring.kernels.cpu.host import Native
from sipp.scoring.kernels.cpu.layout import PANEL, RANK, SUM_BLOCK, PackedWeights
from sipp.scoring.kernels.cpu.llvm import (
    byte_at,
    float_at,
    int_at,
    long_at,
    put_float,
    put_int,
    put_long,
    put_short,
    reading,
    short_at,
)

N_PATTERNS = 2**PANEL
_weights_at = reading(PackedWeights)


@Native
def extremes(bits_BN: int, n_lines: int, step: int, n: int, found_BX: int) -> None:
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


@Native
def pack(weight_GRK: int, weights: int, pattern_K: int, filled: int, first_panel: int, last_panel: int) -> None:
    """Lays a stretch of panels out as `denominators` reads them (`PackedWeights`).

    It works in pattern_K, the pattern of each column, and filled[N_PATTERNS + 2].
    """
    packed = _weights_at(weights)
    fan_in, n_chunks = packed.fan_in, packed.n_chunks
    for g in range(packed.n_groups):
        group, magnitudes = g * packed.n_rows, g * packed.n_rows * fan_in
        for panel in range(first_panel, last_panel):
            first = long_at(packed.panels, panel)
            n_rows, panel_of_all = long_at(packed.panels, panel + 1) - first, g * packed.n_panels + panel
            for k in range(fan_in):
                pattern, is_empty = 0, True
                for i in range(n_rows):
                    w = float_at(weight_GRK, (group + first + i) * fan_in + k)
                    pattern |= 1 << i if w < 0.0 else 0
                    is_empty &= w == 0.0
                put_long(pattern_K, k, N_PATTERNS if is_empty else pattern)
            for chunk in range(n_chunks):
                start = chunk * SUM_BLOCK
                stop = start + SUM_BLOCK if start + SUM_BLOCK < fan_in else fan_in
                for q in range(N_PATTERNS + 2):
                    put_long(filled, q, 0)
                for k in range(start, stop):
                    q = long_at(pattern_K, k) + 1
                    put_long(filled, q, long_at(filled, q) + 1)
                for q in range(N_PATTERNS):
                    end = long_at(filled, q) + long_at(filled, q + 1)
                    put_long(filled, q + 1, end)
                    put_int(packed.ends_GNCQ, (panel_of_all * n_chunks + chunk) * N_PATTERNS + q, end)
                for k in range(start, stop):
                    q = long_at(pattern_K, k)
                    at = start + long_at(filled, q)
                    put_long(filled, q, at - start + 1)
                    put_int(packed.places_GNK, panel_of_all * fan_in + at, k)
                    for i in range(n_rows):
                        w = abs(float_at(weight_GRK, (group + first + i) * fan_in + k))
                        put_float(packed.magnitudes_GX, magnitudes + first * fan_in + at * n_rows + i, w)


@Native
def pack_signs(
    positive_GRK: int, n_groups: int, n_rows: int, fan_in: int, signs_GKR: int, first: int, last: int
) -> None:
    """Sets, for a stretch of whole ranks, bit r % RANK of signs[g, k, r / RANK] where a byte is not 0."""
    n_ranks = -(-n_rows // RANK)
    for g in range(n_groups):
        for start in range(first, last, RANK):
            at = g * fan_in * n_ranks + start // RANK
            for k in range(fan_in):
                put_short(signs_GKR, at + k * n_ranks, 0)
            for i in range(RANK if n_rows - start > RANK else n_rows - start):
                row = (g * n_rows + start + i) * fan_in
                for k in range(fan_in):
                    bit = np.int16(byte_at(positive_GRK, row + k)) << np.int16(i)
                    put_short(signs_GKR, at + k * n_ranks, short_at(signs_GKR, at + k * n_ranks) | bit)
