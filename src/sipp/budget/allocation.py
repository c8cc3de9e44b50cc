"""Sensitivities of all rows and a budget in, how many weights each row keeps under OptAlloc out (T10)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.budget.envelope import CompetingRows, fill, optimum
from sipp.errors import OptionError
from sipp.numerics import BOUND_DTYPE
from sipp.rowbounds import check_constants, check_sensitivity, sampling_constant

_FRACTION_BITS = 40  # rounding works on whole multiples of 2^-40, so that its sums are exact
_INTEGER_SLACK = 1e-9  # a relaxed number this close to an integer is that integer


@dataclass(frozen=True)
class Relaxed:
    """The relaxed optimum of T10: real numbers kept, their sum of bounds on the convex envelope, the multiplier."""

    kept: list[Tensor]  # one float64 tensor of F numbers a layer
    objective: float  # no whole numbers cost less
    multiplier: float


def allocate(
    sensitivities: Sequence[Tensor],
    budget: int,
    *,
    n_outputs: int,
    delta: float,
    c_constant: float,
    generator: torch.Generator,
    layer_weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """One int64 tensor of F numbers a layer: how many weights each row keeps under OptAlloc for rand and hybrid (T10).

    The numbers add up to exactly min(budget, weights of positive sensitivity). Each is the relaxed optimum, rounded up
    or down at random so that its expectation is the relaxed optimum. A row whose optimum is below 1 may get nothing.
    """
    relaxed = relax(
        sensitivities,
        budget,
        n_outputs=n_outputs,
        delta=delta,
        c_constant=c_constant,
        layer_weights=layer_weights,
    ).kept
    if not relaxed:
        return []
    flat = torch.cat([layer.cpu() for layer in relaxed])
    target = min(budget, sum(int((layer > 0).sum()) for layer in sensitivities))
    rounded = round_to_sum(flat, target, generator).split([len(layer) for layer in relaxed])
    return [kept.to(layer.device) for kept, layer in zip(rounded, relaxed)]


def relax(
    sensitivities: Sequence[Tensor],
    budget: int,
    *,
    n_outputs: int,
    delta: float,
    c_constant: float,
    layer_weights: Sequence[float] | None = None,
) -> Relaxed:
    """The real numbers m_i that minimise sum_i w_l eps_rand(N_i(m_i)) with sum m_i <= budget, 0 <= m_i <= cap (T10).

    A row's cap is its number of weights of positive sensitivity; there it is kept whole and its bound is 0. The bound
    is convex in m at first but falls to 0 at the cap with infinite slope, so its convex envelope takes its place: all
    rows but one lie on their curve or at their cap, where the two agree. `objective` is that of the envelope, at most
    1e-6 (relative) above its least value. Deviates: the paper calls the problem convex; no guarantee depends on it,
    since a bound holds for whatever number of weights a row is given.
    """
    _check_allocation(sensitivities, budget, layer_weights)
    check_constants(n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    weights = [1.0] * len(sensitivities) if layer_weights is None else list(layer_weights)
    layers = [len(layer) for layer in sensitivities]
    caps_R = _gather([(layer > 0).sum(1) for layer in sensitivities])
    total_R = _gather([layer.sum(1, dtype=BOUND_DTYPE) for layer in sensitivities])
    weight_R = torch.tensor(weights, dtype=BOUND_DTYPE).repeat_interleave(torch.tensor(layers, dtype=torch.int64))
    matters_R = (caps_R > 0) & (weight_R > 0)
    scale_R = sampling_constant(total_R, n_outputs=n_outputs, delta=delta, c_constant=c_constant)

    kept_R = torch.where(matters_R, caps_R, 0.0)
    objective, multiplier = 0.0, 0.0
    left = budget - float(kept_R.sum())
    if left >= 0:  # rows of weight 0 share what the others cannot use
        kept_R = kept_R + fill(left, torch.where(matters_R, 0.0, caps_R))
    elif budget == 0:
        kept_R, objective, multiplier = torch.zeros_like(kept_R), math.inf, math.inf
    else:
        problem = CompetingRows(sensitivities, matters_R, caps_R[matters_R], weight_R[matters_R], scale_R[matters_R])
        kept_R[matters_R], objective, multiplier = optimum(problem, budget)
    kept = [part.to(layer.device) for part, layer in zip(kept_R.split(layers), sensitivities)]
    return Relaxed(kept=kept, objective=objective, multiplier=multiplier)


def round_to_sum(relaxed_R: Tensor, target: int, generator: torch.Generator) -> Tensor:
    """Whole numbers with the exact sum `target`, each its relaxed number rounded up or down, right in expectation.

    Systematic sampling: the fractions are laid end to end in random order and one random comb of spacing 1 picks those
    to round up. On multiples of 2^-40, so that no rounding error can change the sum.
    """
    one = 1 << _FRACTION_BITS
    floor_R = torch.floor(relaxed_R + _INTEGER_SLACK)
    fraction_R = (relaxed_R - floor_R).clamp(min=0.0)
    fraction_R = torch.where(fraction_R > _INTEGER_SLACK, fraction_R, 0.0)
    pieces_R = torch.round(fraction_R * one).to(torch.int64)
    surplus = int(pieces_R.sum()) - (target - int(floor_R.sum())) * one
    if surplus > 0:  # rounding noise only; it goes to the first rows that have room for it
        pieces_R = pieces_R - fill(surplus, pieces_R)
    else:
        pieces_R = pieces_R + fill(-surplus, torch.where(pieces_R > 0, one - pieces_R, 0))
    order = torch.randperm(len(relaxed_R), generator=generator, device=generator.device).cpu()
    start = torch.randint(one, (1,), generator=generator, device=generator.device).cpu()
    teeth = torch.div(torch.cat([start, pieces_R[order].cumsum(0) + start]), one, rounding_mode="floor")
    rounded_R = floor_R.to(torch.int64)
    rounded_R[order] += teeth.diff()
    return rounded_R


def _gather(layers: Sequence[Tensor]) -> Tensor:
    """One float64 CPU tensor over the rows of all layers."""
    return torch.cat([torch.zeros(0, dtype=BOUND_DTYPE), *(layer.to("cpu", BOUND_DTYPE) for layer in layers)])


def _check_allocation(sensitivities: Sequence[Tensor], budget: int, layer_weights: Sequence[float] | None) -> None:
    if budget < 0:
        raise OptionError(f"budget={budget} must not be negative: it is the number of weights to keep")
    for index, layer in enumerate(sensitivities):
        check_sensitivity(layer, f"sensitivity of layer {index}")
    if layer_weights is None:
        return
    if len(layer_weights) != len(sensitivities):
        raise OptionError(f"{len(layer_weights)} layer_weights for {len(sensitivities)} layers; give one for each")
    for index, weight in enumerate(layer_weights):
        if not (weight >= 0.0 and math.isfinite(weight)):
            raise OptionError(f"layer_weights[{index}]={weight!r} must be finite and not negative")
