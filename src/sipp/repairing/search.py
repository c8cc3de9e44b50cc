"""Searches for the weights of a layer to keep, by alternating directions (T21).

Each row wants the sparse v that minimises  v A v - 2 v.r,  where A = X'X and r = X't for the layer's inputs X and its
target t. A is scaled to a unit diagonal. With the scaled dual u, one round of ADMM is
    v = (A + rho)^-1 (r + rho (kept - u));   kept = the largest entries of v + u;   u = v + u - kept.
rho grows as the support settles. The values are found afterwards, by least squares on the support (`solving.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sipp.repairing.solving import cholesky_or_nan, scaled_system
from sipp.results import Pattern, numerics

DAMPING = 0.01  # of the mean diagonal, towards the dense weights, because the sums come from a sample
FIRST_RHO = 0.3
ROUNDS_PER_CHECK = 3  # then rho grows, depending on how much of the mask has changed
MOST_ROUNDS = 167 * ROUNDS_PER_CHECK
# (share, factor): rho grows by the factor of the first share of the budget that the change exceeds; fast if nothing
# changes, because rho is too small then
Growths = tuple[tuple[float, float], ...]
GROWTHS: Growths = ((0.1, 1.15), (0.005, 1.1), (0.0, 1.05), (-1.0, 1.15))
ALPS_GROWTHS: Growths = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1), (-1.0, 1.3))  # as published (Meng et al. 2024)
WIDE = 4096  # columns: a system for each rho takes seconds for a whole model, so rho grows as in ALPS
SETTLED = 0.1  # if the support is unchanged and v is this close to what is kept, relatively, the search ends
# On a GPU a Cholesky factor is many small kernels. Up to this width, Newton's iteration finds the inverse at a larger
# rho from the previous one, with a few products and to this error.
NEWTON_WIDTH, NEWTON_ERROR = 2048, 1e-5


@dataclass(frozen=True)
class LeastSquares:
    """The least-squares problem of rows that share their patches, group by group."""

    xx_GKK: Tensor  # sums over patches of products of inputs, about their means where there is an intercept
    wanted_GRK: Tensor  # and of products of inputs and targets
    before_GRK: Tensor  # the weights before the fit: of a search the dense ones
    n: float  # patches

    def ridge(self, share: float) -> Tensor:
        """A share of the mean diagonal (G); added to the diagonal, it pulls towards the weights before."""
        mean_G = self.xx_GKK.diagonal(dim1=1, dim2=2).mean(1)
        return share * torch.where(mean_G > 0, mean_G, 1.0)  # if all inputs are 0, the weights stay


@dataclass(frozen=True)
class MaskRule:
    """Which masks of a layer are allowed."""

    n_kept: int
    may_FK: Tensor | None  # the weights that may be kept; None: all
    lives_F: Tensor | None  # rows that must keep a weight; None: any row may die
    pattern: Pattern | None = None  # instead of n_kept

    def largest(self, size_FK: Tensor) -> Tensor:
        """The mask of the largest allowed sizes; `size_FK` is overwritten."""
        if self.may_FK is not None:
            size_FK = torch.where(self.may_FK, size_FK, -torch.inf)
        if self.pattern is not None:
            return _largest_in_groups(size_FK, self.pattern)
        if self.lives_F is not None:
            best_F1 = size_FK.argmax(1, keepdim=True)
            lifted_F1 = torch.where(self.lives_F[:, None], torch.inf, size_FK.gather(1, best_F1))
            size_FK.scatter_(1, best_F1, lifted_F1)
        kept_N = size_FK.reshape(-1).topk(self.n_kept, sorted=False).indices
        mask_N = torch.zeros(size_FK.numel(), dtype=torch.bool, device=size_FK.device)
        return mask_N.index_fill_(0, kept_N, True).view_as(size_FK)


def _largest_in_groups(size_FK: Tensor, pattern: Pattern) -> Tensor:
    """The n largest of every m neighbours; entries that are not allowed are -inf and never taken."""
    fan_in = size_FK.shape[1]
    filled_FK = F.pad(size_FK, (0, -fan_in % pattern.m), value=-torch.inf)
    groups_FGM = filled_FK.unflatten(1, (-1, pattern.m))
    mask_FGM = torch.zeros(groups_FGM.shape, dtype=torch.bool, device=size_FK.device)
    mask_FGM.scatter_(2, groups_FGM.topk(pattern.n, dim=2, sorted=False).indices, True)
    return (mask_FGM & (groups_FGM > -torch.inf)).flatten(1)[:, :fan_in].contiguous()


def search(
    problems: Sequence[LeastSquares], mask_FK: Tensor, rule: MaskRule, growths: Growths = GROWTHS
) -> tuple[Tensor, int]:
    """The mask that the search ends with, from a first one, and how many rounds it took.

    The masks hold the rows of all problems, those of one below those of the other. Rounds are in float32, because only
    the support is used and no value. On a GPU a round costs as much as its kernel launches, so there are few of them.
    The first mask is returned, after 0 rounds, if rounding makes a system indefinite.
    """
    if rule.n_kept == 0:
        return torch.zeros_like(mask_FK), 0
    rows, systems = zip(*map(_scaled, problems))
    center_FK = torch.cat(rows).mul_(mask_FK)
    dual_FK = torch.zeros_like(center_FK)
    del rows
    rho, n_rounds, first_FK, before_FK = FIRST_RHO, 0, mask_FK, mask_FK
    inverses = [system.inverse(rho) for system in systems]
    while n_rounds < MOST_ROUNDS:
        proposal_FK, last_dual_FK = _proposal(systems, inverses, center_FK, dual_FK, rho), dual_FK
        n_rounds += 1
        mask_FK = rule.largest(proposal_FK.abs())
        dual_FK = proposal_FK.masked_fill(mask_FK, 0.0)
        if n_rounds % ROUNDS_PER_CHECK:
            center_FK = proposal_FK.sub_(dual_FK, alpha=2)  # kept - dual, where kept = proposal - dual
            continue
        kept_FK = proposal_FK.sub_(dual_FK)
        changed = int((mask_FK > before_FK).sum())
        if changed == 0:  # v - kept is the change of the dual
            gap, size = torch.stack([(dual_FK - last_dual_FK).norm(), kept_FK.norm()]).tolist()
            if gap <= SETTLED * size:
                break
            if math.isnan(gap):
                return first_FK, 0
        growth = next(growth for share, growth in growths if changed > share * rule.n_kept)
        rho, before_FK = rho * growth, mask_FK
        dual_FK.div_(growth)
        starts = [inverse if system.takes_newton else None for system, inverse in zip(systems, inverses)]
        inverses.clear()  # freed before the next ones are made: those of wide layers are large
        inverses += [system.inverse(rho, growth, start) for system, start in zip(systems, starts)]
        center_FK = kept_FK.sub_(dual_FK)
    return mask_FK, n_rounds


def _proposal(
    systems: Sequence[_System], inverses: Sequence[Tensor], center_FK: Tensor, dual_FK: Tensor, rho: float
) -> Tensor:
    """v + dual with the v of  (A + rho) v = r + rho center, the rows of one system below those of the other."""
    found, start = list[Tensor](), 0
    for system, inverse_GKK in zip(systems, inverses):
        shape = system.wanted_GRK.shape
        rows = slice(start, start := start + shape[:2].numel())
        right_GRK = torch.add(system.wanted_GRK, center_FK[rows].view(shape), alpha=rho)
        found.append(torch.baddbmm(dual_FK[rows].view(shape), right_GRK, inverse_GKK).flatten(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class _System:
    """A problem scaled so that its matrix has a unit diagonal, in float32."""

    unit_GKK: Tensor
    wanted_GRK: Tensor

    @property
    def takes_newton(self) -> bool:
        """Whether the inverse at the next rho is computed from the current one."""
        return self.unit_GKK.is_cuda and self.unit_GKK.shape[-1] <= NEWTON_WIDTH

    def inverse(self, rho: float, growth: float = 1.0, start_GKK: Tensor | None = None) -> Tensor:
        """The inverse at this rho, which is never small, so the system is positive definite; NaN if it is not.

        `start_GKK` is the inverse at rho / growth.
        """
        self.unit_GKK.diagonal(dim1=1, dim2=2).fill_(1.0 + rho)  # in place: a wide copy is large
        if start_GKK is not None:
            return _newton_inverse(self.unit_GKK, start_GKK, growth)
        return torch.cholesky_inverse(cholesky_or_nan(self.unit_GKK))


def _newton_inverse(system_GKK: Tensor, start_GKK: Tensor, growth: float) -> Tensor:
    """The inverse of a system, from the inverse of the same system at rho / growth instead of rho.

    The product of system and start has eigenvalues from 1 to `growth`. Divided by the middle of these, the start has a
    known relative error, which every step X <- X (2 - A X) squares.
    """
    inverse_GKK, error = start_GKK * (2 / (1 + growth)), (growth - 1) / (growth + 1)
    while error > NEWTON_ERROR:
        inverse_GKK = torch.baddbmm(inverse_GKK, inverse_GKK, system_GKK @ inverse_GKK, beta=2, alpha=-1)
        error *= error
    return inverse_GKK


def _scaled(problem: LeastSquares) -> tuple[Tensor, _System]:
    """The rows of a problem before the fit and its system, per patch: one with more patches does not count for more."""
    scale_GK, unit_GKK, wanted_GRK = _with_unit_diagonal(problem)
    before_GRK = problem.before_GRK.to(numerics.BOUND_DTYPE) * scale_GK[:, None]
    return before_GRK.to(numerics.SCORE_DTYPE).flatten(0, 1), _System(unit_GKK, wanted_GRK)


def _with_unit_diagonal(problem: LeastSquares) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of a problem; the system and its right-hand side in float32, without a large copy."""
    ridge_G = problem.ridge(DAMPING)
    scale_GK = (problem.xx_GKK.diagonal(dim1=1, dim2=2) + ridge_G[:, None]).div_(problem.n).sqrt_()
    unit_GKK = scaled_system(problem.xx_GKK, (scale_GK * math.sqrt(problem.n)).reciprocal_())
    unit_GKK.diagonal(dim1=1, dim2=2).fill_(1.0)
    wanted_GRK = problem.wanted_GRK + ridge_G[:, None, None] * problem.before_GRK
    return scale_GK, unit_GKK, (wanted_GRK / problem.n / scale_GK[:, None]).to(numerics.SCORE_DTYPE)
