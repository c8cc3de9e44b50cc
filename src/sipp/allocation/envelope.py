"""Solves the relaxed OptAlloc for tabulated rows and a budget, with one Lagrange multiplier (T10).

The bound eps_rand(N(m)) of a row is convex in m at first but falls to 0 at the cap (all its weights of positive
sensitivity) with infinite slope, so it is replaced by its lower convex envelope. For a given multiplier each row takes
the minimum of eps_rand + multiplier * kept, on its curve or at its cap. The larger the multiplier, the less the rows
keep.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sipp.allocation.curves import Curves
from sipp.allocation.rows import KNOTS_PER_OCTAVE, SPACING, compiled_rows, eps_rand, log_slope, row_part

_GAP = 1e-9  # relative duality gap at which the search stops
_LEAST_STEP, _LARGEST_STEP = 1e-6, 1.0  # of the logarithm of the multiplier, while one side is not known
_LEAST_RISE = 1e-100  # keeps Newton's step finite where all rows are at their caps
_LARGEST_LOG = 700.0  # beyond it exp leaves the range of float64
_NEWTON_STEPS = 8
_NEWTON_TOLERANCE = 1e-4  # of the distance between two knots; the error after a step is of the order of its square
_FLATTEST_BEND = -0.01  # on a convex branch the bend runs from -2 to 0; near 0 Newton's step would run away


class _Response(NamedTuple):
    """What the rows keep, and their bounds, at one multiplier."""

    log_multiplier: float
    kept_R: np.ndarray
    cost_R: np.ndarray
    total: float  # sum of kept_R
    cost: float  # sum of cost_R
    rise: float  # derivative of the total in the logarithm of the multiplier, where no row jumps


class Optimum(NamedTuple):
    """The relaxed optimum of T10: how much each row keeps, not yet in whole numbers."""

    kept_R: Tensor  # float64
    objective: float  # sum of bounds on the convex envelope: a lower bound for whole numbers
    multiplier: float  # of Lagrange
    is_inside: bool = True  # no row is at its first knot, where it might want to keep less


def optimum(curves: Curves, budget: int) -> Optimum:
    """The relaxed optimum for a budget between the sum of what the first knots keep and the sum of caps."""
    many, few = _search(curves, budget)
    # From the closer of the two, rows move towards the other until the budget is met, one after the other.
    near, far = (many, few) if many.total - budget < budget - few.total else (few, many)
    near_R, near_cost_R, far_R, far_cost_R = map(torch.from_numpy, (*near[1:3], *far[1:3]))
    sign = 1.0 if near is few else -1.0
    room_R = (sign * (far_R - near_R)).clamp(min=0.0)
    moved_R = fill_in_order(sign * (budget - near.total), room_R)
    share_R = torch.where(room_R > 0, moved_R / room_R, 0.0)
    kept_R = near_R + sign * moved_R
    cost_R = near_cost_R + share_R * (far_cost_R - near_cost_R)
    kept_R = kept_R * min(1.0, budget / _total(kept_R))
    kept_R = kept_R + fill_in_order(budget - _total(kept_R), torch.from_numpy(curves.cap_R) - kept_R)  # rounding noise
    is_inside = bool((near.kept_R > curves.kept_C[curves.first_R]).all())
    return Optimum(kept_R, _total(cost_R), math.exp(near.log_multiplier), is_inside)


def _total(values_R: Tensor) -> float:
    """The sum, by one thread: the same bits for any number of threads."""
    return float(values_R.numpy().sum())


def fill_in_order(amount: float, room: Tensor) -> Tensor:
    """Distributes the amount: the first takes as much as it has room for, then the second, and so on."""
    return torch.minimum((amount - (room.cumsum(0) - room)).clamp(min=0), room)


def _search(curves: Curves, budget: int) -> tuple[_Response, _Response]:
    """Brackets the multiplier: at the first response the rows keep the budget or more, at the second no more.

    The minimum lies between them. Each weight moved from one response towards the other changes the cost by at least
    the smaller and at most the larger multiplier, so the objective is off by at most their difference times the number
    of weights to move.

    Newton's method is used while the residual shrinks. The number kept jumps where a row leaves its curve for its cap;
    then the multiplier at which both responses are equally good is tried, and bisection if that does not help either.
    """
    low = high = None
    trial, stretch, residual, width = _guess(curves, budget), 0.5, math.inf, math.inf
    while True:
        here = _respond(curves, trial)
        if here.total > budget:
            low = here
        else:
            high = here
        before, residual = residual, abs(here.total - budget)
        step = (budget - here.total) / min(here.rise, -_LEAST_RISE)
        if low is None or high is None:
            if abs(trial) == _LARGEST_LOG:  # no multiplier in the range of float64 does it: one response has to do
                return here, here
            stretch *= 2.0  # beyond Newton's step from the second one on: a jump may lie just ahead
            size = min(max(abs(step), _LEAST_STEP), _LARGEST_STEP) * stretch
            trial = min(max(trial + math.copysign(size, step), -_LARGEST_LOG), _LARGEST_LOG)
            continue
        ends = low.log_multiplier, high.log_multiplier
        gap = (math.exp(ends[1]) - math.exp(ends[0])) * min(low.total - budget, budget - high.total)
        least = max(end.cost + math.exp(end.log_multiplier) * (end.total - budget) for end in (low, high))
        middle = 0.5 * (ends[0] + ends[1])
        if gap <= _GAP * least or not ends[0] < middle < ends[1]:
            return low, high
        halved, width = ends[1] - ends[0] <= 0.5 * width, ends[1] - ends[0]
        if residual < 0.25 * before:
            trial += step
        elif halved and high.cost > low.cost:
            trial = math.log((high.cost - low.cost) / (low.total - high.total))
        else:
            trial = middle
        if not ends[0] < trial < ends[1]:
            trial = middle


def _guess(curves: Curves, budget: int) -> float:
    """A first guess: the median log multiplier of rows that keep their share of the budget."""
    share = budget / curves.cap_R.sum()
    slopes = np.empty_like(curves.cap_R)
    _slopes_at(curves.cap_R * share, curves.first_R, curves.count_R, curves.kept_C, curves.slope_C, slopes)
    return float(np.clip(np.median(slopes), -_LARGEST_LOG, _LARGEST_LOG))


@compiled_rows
def _slopes_at(
    kept_R: np.ndarray,
    first_R: np.ndarray,
    count_R: np.ndarray,
    kept_C: np.ndarray,
    slope_C: np.ndarray,
    slopes_R: np.ndarray,
) -> None:
    """Fills in the slope of each row at the last knot that keeps no more than this."""
    for r in range(kept_R.shape[0]):
        low, high = first_R[r], first_R[r] + count_R[r]  # the first knot that keeps more is one of low .. high
        while low < high:
            middle = (low + high) // 2
            if kept_C[middle] <= kept_R[r]:
                low = middle + 1
            else:
                high = middle
        slopes_R[r] = slope_C[low - 1 if low > first_R[r] else low]


def _respond(curves: Curves, log_multiplier: float) -> _Response:
    kept_R, cost_R = np.empty_like(curves.cap_R), np.empty_like(curves.cap_R)
    per_row = (curves.cap_R, curves.scale_R, curves.start_R, curves.first_R, curves.count_R)
    per_knot = (curves.kept_C, curves.gain_C, curves.curvature_C, curves.slope_C)
    sums = _best_points(*per_row, *per_knot, log_multiplier, kept_R, cost_R)
    return _Response(log_multiplier, kept_R, cost_R, *sums)


@compiled_rows
def _best_points(
    cap_R: np.ndarray,
    scale_R: np.ndarray,
    start_R: np.ndarray,
    first_R: np.ndarray,
    count_R: np.ndarray,
    kept_C: np.ndarray,
    gain_C: np.ndarray,
    curvature_C: np.ndarray,
    slope_C: np.ndarray,
    log_multiplier: float,
    kept_R: np.ndarray,
    cost_R: np.ndarray,
) -> tuple[float, float, float]:
    """Fills in what each row keeps and costs; returns both sums, and the derivative of the first.

    A row's candidates are its cap, its first knot where the value rises from there on, and a point between each two
    knots where the value falls at the first and rises at the second.
    """
    multiplier = math.exp(log_multiplier)
    total, total_cost, total_rise = 0.0, 0.0, 0.0
    for r in range(cap_R.shape[0]):
        best_kept, best_cost, best_rise = cap_R[r], 0.0, 0.0
        first, end = first_R[r], first_R[r] + count_R[r]
        if slope_C[first] <= log_multiplier:
            cost = eps_rand(scale_R[r] / 2.0 ** start_R[r])
            if cost + multiplier * kept_C[first] < best_cost + multiplier * best_kept:
                best_kept, best_cost, best_rise = kept_C[first], cost, 0.0
        for c in range(first, end - 1):
            if slope_C[c] > log_multiplier >= slope_C[c + 1]:
                log_draws = (start_R[r] * KNOTS_PER_OCTAVE + c - first) * SPACING
                t = (slope_C[c] - log_multiplier) / (slope_C[c] - slope_C[c + 1])
                kept, cost, rise = _stationary(kept_C, gain_C, curvature_C, c, log_draws, scale_R[r], log_multiplier, t)
                if cost + multiplier * kept < best_cost + multiplier * best_kept:
                    best_kept, best_cost, best_rise = kept, cost, rise
        kept_R[r], cost_R[r] = best_kept, best_cost
        total += best_kept
        total_cost += best_cost
        total_rise += best_rise
    return total, total_cost, total_rise


@row_part
def _stationary(
    kept_C: np.ndarray,
    gain_C: np.ndarray,
    curvature_C: np.ndarray,
    c: int,
    log_draws: float,
    scale: float,
    aim: float,
    t: float,
) -> tuple[float, float, float]:
    """U, eps and dU / d log(multiplier) where log(-d eps / d U) = aim, between the knots c and c + 1.

    t in [0, 1] is the guess. d log(-d eps / d U) / d log N, the bend, follows from t = S~ / N and the derivatives of U.
    """
    g0, g1 = gain_C[c] * SPACING, gain_C[c + 1] * SPACING
    h0 = (gain_C[c] - curvature_C[c]) * (0.5 * SPACING * SPACING)
    h1 = (gain_C[c + 1] - curvature_C[c + 1]) * (0.5 * SPACING * SPACING)
    # U = kept + g0 t + h0 t^2 + a3 t^3 + a4 t^4 + a5 t^5 with the values and two derivatives of both knots
    d, e, f = kept_C[c + 1] - kept_C[c] - g0 - h0, g1 - g0 - 2.0 * h0, 2.0 * (h1 - h0)
    a3, a4, a5 = 10.0 * d - 4.0 * e + 0.5 * f, -15.0 * d + 7.0 * e - f, 6.0 * d - 3.0 * e + 0.5 * f
    if not 0.0 <= t <= 1.0:  # a slope that is infinite
        t = 0.5
    rise = 0.0
    for _ in range(_NEWTON_STEPS):
        gain = (g0 + t * (2.0 * h0 + t * (3.0 * a3 + t * (4.0 * a4 + t * 5.0 * a5)))) / SPACING
        if not gain > 0.0:  # a plateau: any point of it will do
            break
        curve = (2.0 * h0 + t * (6.0 * a3 + t * (12.0 * a4 + t * 20.0 * a5))) / (SPACING * SPACING)
        share = scale * math.exp(-(log_draws + t * SPACING))
        root = math.sqrt(share) * math.sqrt(share + 6.0)
        bend = (share + 3.0) / (share + 6.0) - (share + root) / root - curve / gain
        bend = min(bend, _FLATTEST_BEND)
        rise = gain / bend
        step = (aim - log_slope(share, gain)) / (bend * SPACING)
        before, t = t, min(max(t + step, 0.0), 1.0)
        if abs(t - before) <= _NEWTON_TOLERANCE:
            break
    kept = kept_C[c] + t * (g0 + t * (h0 + t * (a3 + t * (a4 + t * a5))))
    return kept, eps_rand(scale * math.exp(-(log_draws + t * SPACING))), rise
