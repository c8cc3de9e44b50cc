"""Searches for the weights of a layer to keep, by alternating directions (T21).

Each row wants the v with few numbers that are not zero that minimises  v A v - 2 v.r,  where A = X'X and r = X't of the
inputs X that the layer meets and its target t. Scaled to a unit diagonal, with one eigendecomposition of A, a round is
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
from sipp.repairing.solving import scaled_system

DAMPING = 0.01  # of the mean diagonal, towards the dense weights: the sums are of a sample
FIRST_RHO = 0.3
ROUNDS_A_LOOK = 3  # after so many, rho grows by what has changed since
MOST_ROUNDS = 500
LAUNCH_BOUND = 1024  # features up to which a GPU takes longer to be told of a product than to compute it
# rho grows by the factor of the first share of the budget that has changed: fast where nothing does, as it is too small
GROWTHS = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1), (-1.0, 1.3))
# On a CPU, of so many numbers a few are sorted to see where the least that is kept lies, and those near it
FEWEST_SAMPLED = 1 << 16
SAMPLED_OF = 31  # odd: rows are often a power of two long
SAMPLE_NOISE = 4.0  # roots of its size: how far off a sample's rank may be
SETTLED = 0.1  # where nothing changes, and what is solved is as near as this to what is kept, the search is over


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
        """The mask of the largest numbers that are allowed."""
        if self.may_FK is not None:
            size_FK = torch.where(self.may_FK, size_FK, -torch.inf)
        if self.pattern is not None:
            return _largest_in_groups(size_FK, self.pattern)
        if self.lives_F is not None:
            best_F1 = size_FK.argmax(1, keepdim=True)
            if self.all_live:
                size_FK = size_FK.scatter(1, best_F1, torch.inf)
            else:
                lifted_F1 = torch.where(self.lives_F[:, None], torch.inf, size_FK.gather(1, best_F1))
                size_FK = size_FK.scatter(1, best_F1, lifted_F1)
        return _largest(size_FK.reshape(-1), self.n_kept).view_as(size_FK)


def _largest(size_N: Tensor, n_kept: int) -> Tensor:
    """The mask of the largest numbers. On a CPU only those near the least of them, as a sample shows it, are sorted."""
    if size_N.is_cuda or len(size_N) < FEWEST_SAMPLED:
        return torch.zeros(len(size_N), dtype=torch.bool, device=size_N.device).index_fill_(
            0, size_N.topk(n_kept, sorted=False).indices, True
        )
    sample = size_N[::SAMPLED_OF].sort(descending=True).values
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


def search(
    blocks: Sequence[LeastSquares], mask_FK: Tensor, rule: MaskRule, bases: Bases | None = None
) -> tuple[Tensor, int]:
    """The mask that the search ends with, from a first one, and how many rounds it took.

    The rows of the blocks stand below each other in the masks. Rounds are in float32: they choose, and no value of
    theirs is kept. `bases` are those of earlier searches.
    """
    if rule.n_kept == 0:
        return torch.zeros_like(mask_FK), 0
    bases = Bases() if bases is None else bases
    scaled = [_scaled(block, bases) for block in blocks]
    dense_FK = torch.cat([block.dense_GRK.flatten(0, 1) for block in scaled])
    kept_FK, push_FK = torch.where(mask_FK, dense_FK, 0.0), torch.zeros_like(dense_FK)
    sizes, rho, n_rounds, before_FK = [len(block.dense_GRK.flatten(0, 1)) for block in scaled], FIRST_RHO, 0, mask_FK
    inverses = [block.inverse(rho) for block in scaled]
    while n_rounds < MOST_ROUNDS:
        drawn = (rho * kept_FK).sub_(push_FK).split(sizes)
        parts = zip(scaled, drawn, inverses)
        free = [block.solved(drawn_RK, rho, inverse_GKK) for block, drawn_RK, inverse_GKK in parts]
        free_FK = free[0] if len(free) == 1 else torch.cat(free)
        wish_FK = torch.add(free_FK, push_FK, alpha=1 / rho)
        mask_FK = rule.largest(wish_FK.abs())
        kept_FK = wish_FK * mask_FK
        push_FK = wish_FK.sub_(kept_FK).mul_(rho)  # what push + rho (free - kept) comes to
        n_rounds += 1
        if n_rounds % ROUNDS_A_LOOK == 0:
            changed = int((mask_FK & ~before_FK).sum())
            if changed == 0 and bool((free_FK - kept_FK).norm() <= SETTLED * kept_FK.norm()):
                break
            rho *= next(growth for share, growth in GROWTHS if changed > share * rule.n_kept)
            before_FK = mask_FK
            inverses = [block.inverse(rho) for block in scaled]
    return mask_FK, n_rounds


@dataclass(frozen=True)
class _Basis:
    """A system scaled to a unit diagonal: the scales, and in float32 what is left, its eigenvectors and eigenvalues."""

    scale_GK: Tensor
    unit_GKK: Tensor
    vectors_GKK: Tensor
    values_GK: Tensor


@dataclass
class Bases:
    """The system of late: weights that meet the same inputs (query, key, value) follow each other, and need it once."""

    last: _Basis | None = None

    def of(self, scale_GK: Tensor, unit_GKK: Tensor) -> _Basis:
        """The basis of a system: the last one, or a new one."""
        last = self.last
        if last is not None and torch.equal(last.scale_GK, scale_GK) and torch.equal(last.unit_GKK, unit_GKK):
            return last
        values_GK, vectors_GKK = _eigen(unit_GKK)
        self.last = _Basis(scale_GK, unit_GKK, vectors_GKK, values_GK.clamp(min=0.0))
        return self.last


def _eigen(unit_GKK: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors in float32. LAPACK gives up on some systems in that precision, on few in float64."""
    try:
        values_GK, vectors_GKK = torch.linalg.eigh(unit_GKK)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values_GK, vectors_GKK = torch.linalg.eigh(unit_GKK.to(BOUND_DTYPE))
    return values_GK.to(SCORE_DTYPE), vectors_GKK.to(SCORE_DTYPE)


@dataclass(frozen=True)
class _Scaled:
    """A block in the units in which its system has a unit diagonal."""

    dense_GRK: Tensor
    wanted_GRK: Tensor
    basis: _Basis

    def inverse(self, rho: float) -> Tensor | None:
        """(A + rho)^-1, where rounds with it until rho grows are less work than by eigenvectors; else None."""
        n_rows, fan_in = self.dense_GRK.shape[1:]
        if fan_in >= ROUNDS_A_LOOK * n_rows and not (self.dense_GRK.is_cuda and fan_in <= LAUNCH_BOUND):
            return None
        vectors_GKK = self.basis.vectors_GKK
        return (vectors_GKK / (self.basis.values_GK + rho)[:, None]) @ vectors_GKK.mT

    def solved(self, drawn_RK: Tensor, rho: float, inverse_GKK: Tensor | None) -> Tensor:
        """The v of  (A + rho) v = r + drawn, rows below each other."""
        wanted_GRK = self.wanted_GRK + drawn_RK.view_as(self.dense_GRK)
        if inverse_GKK is not None:
            return (wanted_GRK @ inverse_GKK).flatten(0, 1)
        vectors_GKK = self.basis.vectors_GKK
        return ((wanted_GRK @ vectors_GKK).div_((self.basis.values_GK + rho)[:, None]) @ vectors_GKK.mT).flatten(0, 1)


def _scaled(block: LeastSquares, bases: Bases) -> _Scaled:
    """Per patch, so that blocks that meet more patches than others count the same."""
    scale_GK, unit_GKK, wanted_GRK = _with_unit_diagonal(block)
    dense_GRK = block.dense_GRK.to(BOUND_DTYPE) * scale_GK[:, None]
    return _Scaled(dense_GRK.to(SCORE_DTYPE), wanted_GRK, bases.of(scale_GK, unit_GKK))


def _with_unit_diagonal(block: LeastSquares) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of a block's system, and in float32 the system and its right side; a large copy is not made."""
    ridge_G = block.ridge(DAMPING)
    scale_GK = (block.xx_GKK.diagonal(dim1=1, dim2=2) + ridge_G[:, None]).div_(block.n).sqrt_()
    unit_GKK = scaled_system(block.xx_GKK, (scale_GK * math.sqrt(block.n)).reciprocal_())
    unit_GKK.diagonal(dim1=1, dim2=2).fill_(1.0)
    wanted_GRK = block.wanted_GRK + ridge_G[:, None, None] * block.dense_GRK
    return scale_GK, unit_GKK, (wanted_GRK / block.n / scale_GK[:, None]).to(SCORE_DTYPE)
