"""Rows that compete for a budget in, the relaxed optimum of OptAlloc out (T10): a convex envelope and one multiplier.

The bound eps_rand(N(m)) of a row is convex in m at first but falls to 0 at the cap (all its weights of positive
sensitivity) with infinite slope, so its lower convex envelope takes its place. For one multiplier each row then takes
the lowest point of weight * eps_rand + multiplier * kept, on its curve or at its cap. Working with N instead of m needs
no inverse: the bound and the number kept, U(N), are both known functions of N. R counts rows of all layers together,
C and P points of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sipp.kernels.compiling import compiled
from sipp.numerics import BOUND_DTYPE
from sipp.rowbounds import bernstein, curve, rates, row_chunks

# The table starts at N = 2^-h: sum_j -log(1 - q_j) < 40 < 2^8, so all rows together can afford their first point. It
# doubles N until a row lacks less than _LACK weights. With y_j = -N log(1 - q_j), the tangent through the cap touches
# the curve where the mean of y_j under the weights e^-y_j is in [1/2, 1]; there the lack, sum_j e^-y_j, is >= e^-1.
_HEADROOM_BITS = 8
_DOUBLINGS = 128
_LACK = 0.25

_OTHERS = 12  # points of a row that are kept beside the cap and the two it follows
_ROUNDS = 50
_FIRST_BRACKET, _BRACKET = 1.0, 1e-3  # of the logarithm of the multiplier, like the tolerances
_FIRST_TOLERANCE, _TOLERANCE = 1e-2, 1e-11
_LARGEST_LOG = 700.0  # beyond it exp leaves the range of float64
_WIN_TOLERANCE = 1e-9  # of what a row minimises
_LARGEST_STEP = math.log(2.0)
_FLATTEST_BEND = -0.01  # on a convex branch the bend runs from -2 to 0; near 0 Newton's step would run away
_MARGIN_IN_PLAY = 1.05  # a point that is worse than its row's best by more than this factor need not be exact


@dataclass(frozen=True)
class CompetingRows:
    """The rows that compete for a budget: those of positive sensitivity and weight, of all layers in order."""

    sensitivities: Sequence[Tensor]
    competes: Tensor  # bool over all rows of all layers; the other fields are over the R rows it selects
    caps_R: Tensor
    weight_R: Tensor
    scale_R: Tensor  # S~ of T6


class _Points(NamedTuple):
    """C points of every row's curve, R x C each. Column 0 is the cap, columns 1 and 2 are the two points followed.

    After `draws` the row keeps U(draws) weights and costs weight * eps_rand(draws); an infinite cost marks a gap.
    `slope` is the logarithm of the multiplier for which a point is stationary, `bend` and `gain` are the derivatives of
    slope and kept in log N: NaN where the curve was not looked at closely. `reach` is how far a step in log N may go.
    """

    draws: Tensor
    kept: Tensor
    cost: Tensor
    slope: Tensor
    bend: Tensor
    gain: Tensor
    reach: Tensor


def optimum(rows: CompetingRows, budget: int) -> tuple[Tensor, float, float]:
    """Numbers kept (R), objective and multiplier of the relaxed problem, for 0 < budget < sum of caps.

    A coarse table of every curve gives a first multiplier and the two deepest valleys of each row. These and the points
    that rows prefer are then improved by Newton's method, rows and multiplier together, until no row can win anything.
    """
    table = _table(rows, budget)
    low, high = _search(table, budget, guess=0.0, bracket=_FIRST_BRACKET, tolerance=_FIRST_TOLERANCE)
    points = _prune(table, _valleys(table, high), high)
    for _ in range(_ROUNDS):
        points, moved = _improve(rows, points, low, high)
        if not moved:
            break
        low, high = _search(points, budget, guess=high, bracket=_BRACKET, tolerance=_TOLERANCE)
    few_R, few_cost_R = _response(points, high)
    many_R, many_cost_R = _response(points, low)
    # Rows that jump between the two multipliers take what is left of the budget, one after the other.
    room_R = (many_R - few_R).clamp(min=0.0)
    filled_R = fill(budget - float(few_R.sum()), room_R)
    share_R = torch.where(room_R > 0, filled_R / room_R, 0.0)
    kept_R = few_R + filled_R
    cost_R = few_cost_R + share_R * (many_cost_R - few_cost_R)
    return kept_R * min(1.0, budget / float(kept_R.sum())), float(cost_R.sum()), math.exp(high)


def fill(amount: float, room: Tensor) -> Tensor:
    """How much each takes of the amount when the first takes as much as it has room for, then the second, and so on."""
    return torch.minimum((amount - (room.cumsum(0) - room)).clamp(min=0), room)


def _table(rows: CompetingRows, budget: int) -> _Points:
    """The cap and the points N = 2^-h, 2^(1-h), .. of every curve: (1 - q)^2N is the square of (1 - q)^N."""
    n_halvings = max(0, math.ceil(math.log2(len(rows.caps_R) / budget))) + _HEADROOM_BITS
    n_columns = n_halvings + _DOUBLINGS
    draws_C = torch.ldexp(torch.ones(n_columns, dtype=BOUND_DTYPE), torch.arange(n_columns) - n_halvings)
    kept_RC = rows.caps_R[:, None].repeat(1, 1 + n_columns)
    n_used = 0
    for part, sensitivity in _parts(rows, torch.ones_like(rows.caps_R, dtype=torch.bool)):
        caps = rows.caps_R[part].to(sensitivity.device)
        hit = torch.expm1(rates(sensitivity) * -float(draws_C[0])).neg_()  # 1 - (1 - q)^N
        sums = [hit.sum(1)]
        while len(sums) < n_columns and bool((caps - sums[-1] >= _LACK).any()):
            hit.mul_(2.0 - hit)
            sums.append(hit.sum(1))
        kept_RC[part, 1 : 1 + len(sums)] = torch.stack(sums, dim=1).cpu()
        n_used = max(n_used, len(sums))
    kept_RC = kept_RC[:, : 1 + n_used]
    draws_RC = torch.where(kept_RC < rows.caps_R[:, None], torch.cat([draws_C[:1], draws_C[:n_used]]), 0.0)
    draws_RC[:, 0] = math.inf
    return _points(rows, draws_RC, kept_RC)


def _points(rows: CompetingRows, draws_RC: Tensor, kept_RC: Tensor) -> _Points:
    """The points with their cost, not looked at closely; no draws cost infinity."""
    cost_RC = rows.weight_R[:, None] * bernstein(rows.scale_R[:, None], draws_RC)
    unknown_RC = torch.full_like(cost_RC, math.nan)
    reach_RC = torch.full_like(cost_RC, _LARGEST_STEP)
    return _Points(draws_RC, kept_RC, cost_RC, unknown_RC, unknown_RC, unknown_RC, reach_RC)


def _pick(points: _Points, index_RP: Tensor) -> _Points:
    """The points in these columns of each row."""
    return _Points(*(field.gather(1, index_RP) for field in points))


def _value(points: _Points, log_multiplier: float) -> Tensor:
    """cost + multiplier * kept, R x C: what a row minimises."""
    return torch.add(points.cost, points.kept, alpha=math.exp(log_multiplier))


def _best(points: _Points, log_multiplier: float) -> Tensor:
    """The column, R x 1, of each row's best point."""
    return _value(points, log_multiplier).argmin(dim=1, keepdim=True)


def _step(points: _Points, log_multiplier: float) -> Tensor:
    """Newton's step in log N to where a point belongs for this multiplier; 0 where its slope is not known."""
    step = (log_multiplier - points.slope) / points.bend.clamp(max=_FLATTEST_BEND)
    return torch.clamp(step, -points.reach, points.reach).nan_to_num(nan=0.0)


def _valleys(table: _Points, log_multiplier: float) -> Tensor:
    """Two columns of the table, R x 2: the lowest local minima of each curve, the cap where there are fewer."""
    value = _value(table, log_multiplier)[:, 1:]
    edge = torch.full_like(value[:, :1], math.inf)
    before, after = torch.cat([edge, value[:, :-1]], dim=1), torch.cat([value[:, 1:], edge], dim=1)
    valley = torch.where((value < before) & (value <= after), value, math.inf)
    lowest = torch.cat([valley, edge], dim=1).topk(2, dim=1, largest=False)
    return torch.where(lowest.values < math.inf, 1 + lowest.indices, 0)


def _prune(points: _Points, followed_R2: Tensor, log_multiplier: float) -> _Points:
    """The cap, the points followed (given by their columns), and the best others at this multiplier."""
    value = _value(points, log_multiplier).scatter(1, followed_R2, math.inf)
    value[:, 0] = math.inf
    others = value.topk(min(_OTHERS, value.shape[1]), dim=1, largest=False).indices
    return _pick(points, torch.cat([torch.zeros_like(others[:, :1]), followed_R2, others], dim=1))


def _response(points: _Points, log_multiplier: float) -> tuple[Tensor, Tensor]:
    """What each row keeps and costs at this multiplier: its best point, moved along the curve to first order."""
    best = _pick(points, _best(points, log_multiplier))
    more = (best.gain * _step(best, log_multiplier)).nan_to_num(nan=0.0)
    more = torch.minimum(more, points.kept[:, :1] - best.kept)
    return (best.kept + more)[:, 0], (best.cost - math.exp(log_multiplier) * more)[:, 0]


@compiled
def _wanted(
    cost: np.ndarray,
    kept: np.ndarray,
    slope: np.ndarray,
    bend: np.ndarray,
    gain: np.ndarray,
    reach: np.ndarray,
    log_multiplier: float,
) -> float:
    """The sum of what the rows keep, as `_response` says: the search asks for it a hundred times."""
    multiplier = math.exp(log_multiplier)
    total = 0.0
    for r in range(cost.shape[0]):
        best, lowest = 0, cost[r, 0] + multiplier * kept[r, 0]
        for c in range(1, cost.shape[1]):
            value = cost[r, c] + multiplier * kept[r, c]
            if value < lowest:
                best, lowest = c, value
        total += kept[r, best]
        more = 0.0
        if not math.isnan(slope[r, best]):
            step = (log_multiplier - slope[r, best]) / min(bend[r, best], _FLATTEST_BEND)
            more = gain[r, best] * min(max(step, -reach[r, best]), reach[r, best])
        if not math.isnan(more):
            total += min(more, kept[r, 0] - kept[r, best])
    return total


def _search(points: _Points, budget: int, *, guess: float, bracket: float, tolerance: float) -> tuple[float, float]:
    """Two close logarithms of the multiplier: at the first the rows want the budget or more, at the second no more."""
    fields = points.cost, points.kept, points.slope, points.bend, points.gain, points.reach
    arrays = [field.numpy() for field in fields]

    def wanted(log_multiplier: float) -> float:
        return float(_wanted(*arrays, log_multiplier))

    low, high = guess - bracket, guess + bracket
    while low > -_LARGEST_LOG and wanted(low) < budget:
        low -= 2.0 * (high - low)
    while high < _LARGEST_LOG and wanted(high) > budget:
        high += 2.0 * (high - low)
    low, high = max(low, -_LARGEST_LOG), min(high, _LARGEST_LOG)
    while high - low > tolerance * max(1.0, abs(low), abs(high)):
        middle = 0.5 * (low + high)
        if wanted(middle) > budget:
            low = middle
        else:
            high = middle
    return low, high


def _improve(rows: CompetingRows, points: _Points, low: float, high: float) -> tuple[_Points, bool]:
    """The points after one step from those followed and those preferred at either multiplier; whether any moved."""
    followed = torch.tensor([1, 2]).expand(len(rows.caps_R), -1)
    picks = torch.cat([_best(points, high), _best(points, low), followed], dim=1).sort(dim=1).values
    picks[:, 1:][picks[:, 1:] == picks[:, :-1]] = 0  # each once
    here = _pick(points, picks)
    value = _value(here, high)
    best = _value(points, high).amin(dim=1, keepdim=True)
    # Half the derivative of the value in log N, times Newton's step in full: what there is to win, to second order.
    win = 0.5 * math.exp(high) * here.gain * (high - here.slope) ** 2 / -here.bend.clamp(max=_FLATTEST_BEND)
    moves = (value <= _MARGIN_IN_PLAY * best) & (rows.caps_R[:, None] - here.kept >= _LACK)
    moves &= here.slope.isnan() | (win > _WIN_TOLERANCE * best)
    step = _step(here, high)
    there = _look(rows, torch.where(moves, here.draws * step.exp(), 0.0), moves)
    is_first = moves & here.slope.isnan()  # looked at where it was: the new point replaces it
    is_worse = moves & ~is_first & (_value(there, high) > value)  # then the next step from here is shorter
    there = there._replace(reach=torch.where(is_first, here.reach, 2.0 * here.reach).clamp(max=_LARGEST_STEP))
    points = points._replace(
        cost=points.cost.scatter(1, picks, torch.where(is_first, math.inf, here.cost)),
        reach=points.reach.scatter(1, picks, torch.where(is_worse, 0.25 * step.abs(), here.reach)),
    )
    new = torch.where(moves & ~is_worse, points.draws.shape[1] + torch.arange(picks.shape[1]), 0)
    moved_to = torch.where(picks[:, None, :] == followed[:, :, None], new[:, None, :], 0).amax(dim=2)
    followed = torch.where(moved_to > 0, moved_to, followed)
    joined = _Points(*(torch.cat(pair, dim=1) for pair in zip(points, there)))
    return _prune(joined, followed, high), bool(moves.any())


def _look(rows: CompetingRows, draws_RP: Tensor, moves_RP: Tensor) -> _Points:
    """The points after these draws, with slope and bend, where a row moves; gaps elsewhere."""
    kept, gain, turn = (rows.caps_R[:, None].repeat(1, draws_RP.shape[1]) for _ in range(3))
    for column in range(draws_RP.shape[1]):
        for part, sensitivity in _parts(rows, moves_RP[:, column]):
            point = curve(sensitivity, draws_RP[part, column].to(sensitivity.device))
            kept[part, column], gain[part, column], turn[part, column] = (values.cpu() for values in point)
    # d eps / d log N = -eps^2 / (2 root), root = sqrt(t (t + 6)), t = S~ / N; d U / d log N = gain. The point is
    # stationary for the multiplier weight * eps^2 / (2 root gain); its logarithm has the derivative `bend` in log N.
    points = _points(rows, draws_RP, kept)
    share = rows.scale_R[:, None] / draws_RP
    eps = bernstein(rows.scale_R[:, None], draws_RP)
    root = share.sqrt() * (share + 6.0).sqrt()
    slope = rows.weight_R.log()[:, None] + 2.0 * eps.log() - (2.0 * root).log() - gain.log()
    bend = (share + 3.0) / (share + 6.0) - eps / root - 1.0 + turn / gain
    return points._replace(slope=slope, bend=bend, gain=gain)


def _parts(rows: CompetingRows, select_R: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of bounded size: indices among the R rows, and these rows' sensitivities (one layer at a time)."""
    chosen = torch.zeros_like(rows.competes)
    chosen[rows.competes] = select_R
    position = rows.competes.cumsum(0) - 1  # of a row among the R
    start = 0
    for layer in rows.sensitivities:
        local = chosen[start : start + len(layer)].nonzero()[:, 0]
        for piece in row_chunks(layer, len(local)):
            yield position[start + local[piece]], layer[local[piece].to(layer.device)]
        start += len(layer)
