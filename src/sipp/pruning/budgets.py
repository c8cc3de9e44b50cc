"""OptAlloc: how many weights each group keeps, so that the sum of the bounds of sampling is least (T6, T7, T10).

A group is what is drawn from together. There are two forms of the problem, which differ in three choices:

    allocation    groups                                    a layer counts     the bound of a group that keeps m weights
    "layers"      the positive, the negative weights a row  as any other       eps_rand(m)
    "paper"       rows                                      by its rows        eps_rand(N(m))

"paper" is what the paper prints; "layers" is what its authors ran. Any numbers of weights are valid, because a group's
bound follows from what it keeps, so the choice changes how well the budget is spent and no statement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.pruning.rows import row_chunks
from sipp.results import Allocation

UNION_FACTOR = 16.0  # T6: two tails, four quadrants, half of delta for the ES inequality
MAX_DRAWS = 1e300  # an infinite N would claim an error of 0
LARGEST_SHARE = 1.0 - 2.0**-53  # keeps log(1 - q) finite where one weight has all of a group's sensitivity

_SOLVER_STEPS = 100
_LAST_STEP = 1e-9  # relative
_HALVINGS = 60  # of the bracket around the multiplier's logarithm
_LOG_MULTIPLIERS = (-700.0, 700.0)  # the range of float64
_KNOTS_PER_OCTAVE, _FIRST_OCTAVE, _LINEAR_OCTAVE, _LAST_OCTAVE = 2, -24, -6, 40  # of the numbers of draws tried
_LACK = 0.25  # a curve that lacks less than this many weights is worse than keeping the group whole
_INTEGER_SLACK = 1e-9  # a relaxed number this close to an integer is that integer


@dataclass(frozen=True)
class AllocationProblem:
    """OptAlloc without its budget. R counts the groups of all layers together."""

    worths: tuple[np.ndarray, ...]  # per layer, groups x K: sensitivities, 0 for weights that cannot be drawn
    n_signs: int  # groups a row: 2 ("layers") or 1 ("paper")
    caps_R: np.ndarray  # how many weights can be drawn; a group that keeps all of them is kept whole
    scale_R: np.ndarray  # S~ of T6
    price_R: np.ndarray  # what a group's bound counts in the sum
    curves: Curves | None  # of "paper"

    @property
    def edges(self) -> np.ndarray:
        """Where the groups of each layer begin and end."""
        return np.cumsum([0, *(len(worth_GK) for worth_GK in self.worths)])


@dataclass(frozen=True)
class Curves:
    """What each group keeps (U) and what its bound is, for the numbers of draws in `draws_N`, up to one row a group."""

    kept_RN: np.ndarray
    eps_RN: np.ndarray


def allocation_problem(
    weights: Sequence[Tensor], sensitivities: Sequence[Tensor], scale: float, allocation: Allocation
) -> AllocationProblem:
    """OptAlloc for F x K layers, ready to be solved for any number of budgets. `scale` is `sampling_constant`."""
    for index, sensitivity_FK in enumerate(sensitivities):
        check_sensitivity(sensitivity_FK, f"sensitivity of layer {index}")
    n_signs = 2 if allocation == "layers" else 1
    worths = tuple(groups_of(*layer, n_signs) for layer in zip(weights, sensitivities, strict=True))
    caps_R = _joined([(worth > 0).sum(1).astype(np.float64) for worth in worths])
    scale_R = scale * _joined([worth.sum(1, dtype=np.float64) for worth in worths])
    counts = [n_signs / max(1, len(worth)) if allocation == "layers" else 1.0 for worth in worths]
    price_R = _joined([np.full(len(worth), count) for worth, count in zip(worths, counts)])
    curves = curves_of(worths, scale_R, caps_R) if allocation == "paper" else None
    return AllocationProblem(worths, n_signs, caps_R, scale_R, price_R, curves)


def groups_of(weight_FK: Tensor, sensitivity_FK: Tensor, n_signs: int) -> np.ndarray:
    """The sensitivities of each group, (F n_signs) x K: group n_signs f + s has those of row f with sign s."""
    weight, worth = weight_FK.detach().cpu().to(torch.float64).numpy(), sensitivity_FK.detach().cpu().numpy()
    if n_signs == 1:
        return np.where(weight != 0, worth, 0)
    return np.stack([np.where(weight > 0, worth, 0), np.where(weight < 0, worth, 0)], 1).reshape(-1, worth.shape[1])


def _joined(layers: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *layers])


def sampling_constant(*, n_outputs: int, delta: float, c_constant: float) -> float:
    """S~ of T6 for a sum of sensitivities of 1: (C / 3) ln(16 eta / delta)."""
    return c_constant / 3.0 * (math.log(UNION_FACTOR) + math.log(n_outputs) - math.log(delta))


def check_sensitivity(sensitivity_FK: Tensor, where: str = "sensitivity") -> None:
    """Raises a DataError unless the tensor is F x K, finite and non-negative."""
    if sensitivity_FK.ndim != 2 or sensitivity_FK.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"{where} must be a float32 or float64 matrix of F rows and K columns, "
            f"got {sensitivity_FK.dtype} of shape {tuple(sensitivity_FK.shape)}"
        )
    if sensitivity_FK.numel():
        low, high = (float(end) for end in torch.aminmax(sensitivity_FK))
        if not (low >= 0.0 and math.isfinite(high)):
            raise DataError(
                f"{where} contains values outside [0, inf) (from {low} to {high}): a NaN, infinite or "
                "negative sensitivity has no bound",
                fix="look for NaN in the weights or the data",
            )


# --- The bound of a group, and its number of draws --------------------------------------------------------------------


def eps_rand(share: np.ndarray) -> np.ndarray:
    """The bound of a sampled group (T6), for share = S~ / N."""
    return share + np.sqrt(share) * np.sqrt(share + 6.0)


def rates_of(worth_GK: np.ndarray) -> np.ndarray:
    """-log(1 - q) with q = s / S: the rate at which the chance that a weight was never drawn decays in N."""
    total_G1 = worth_GK.sum(1, keepdims=True, dtype=np.float64)
    share_GK = np.divide(worth_GK, total_G1, out=np.zeros(worth_GK.shape), where=total_G1 > 0)
    return -np.log1p(-np.minimum(share_GK, LARGEST_SHARE))


def draws_for(worth_GK: np.ndarray, kept_G: np.ndarray) -> np.ndarray:
    """N(m) of T7: the draws after which `kept_G` different weights are expected, for 0 < m < cap.

    By Newton's method for the logarithm of the weights still missing, which is convex in N, so that no step goes too
    far from where all rates count as equal, which is never beyond the solution.
    """
    draws_G = np.zeros(len(worth_GK))
    for rows in row_chunks(*worth_GK.shape):
        draws_G[rows] = _draws_for(rates_of(worth_GK[rows]), kept_G[rows].astype(np.float64))
    return draws_G


def _draws_for(rates_GK: np.ndarray, kept_G: np.ndarray) -> np.ndarray:
    can_be_drawn = (rates_GK > 0).astype(np.float64)
    cap_G = can_be_drawn.sum(1)
    with np.errstate(all="ignore"):
        draws_G = np.minimum(-(cap_G / rates_GK.sum(1)) * np.log1p(-kept_G / cap_G), MAX_DRAWS)
        for _ in range(_SOLVER_STEPS):
            left_GK = np.exp(-draws_G[:, None] * rates_GK) * can_be_drawn
            lack_G = left_GK.sum(1)
            fall_G = draws_G * (rates_GK * left_GK).sum(1) / lack_G  # -d log(lack) / d log N
            step_G = np.maximum(np.log(lack_G / (cap_G - kept_G)) / fall_G, 0.0)
            draws_G = np.minimum(draws_G * (1.0 + step_G), MAX_DRAWS)
            if not (step_G[draws_G < MAX_DRAWS] > _LAST_STEP).any():
                break
    return draws_G


def curves_of(worths: Sequence[np.ndarray], scale_R: np.ndarray, caps_R: np.ndarray) -> Curves:
    """U(N) and eps_rand(N) of every group (T6, T7) at numbers of draws half an octave apart.

    With each doubling of N what is left of a weight becomes its square. Few draws hit no weight twice.
    """
    octaves = np.arange(_FIRST_OCTAVE, _LAST_OCTAVE, 1.0 / _KNOTS_PER_OCTAVE)
    n_linear = (_LINEAR_OCTAVE - _FIRST_OCTAVE) * _KNOTS_PER_OCTAVE
    kept_RN = np.empty((len(scale_R), len(octaves)))
    at = 0
    for worth_GK in worths:
        for rows in row_chunks(*worth_GK.shape):
            rates_GK = rates_of(worth_GK[rows])
            here = kept_RN[at : (at := at + len(rates_GK))]
            here[:] = np.minimum(rates_GK.sum(1)[:, None] * 2.0**octaves, (rates_GK > 0).sum(1)[:, None])
            for phase in range(_KNOTS_PER_OCTAVE):
                left_GK = np.exp(-rates_GK * 2.0 ** octaves[n_linear + phase])
                for n in range(n_linear + phase, len(octaves), _KNOTS_PER_OCTAVE):
                    here[:, n] = (1.0 - left_GK).sum(1)
                    if (here[:, n] > (rates_GK > 0).sum(1) - _LACK).all():
                        here[:, n + _KNOTS_PER_OCTAVE :: _KNOTS_PER_OCTAVE] = np.inf  # never worth its price
                        break
                    left_GK *= left_GK
    return Curves(kept_RN, eps_rand(scale_R[:, None] / 2.0**octaves))


# --- The optimum ------------------------------------------------------------------------------------------------------


def relaxed(problem: AllocationProblem, budget: float, least_R: np.ndarray, open_R: np.ndarray) -> np.ndarray:
    """The real numbers of weights that minimise the sum of bounds: sum = min(budget, caps), least <= m <= cap (T10).

    `open_R` says which groups take part; the others keep nothing. With a multiplier for the budget each group finds its
    own minimum, and the multiplier is found by bisection. Where the sum jumps, groups move from one side to the other,
    the first ones first.
    """
    top_R = np.where(open_R, problem.caps_R, 0.0)
    if budget >= top_R.sum():
        return top_R
    respond = _by_size if problem.curves is None else _by_draws
    floor_R = np.minimum(least_R, top_R)

    def kept_at(log_multiplier: float) -> np.ndarray:
        return np.clip(respond(problem, log_multiplier), floor_R, top_R)

    low, high = _LOG_MULTIPLIERS
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if kept_at(middle).sum() > budget else (low, middle)
    few_R, many_R = kept_at(high), kept_at(low)
    room_R = np.maximum(many_R - few_R, 0.0)
    before_R = np.cumsum(room_R) - room_R
    return few_R + np.clip(budget - few_R.sum() - before_R, 0.0, room_R)


def _by_size(problem: AllocationProblem, log_multiplier: float) -> np.ndarray:
    """Where price * eps_rand(m) + multiplier * m is least, in closed form.

    T6 says  m = 2 S~ (1 + y) / (3 y^2)  for eps = 3 y, and the slope of eps in m is -(9 / 2) y^3 / ((y + 2) S~). So
    y^3 = p (y + 2)  with  p = 2 multiplier S~ / (9 price), which Cardano's formulas solve.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        p_R = 2.0 / 9.0 * math.exp(log_multiplier) * problem.scale_R / problem.price_R
        root_R = np.sqrt(np.maximum(1.0 - p_R / 27.0, 0.0))
        few_R = np.cbrt(p_R) * (np.cbrt(1.0 + root_R) + np.cbrt(p_R / (27.0 * (1.0 + root_R))))
        many_R = 2.0 * np.sqrt(p_R / 3.0) * np.cos(np.arccos(np.sqrt(27.0 / np.maximum(p_R, 27.0))) / 3.0)
        y_R = np.where(p_R < 27.0, few_R, many_R)
        return np.where(problem.scale_R > 0, 2.0 / 3.0 * problem.scale_R * (1.0 / y_R + 1.0) / y_R, 0.0)


def _by_draws(problem: AllocationProblem, log_multiplier: float) -> np.ndarray:
    """Where eps_rand(N) + multiplier * U(N) is least among the numbers of draws tried and keeping the group whole."""
    assert problem.curves is not None
    multiplier, curves = math.exp(log_multiplier), problem.curves
    cost_RN = curves.eps_RN + multiplier * curves.kept_RN
    best_R = cost_RN.argmin(1)[:, None]
    cost_R, kept_R = (np.take_along_axis(values, best_R, 1)[:, 0] for values in (cost_RN, curves.kept_RN))
    return np.where(multiplier * problem.caps_R <= cost_R, problem.caps_R, kept_R)


def allocate(
    problem: AllocationProblem,
    budget: int,
    rng: np.random.Generator,
    *,
    least: Sequence[np.ndarray] | None = None,
    layer_least: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """How many weights each group keeps: one int64 array (F x n_signs) per layer, of sum min(budget, caps) (T10).

    Each number is the relaxed optimum, rounded up or down at random so that its expectation is the relaxed optimum.
    `least` is a minimum per group, `layer_least` one per layer. If the budget is too small for both, the one for layers
    is dropped; if it is too small for the groups alone, both are.
    """
    if budget < 0:
        raise OptionError(f"budget={budget} must not be negative: it is the number of weights to keep", option="budget")
    edges, caps_R = problem.edges, problem.caps_R
    layers = [slice(*ends) for ends in pairwise(edges)]
    least_R = np.zeros_like(caps_R) if least is None else np.minimum(_joined(least), caps_R)
    limits = np.minimum([0] * len(layers) if layer_least is None else layer_least, [caps_R[x].sum() for x in layers])
    if least_R.sum() > budget:
        least_R = np.zeros_like(caps_R)
    if sum(max(limit, least_R[layer].sum()) for limit, layer in zip(limits, layers)) > budget:
        limits = np.zeros(len(layers))
    kept_R, open_R, left = np.zeros(len(caps_R), dtype=np.int64), np.full(len(caps_R), True), budget
    while True:  # a layer that is fixed at its limit takes from the others, so more of them may fall below
        shared_R = round_to_sum(relaxed(problem, left, least_R, open_R), rng)
        below = [i for i, x in enumerate(layers) if open_R[x].any() and shared_R[x].sum() < limits[i]]
        if not below:
            kept_R[open_R] = shared_R[open_R]
            return [kept_R[x].reshape(-1, problem.n_signs) for x in layers]
        for i in below:
            here_R = np.zeros_like(open_R)
            here_R[layers[i]] = True
            kept_R[layers[i]] = round_to_sum(relaxed(problem, limits[i], least_R, here_R), rng)[layers[i]]
            open_R &= ~here_R
            left -= int(limits[i])


def round_to_sum(relaxed_R: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rounds each number up or down at random: the sum stays what it is, a whole number, and so do expectations.

    Systematic sampling: the fractions are laid end to end in random order, and the teeth of a comb with a random start
    and spacing 1 pick those to round up.
    """
    whole_R = np.floor(relaxed_R + _INTEGER_SLACK)
    fraction_R = np.maximum(relaxed_R - whole_R, 0.0)
    n_up = round(float(relaxed_R.sum() - whole_R.sum()))
    if n_up > 0:
        order = rng.permutation(len(relaxed_R))
        ends = np.cumsum(fraction_R[order])
        teeth = (np.arange(1, n_up + 1) - rng.random()) * (ends[-1] / n_up)
        whole_R[order[np.searchsorted(ends, np.minimum(teeth, ends[-1]))]] += 1
    return whole_R.astype(np.int64)
