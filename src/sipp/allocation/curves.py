"""Tabulates each row's curve: the weights U(N) that N draws keep and the error bound they give (T7, T10).

A row that is sampled N times keeps U(N) weights and has the bound eps_rand(N). Both are known functions of N, so no
inverse is needed. The table holds U and two derivatives in log N at knots a third of an octave apart; a polynomial of
degree 5 through two knots interpolates U with a relative error of at most 4e-8 (for a row of equal sensitivities). The
table does not depend on the budget, and the solver reads it instead of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sipp.allocation.rows import (
    KNOTS_PER_OCTAVE,
    LARGEST_SHARE,
    N_SUMS,
    add_up,
    as_array,
    compiled_rows,
    decay,
    fill_rates,
    joined,
    log_slope,
    over_rows,
)
from sipp.native.compiling import product_and_sum
from sipp.results.numerics import BOUND_DTYPE

# A row's curve ends where it lacks less than _LACK weights: the rest is never on the convex envelope. With
# y_j = -N log(1 - q_j), the tangent through the cap touches the curve where the mean of y_j under the weights e^-y_j is
# in [1/2, 1]; there the lack, sum_j e^-y_j, is >= e^-1.
_LACK = 0.25
_OCTAVES = 128  # no curve is followed further
_NOTHING = 1e-200  # smaller probabilities count as 0, before they become subnormal numbers, which are slow


@dataclass(frozen=True)
class Curves:
    """Every row's curve. Row r has the knots `first_R[r]` .. `first_R[r] + count_R[r] - 1` of the flat arrays.

    Its first knot is at N = 2^start_R[r], and U is below 1 there, so that all rows can afford it with one weight each.
    """

    cap_R: np.ndarray  # weights of positive sensitivity: there the row is kept whole and costs nothing
    scale_R: np.ndarray  # S~ of T6
    start_R: np.ndarray
    first_R: np.ndarray
    count_R: np.ndarray
    kept_C: np.ndarray  # U
    gain_C: np.ndarray  # dU / d log N
    curvature_C: np.ndarray  # dU / d log N - d2U / d(log N)^2
    slope_C: np.ndarray  # logarithm of the multiplier for which the knot is stationary


def tabulate(
    sensitivities: Sequence[Tensor], competes: Sequence[Tensor], scale_R: Tensor, *, n_halvings: int
) -> Curves:
    """The curves of the rows that compete (a bool of each row of each layer); they start 2^n_halvings times earlier."""
    layers = [as_array(layer) for layer in sensitivities]
    rows = [as_array(mask.nonzero()[:, 0]) for mask in competes]
    edges = np.cumsum([0, *map(len, rows)])
    n_rows = int(edges[-1])
    cap_R, start_R, room_R = np.empty(n_rows), np.empty(n_rows, dtype=np.int64), np.empty(n_rows, dtype=np.int64)
    for i, (layer, index) in enumerate(zip(layers, rows)):
        part = slice(edges[i], edges[i + 1])
        _extent(layer, index, n_halvings, cap_R[part], start_R[part], room_R[part])
    first_R = np.cumsum(room_R) - room_R
    flat = [np.empty(int(room_R.sum())) for _ in range(4)]
    curves = Curves(cap_R, _array(scale_R), start_R, first_R, np.empty_like(room_R), *flat)
    per_row = (curves.scale_R, cap_R, start_R, first_R, room_R, curves.count_R)

    def work(i: int, first: int, end: int, scratch: np.ndarray) -> None:
        part = slice(edges[i] + first, edges[i] + end)
        _trace(layers[i], rows[i][first:end], *(array[part] for array in per_row), *flat, scratch)

    over_rows(work, [(len(index), layer.shape[1]) for index, layer in zip(rows, layers)], n_scratch=3)
    return curves


def _array(values_R: Tensor) -> np.ndarray:
    return as_array(values_R.to(BOUND_DTYPE))


@compiled_rows
def _extent(
    layer_FK: np.ndarray, index: np.ndarray, n_halvings: int, cap: np.ndarray, start: np.ndarray, room: np.ndarray
) -> None:
    """Where the curves start, and the most knots they may need."""
    for i in range(index.shape[0]):
        row = layer_FK[index[i]]
        total, n_positive = add_up(row)
        least, most = math.inf, 0.0
        for j in range(row.shape[0]):
            most = max(most, np.float64(row[j]))
            if row[j] > 0:
                least = min(least, np.float64(row[j]))
        # U(N) <= N sum_j -log(1 - q_j), and -log(1 - q) / q grows with q: at most that of the largest for each.
        most = min(most / total, LARGEST_SHARE)
        begin = -math.ceil(math.log2(-2.0 * math.log1p(-most) / most)) - n_halvings
        # cap e^(-N q) bounds the lack, q the least share
        last = math.log2(math.log(n_positive / _LACK)) - math.log2(least / total)
        n_octaves = min(max(math.ceil(last) - begin, 1), _OCTAVES) if last < 2.0 * _OCTAVES else _OCTAVES
        cap[i], start[i], room[i] = n_positive, begin, n_octaves * KNOTS_PER_OCTAVE + 1


@compiled_rows
def _trace(
    layer_FK: np.ndarray,
    index: np.ndarray,
    scale: np.ndarray,
    cap: np.ndarray,
    start: np.ndarray,
    first: np.ndarray,
    room: np.ndarray,
    count: np.ndarray,
    kept_C: np.ndarray,
    gain_C: np.ndarray,
    curvature_C: np.ndarray,
    slope_C: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Fills in the knots of some rows. For each offset within an octave, N starts at the first knot and doubles.

    What is hit, h = 1 - (1 - q)^N, becomes h (2 - h), and what is left, 1 - h, its square: no exponential.
    """
    rates, hit, left = scratch[0], scratch[1], scratch[2]
    for i in range(index.shape[0]):
        row = layer_FK[index[i]]
        fill_rates(row, add_up(row)[0], rates)
        needed = room[i]
        for phase in range(KNOTS_PER_OCTAVE):
            n_draws = 2.0 ** (start[i] - 1 + phase / KNOTS_PER_OCTAVE)
            for j in range(row.shape[0]):
                hit[j], left[j] = decay(rates[j] * n_draws)
            for knot in range(phase, needed, KNOTS_PER_OCTAVE):
                n_draws *= 2.0
                at = first[i] + knot
                kept_C[at], gain_C[at], curvature_C[at] = _double(rates, n_draws, hit, left)
                if cap[i] - kept_C[at] < _LACK:
                    needed = min(needed, knot + 1)
        count[i] = needed
        for knot in range(needed):
            at = first[i] + knot
            share = scale[i] / 2.0 ** (start[i] + knot / KNOTS_PER_OCTAVE)
            slope_C[at] = log_slope(share, gain_C[at])


@compiled_rows
def _double(rates_K: np.ndarray, n_draws: float, hit_K: np.ndarray, left_K: np.ndarray) -> tuple[float, float, float]:
    """U, its derivative and its curvature after N draws. Updates `hit_K` and `left_K` in place, from N/2 draws to N."""
    sums = np.zeros(3 * N_SUMS)  # one piece of memory: a vectoriser has less to tell apart
    kept, gain, curvature = sums[:N_SUMS], sums[N_SUMS : 2 * N_SUMS], sums[2 * N_SUMS :]
    for start in range(0, rates_K.shape[0], N_SUMS):
        stop = start + N_SUMS
        rates, hits, lefts = rates_K[start:stop], hit_K[start:stop], left_K[start:stop]
        for i in range(rates.shape[0]):
            hit = hits[i] * (2.0 - hits[i])
            # 1 - hit has no digits where next to nothing is left, and squares lose one with each doubling where much is
            rest, square = 1.0 - hit, lefts[i] * lefts[i]
            square = square if square > _NOTHING else 0.0
            left = rest if hit < 0.5 else square
            y = rates[i] * n_draws
            hits[i], lefts[i] = hit, left
            falling = y * left
            kept[i] += hit
            gain[i] += falling
            curvature[i] = product_and_sum(falling, y, curvature[i])
    return joined(kept), joined(gain), joined(curvature)
