"""OptAlloc: how many weights each row keeps, given all sensitivities and a budget (T10)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sipp.allocation.curves import Curves, tabulate
from sipp.allocation.envelope import Optimum, fill_in_order, optimum
from sipp.allocation.rows import check_sensitivity, sampling_constant
from sipp.allocation.sparse_rows import row_totals
from sipp.errors import OptionError
from sipp.results.numerics import BOUND_DTYPE

_FRACTION_BITS = 40  # rounding works on whole multiples of 2^-40, so that its sums are exact
# How far below half a weight a row's curve starts: as many octaves where a row has more than a weight of the budget,
# more where rows outnumber the weights or where a row is worth so little that it wants less. Rows that want less than
# 2^-60 of a weight cost next to nothing wherever they are.
_HALVINGS, _MORE_HALVINGS, _MOST_HALVINGS = 3, 12, 60
_INTEGER_SLACK = 1e-9  # a relaxed number this close to an integer is that integer


@dataclass(frozen=True)
class AllocationProblem:
    """OptAlloc without its budget. R counts the rows of all layers together."""

    sensitivities: tuple[Tensor, ...]
    caps_R: Tensor  # float64: the weights of positive sensitivity
    competes_R: Tensor  # bool: rows of positive sensitivity
    scale_R: Tensor  # S~ of T6
    curves: Curves  # of the rows that compete

    @property
    def n_rows(self) -> list[int]:
        """The number of rows of each layer."""
        return [len(layer) for layer in self.sensitivities]


def allocation_problem(
    sensitivities: Sequence[Tensor], *, n_outputs: int, delta: float, c_constant: float
) -> AllocationProblem:
    """The problem of T10 without its budget, ready to be solved for any number of them."""
    for index, layer in enumerate(sensitivities):
        check_sensitivity(layer, f"sensitivity of layer {index}")
    caps_R = _gather([(layer > 0).sum(1) for layer in sensitivities])
    total_R = _gather([row_totals(layer) for layer in sensitivities])
    competes_R = caps_R > 0
    scale_R = sampling_constant(total_R, n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    curves = _curves(sensitivities, competes_R, scale_R, n_halvings=_HALVINGS)
    return AllocationProblem(tuple(sensitivities), caps_R, competes_R, scale_R, curves)


def allocate_within(
    problem: AllocationProblem,
    budget: int,
    *,
    generator: torch.Generator,
    least: int = 0,
    layer_least: Sequence[int] = (),
) -> list[Tensor]:
    """How many weights each row keeps under OptAlloc (T10), for rand and hybrid: one int64 tensor (F) per layer.

    The numbers add up to exactly min(budget, weights of positive sensitivity). Each is the relaxed optimum, rounded up
    or down at random so that its expectation is the relaxed optimum. A row whose optimum is below 1 may get nothing,
    unless `least` sets a minimum for every row that can be sampled.

    `layer_least` is a minimum for each layer. If the budget is too small for both minima, the one for layers is
    dropped; if it is too small for the rows alone, both are.
    """
    if not problem.sensitivities:
        return []
    limits = _layer_limits(problem, budget, least, layer_least)
    fixed: dict[int, Tensor] = {}
    while True:  # a layer that is fixed at its limit takes from the others, so more of them may fall below
        free = [i for i in range(len(limits)) if i not in fixed]
        allocated = _allocated(problem, free, budget - sum(limits[i] for i in fixed), least, generator)
        below = [i for i in free if int(allocated[i].sum()) < limits[i]]
        if not below:
            return [fixed.get(i, kept).to(problem.sensitivities[i].device) for i, kept in enumerate(allocated)]
        fixed |= {i: _allocated(problem, [i], limits[i], least, generator)[i] for i in below}


def _layer_limits(problem: AllocationProblem, budget: int, least: int, layer_least: Sequence[int]) -> list[int]:
    """The minimum of each layer; all 0 if the budget is too small for these and the minima of rows."""
    caps = [int(part.sum()) for part in problem.caps_R.split(problem.n_rows)]
    limits = [min(cap, limit) for cap, limit in zip(caps, layer_least or [0] * len(caps), strict=True)]
    rows = [int(part.sum()) for part in problem.caps_R.clamp(max=least).split(problem.n_rows)]
    return limits if sum(map(max, limits, rows)) <= budget else [0] * len(caps)


def _allocated(
    problem: AllocationProblem, layers: Sequence[int], budget: int, least: int, generator: torch.Generator
) -> list[Tensor]:
    """Integer numbers for the rows of these layers, which share the budget; 0 for rows of other layers."""
    is_inside = [torch.full((n,), i in layers, dtype=torch.bool, device="cpu") for i, n in enumerate(problem.n_rows)]
    inside_R = torch.cat(is_inside)
    if not bool(inside_R.all()):
        problem = _only(problem, inside_R)
    kept_R = _relaxed_above(problem, budget, least) if least else relax_within(problem, budget).kept_R
    return list(round_to_sum(kept_R, min(budget, int(problem.caps_R.sum())), generator).split(problem.n_rows))


def _only(problem: AllocationProblem, inside_R: Tensor) -> AllocationProblem:
    """The problem restricted to some rows; the others keep nothing."""
    competes_R = problem.competes_R & inside_R
    curves = _curves(problem.sensitivities, competes_R, problem.scale_R, n_halvings=_HALVINGS)
    return replace(problem, caps_R=torch.where(inside_R, problem.caps_R, 0.0), competes_R=competes_R, curves=curves)


def _relaxed_above(problem: AllocationProblem, budget: int, least: int) -> Tensor:
    """The relaxed optimum with a minimum for every row (T10): rows below it are fixed at it.

    Fixing a row leaves less for the others, so more of them may fall below; a fixed row never rises again.
    """
    limit_R = problem.caps_R.clamp(max=least)
    if float(limit_R.sum()) > budget:
        return relax_within(problem, budget).kept_R
    if float(limit_R.sum()) == budget:  # nothing is left to share
        return limit_R
    fixed_R = torch.zeros_like(problem.competes_R)
    while True:
        part = _only(problem, ~fixed_R)
        left = budget - int(limit_R[fixed_R].sum())
        kept_R = relax_within(part, left).kept_R
        below_R = part.competes_R & (kept_R < limit_R)
        if not bool(below_R.any()):
            return torch.where(fixed_R, limit_R, kept_R)
        fixed_R = fixed_R | below_R


def relax_within(problem: AllocationProblem, budget: int) -> Optimum:
    """The real numbers m_i that minimise sum_i eps_rand(N_i(m_i)) with sum m_i <= budget, 0 <= m_i <= cap (T10).

    A row's cap is its number of weights of positive sensitivity; there it is kept whole and its bound is 0. The bound
    is convex in m at first but falls to 0 at the cap with infinite slope, so it is replaced by its convex envelope: all
    rows but one lie on their curve or at their cap, where the two agree. `objective` is that of the envelope, at most
    1e-6 (relative) above the minimum. Deviates: the paper calls the problem convex; no guarantee depends on that, since
    a bound holds for any number of weights that a row keeps.
    """
    if budget < 0:
        raise OptionError(f"budget={budget} must not be negative: it is the number of weights to keep", option="budget")
    kept_R = problem.caps_R.clone()
    if budget == 0 and bool(kept_R.any()):
        return Optimum(torch.zeros_like(kept_R), objective=math.inf, multiplier=math.inf)
    if budget >= float(kept_R.sum()):
        return Optimum(kept_R, objective=0.0, multiplier=0.0)
    solution = _solve(problem, budget)
    kept_R[problem.competes_R] = solution.kept_R
    return solution._replace(kept_R=kept_R)


def _solve(problem: AllocationProblem, budget: int) -> Optimum:
    """The optimum on curves that start low enough: no row would keep less than at its first knot.

    If the prepared curves do not, new ones are computed, so that the result depends on nothing but the budget.
    """
    n_halvings = _HALVINGS + max(0, math.ceil(math.log2(int(problem.competes_R.sum()) / budget)))
    curves = problem.curves
    while True:
        if n_halvings > _HALVINGS:
            rows = (problem.sensitivities, problem.competes_R, problem.scale_R)
            curves = _curves(*rows, n_halvings=n_halvings)
        solution = optimum(curves, budget)
        if solution.is_inside or n_halvings > _MOST_HALVINGS:
            return solution
        n_halvings += _MORE_HALVINGS


def _curves(sensitivities: Sequence[Tensor], competes_R: Tensor, scale_R: Tensor, *, n_halvings: int) -> Curves:
    competes = competes_R.split([len(layer) for layer in sensitivities])
    return tabulate(sensitivities, competes, scale_R[competes_R], n_halvings=n_halvings)


def round_to_sum(relaxed_R: Tensor, target: int, generator: torch.Generator) -> Tensor:
    """Rounds each number up or down at random, with the exact sum `target` and unbiased expectations.

    Systematic sampling: the fractions are laid end to end in random order, and a random comb of spacing 1 picks those
    to round up. Fractions are multiples of 2^-40, so that no rounding error can change the sum.
    """
    unit = 1 << _FRACTION_BITS
    floor_R = torch.floor(relaxed_R + _INTEGER_SLACK)
    fraction_R = (relaxed_R - floor_R).clamp(min=0.0)
    fraction_R = torch.where(fraction_R > _INTEGER_SLACK, fraction_R, 0.0)
    pieces_R = torch.round(fraction_R * unit).to(torch.int64)
    surplus = int(pieces_R.sum()) - (target - int(floor_R.sum())) * unit
    if surplus > 0:  # rounding noise only; it goes to the first rows that have room for it
        pieces_R = pieces_R - fill_in_order(surplus, pieces_R)
    else:
        pieces_R = pieces_R + fill_in_order(-surplus, torch.where(pieces_R > 0, unit - pieces_R, 0))
    order = torch.randperm(len(relaxed_R), generator=generator, dtype=torch.int64, device=generator.device).cpu()
    start = torch.randint(unit, (1,), generator=generator, dtype=torch.int64, device=generator.device).cpu()
    teeth = torch.div(torch.cat([start, pieces_R[order].cumsum(0) + start]), unit, rounding_mode="floor")
    rounded_R = floor_R.to(torch.int64)
    rounded_R[order] += teeth.diff()
    return rounded_R


def _gather(layers: Sequence[Tensor]) -> Tensor:
    """One float64 CPU tensor over the rows of all layers."""
    none = torch.zeros(0, dtype=BOUND_DTYPE, device="cpu")
    return torch.cat([none, *(layer.to("cpu", BOUND_DTYPE) for layer in layers)])
