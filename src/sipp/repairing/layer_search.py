"""Searches for the weights of a layer to keep, by alternating directions (T21).

Each row wants the v with few numbers that are not zero that minimises  v A v - 2 v.r,  where A = X'X and r = X't of the
inputs X that the layer meets and its target t. Scaled to a unit diagonal, with (A + rho)^-1 by a factor, a round is
    v = the ridge solution at rho, drawn to what is kept;   kept = the largest of v + u / rho;   u += rho (v - kept).
rho grows as the choice settles. The values are left to the exact least squares on the weights that are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sipp.records.numerics import BOUND_DTYPE, SCORE_DTYPE, integers
from sipp.records.options import Pattern
from sipp.repairing.solving import cholesky_or_nan, scaled_system

DAMPING = 0.01  # of the mean diagonal, towards the dense weights: the sums are of a sample
FIRST_RHO = 0.3
ROUNDS_PER_CHECK = 3  # then rho grows, depending on how much has changed
MOST_ROUNDS = 500
# rho grows by the factor of the first share of the budget that has changed: fast where nothing does, as it is too small
GROWTHS = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1), (-1.0, 1.3))
# On a CPU, from this size on, a sample is sorted to estimate the threshold, and then only the values near it
FEWEST_SAMPLED = 1 << 16
SAMPLE_STRIDE = 31  # odd: rows are often a power of two long
SAMPLE_NOISE = 4.0  # square roots of its size: how far off a rank in the sample may be
SETTLED = 0.1  # where nothing changes, and what is solved is as near as this to what is kept, the search is over
# On a GPU a Cholesky factor is many small kernels. Up to this width the inverse at a larger rho is found from the one
# before by Newton's iteration, a few products, to this error.
NEWTON_WIDTH, NEWTON_ERROR = 2048, 1e-5


@dataclass(frozen=True)
class LeastSquares:
    """Rows of a weight that meet the same patches, group by group, and what they are to give."""

    xx_GKK: Tensor  # sums over patches of products of inputs, about their means where there is an intercept
    wanted_GRK: Tensor  # and of inputs with targets
    dense_GRK: Tensor
    n: float  # patches
    is_centred: bool = False  # the means were taken out: an intercept makes up for them

    def ridge(self, share: float) -> Tensor:
        """A share of the mean diagonal (G): what is added to it draws towards the dense weights."""
        mean_G = self.xx_GKK.diagonal(dim1=1, dim2=2).mean(1)
        return share * torch.where(mean_G > 0, mean_G, 1.0)  # where all inputs are 0, the dense weights stay


@dataclass(frozen=True)
class MaskRule:
    """Which masks of a layer are allowed."""

    n_kept: int
    may_FK: Tensor | None  # the weights that may be kept; None: all
    lives_F: Tensor | None  # rows that keep one weight at least; None: any may die
    pattern: Pattern | None = None  # instead of n_kept
    all_live: bool = False  # lives_F holds for every row

    def largest(self, size_FK: Tensor) -> Tensor:
        """The mask of the largest numbers that are allowed; they are written to."""
        if self.may_FK is not None:
            size_FK = torch.where(self.may_FK, size_FK, -torch.inf)
        if self.pattern is not None:
            return _largest_in_groups(size_FK, self.pattern)
        if self.lives_F is not None:
            best_F1 = size_FK.argmax(1, keepdim=True)
            if self.all_live:
                size_FK.scatter_(1, best_F1, torch.inf)
            else:
                lifted_F1 = torch.where(self.lives_F[:, None], torch.inf, size_FK.gather(1, best_F1))
                size_FK.scatter_(1, best_F1, lifted_F1)
        return _largest(size_FK.reshape(-1), self.n_kept).view_as(size_FK)


def _largest(size_N: Tensor, n_kept: int) -> Tensor:
    """The mask of the largest numbers. On a CPU only those near the least of them, as a sample shows it, are sorted."""
    if size_N.is_cuda or len(size_N) < FEWEST_SAMPLED:
        return torch.zeros(len(size_N), dtype=torch.bool, device=size_N.device).index_fill_(
            0, size_N.topk(n_kept, sorted=False).indices, True
        )
    sample = size_N[::SAMPLE_STRIDE].sort(descending=True).values
    at, aside = n_kept / len(size_N) * len(sample), SAMPLE_NOISE * math.sqrt(len(sample))
    first, last = math.floor(at - aside), math.ceil(at + aside)
    mask_N = size_N > (float(sample[first]) if first >= 0 else math.inf)
    near = size_N >= (float(sample[last]) if last < len(sample) else -math.inf)
    near_N = near.logical_xor_(mask_N).nonzero().flatten()  # what lies above is near or above
    n_left = n_kept - int(mask_N.sum())
    if not 0 <= n_left <= len(near_N):  # an odd sample: all may be near
        mask_N, near_N, n_left = torch.zeros_like(mask_N), integers(0, len(size_N)), n_kept
    return mask_N.index_fill_(0, near_N[size_N[near_N].topk(n_left, sorted=False).indices], True)


def _largest_in_groups(size_FK: Tensor, pattern: Pattern) -> Tensor:
    """The n largest of every m neighbours; what is not allowed is -inf, and never taken."""
    fan_in = size_FK.shape[1]
    filled_FK = F.pad(size_FK, (0, -fan_in % pattern.m), value=-torch.inf)
    groups_FGM = filled_FK.unflatten(1, (-1, pattern.m))
    mask_FGM = torch.zeros(groups_FGM.shape, dtype=torch.bool, device=size_FK.device)
    mask_FGM.scatter_(2, groups_FGM.topk(pattern.n, dim=2, sorted=False).indices, True)
    return (mask_FGM & (groups_FGM > -torch.inf)).flatten(1)[:, :fan_in].contiguous()


def search(blocks: Sequence[LeastSquares], mask_FK: Tensor, rule: MaskRule) -> tuple[Tensor, int]:
    """The mask that the search ends with, from a first one, and how many rounds it took.

    The rows of the blocks stand below each other in the masks. Rounds are in float32: they choose, and no value of
    theirs is kept. On a GPU a round costs what it takes to ask for its operations, so they are few: u / rho is what
    was left of the wish, and v is drawn to  mirror = kept - left.  The first mask stays, after no rounds, where
    rounding leaves a system without a factor.
    """
    if rule.n_kept == 0:
        return torch.zeros_like(mask_FK), 0
    rows, systems = zip(*map(_scaled, blocks))
    mirror_FK = torch.cat(rows).mul_(mask_FK)
    left_FK = torch.zeros_like(mirror_FK)
    del rows
    rho, n_rounds, first_FK, before_FK = FIRST_RHO, 0, mask_FK, mask_FK
    solvers = [system.solver(rho) for system in systems]
    while n_rounds < MOST_ROUNDS:
        wish_FK, last_FK = _wish(systems, solvers, mirror_FK, left_FK, rho), left_FK
        mask_FK = rule.largest(wish_FK.abs())
        kept_FK = wish_FK * mask_FK
        left_FK = wish_FK.sub_(kept_FK)
        n_rounds += 1
        if n_rounds % ROUNDS_PER_CHECK == 0:
            changed = int((mask_FK > before_FK).sum())
            if changed == 0:  # v - kept is by how much more was left than in the round before
                gap, size = torch.stack([(left_FK - last_FK).norm(), kept_FK.norm()]).tolist()
                if gap <= SETTLED * size:
                    break
                if math.isnan(gap):
                    return first_FK, 0
            growth = next(growth for share, growth in GROWTHS if changed > share * rule.n_kept)
            rho, before_FK = rho * growth, mask_FK
            left_FK.div_(growth)
            starts = [solver.inverse_GKK if system.takes_newton else None for system, solver in zip(systems, solvers)]
            solvers.clear()  # before others are made: those of wide layers are large
            solvers += [system.solver(rho, growth, start) for system, start in zip(systems, starts)]
        mirror_FK = kept_FK.sub_(left_FK)
    return mask_FK, n_rounds


def _wish(
    systems: Sequence[_System], solvers: Sequence[_Solver], mirror_FK: Tensor, left_FK: Tensor, rho: float
) -> Tensor:
    """v + left with the v of  (A + rho) v = r + rho mirror, rows below each other."""
    sizes = [system.wanted_GRK.shape[:2].numel() for system in systems]
    found, start = list[Tensor](), 0
    for system, solver, n_rows in zip(systems, solvers, sizes):
        rows, shape = slice(start, start + n_rows), system.wanted_GRK.shape
        right_GRK = torch.add(system.wanted_GRK, mirror_FK[rows].view(shape), alpha=rho)
        found.append(solver.solved(right_GRK, left_FK[rows].view(shape)).view(n_rows, -1))
        start += n_rows
    return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class _Solver:
    """Solves the system of one rho: by its inverse, or by its Cholesky factor where rows are few."""

    inverse_GKK: Tensor | None
    factor_GKK: Tensor | None

    def solved(self, right_GRK: Tensor, added_GRK: Tensor) -> Tensor:
        """The solution for these right sides, with another tensor added."""
        if self.inverse_GKK is not None:
            return torch.baddbmm(added_GRK, right_GRK, self.inverse_GKK)
        assert self.factor_GKK is not None
        return added_GRK + torch.cholesky_solve(right_GRK.mT, self.factor_GKK).mT


@dataclass(frozen=True)
class _System:
    """A block in the units in which its system has a unit diagonal, in float32."""

    unit_GKK: Tensor
    wanted_GRK: Tensor

    @property
    def takes_newton(self) -> bool:
        """Whether the inverse at the next rho comes from the one before."""
        return self.unit_GKK.is_cuda and self.unit_GKK.shape[-1] <= NEWTON_WIDTH

    def solver(self, rho: float, growth: float = 1.0, start_GKK: Tensor | None = None) -> _Solver:
        """The solver at this rho, which is never small: the system has a factor.

        An inverse makes a round one product, which pays where rows are many. A GPU takes it in any case: it solves
        with a factor column after column. `start_GKK` is the inverse at rho / growth.
        """
        self.unit_GKK.diagonal(dim1=1, dim2=2).fill_(1.0 + rho)  # in place: a wide copy is large
        if start_GKK is not None:
            return _Solver(_newton_inverse(self.unit_GKK, start_GKK, growth), None)
        factor_GKK = cholesky_or_nan(self.unit_GKK)
        n_rows, fan_in = self.wanted_GRK.shape[1:]
        # an inverse costs as much as solving for fan_in rows: it pays if it is used for more than that until rho grows
        if fan_in >= ROUNDS_PER_CHECK * n_rows and not factor_GKK.is_cuda:
            return _Solver(None, factor_GKK)
        return _Solver(torch.cholesky_inverse(factor_GKK), None)


def _newton_inverse(system_GKK: Tensor, start_GKK: Tensor, growth: float) -> Tensor:
    """The inverse of a system, from that of the same system with less added to its diagonal: rho / growth, not rho.

    Their product has eigenvalues from 1 to the growth. Divided by the middle of these, the start is off by a known
    share at most, which every step X <- X (2 - A X) squares.
    """
    inverse_GKK, error = start_GKK * (2 / (1 + growth)), (growth - 1) / (growth + 1)
    while error > NEWTON_ERROR:
        inverse_GKK = torch.baddbmm(inverse_GKK, inverse_GKK, system_GKK @ inverse_GKK, beta=2, alpha=-1)
        error *= error
    return inverse_GKK


def _scaled(block: LeastSquares) -> tuple[Tensor, _System]:
    """The dense rows below each other and the system. Per patch: blocks that meet more patches count the same."""
    scale_GK, unit_GKK, wanted_GRK = _with_unit_diagonal(block)
    dense_GRK = block.dense_GRK.to(BOUND_DTYPE) * scale_GK[:, None]
    return dense_GRK.to(SCORE_DTYPE).flatten(0, 1), _System(unit_GKK, wanted_GRK)


def _with_unit_diagonal(block: LeastSquares) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of a block's system, and in float32 the system and its right side; a large copy is not made."""
    ridge_G = block.ridge(DAMPING)
    scale_GK = (block.xx_GKK.diagonal(dim1=1, dim2=2) + ridge_G[:, None]).div_(block.n).sqrt_()
    unit_GKK = scaled_system(block.xx_GKK, (scale_GK * math.sqrt(block.n)).reciprocal_())
    unit_GKK.diagonal(dim1=1, dim2=2).fill_(1.0)
    wanted_GRK = block.wanted_GRK + ridge_G[:, None, None] * block.dense_GRK
    return scale_GK, unit_GKK, (wanted_GRK / block.n / scale_GK[:, None]).to(SCORE_DTYPE)
