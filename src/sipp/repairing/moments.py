"""Sums over patches: all that least squares needs of a layer, and enough for the error of any correction.

For one row: patches x_p of the pruned network, gaps d_p = (dense output) - (pruned output), and a correction (c, b) of
its kept weights and its intercept. The squared error over n patches is
    sum_p (d_p - c x_p - b)^2 = dd - 2 c.dx - 2 b d + c xx c + 2 b c.x + n b^2,
with dd, dx, d, xx, x the sums of products. The sums are float64, so chunks of any size may be added. The products of a
chunk are float32, which would lose the variation of inputs that lie far from 0: their mean is subtracted first and
added back in float64. Where a GPU multiplies TF32 several times as fast, a large xx is made of two TF32 products: each
number is the sum of its 10 leading bits, which TF32 holds exactly, and a rest. Other sums would take three products,
which gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sipp.results import numerics

FAR = 16.0  # standard deviations: a mean closer to 0 costs float32 at most two of seven digits, and is not subtracted
TELLING = 8  # the fewest patches that show how far from 0 the inputs lie
ENOUGH = 256  # about as many patches are looked at

FAST_TF32 = ((8, 0), (9, 0), (10, 0))  # compute capabilities of GPUs that multiply TF32 much faster than float32
FEWEST_SPLIT = 1 << 32  # multiplications: smaller products take as long as their launches
LEADING_BITS = -(1 << 13)  # of a float32: sign, exponent and the 10 bits of the mantissa that TF32 has

RowBlock = tuple[int, int, int]  # first row, number of rows and number of groups of a use


def gains_by_split(device: torch.device, dtype: torch.dtype, n_multiplications: int) -> bool:
    """Whether an xx of this size is faster as the sum of two TF32 products."""
    is_large = dtype == numerics.SCORE_DTYPE and n_multiplications >= FEWEST_SPLIT
    return is_large and device.type == "cuda" and torch.cuda.get_device_capability(device) in FAST_TF32


def squared(patches_GKP: Tensor, *, is_split: bool) -> Tensor:
    """X X' of patches X; by two TF32 products if it is split.

    The product of the two rests is left out. At most 2^-19 of each product of two numbers is lost, so that a sum over
    many patches loses no more than by float32's own rounding.
    """
    if not is_split:
        return patches_GKP @ patches_GKP.mT
    leading_GKP = (patches_GKP.view(torch.int32) & LEADING_BITS).view(numerics.SCORE_DTYPE)
    crossed_GKK = leading_GKP @ (patches_GKP - leading_GKP).mT
    return (leading_GKP @ leading_GKP.mT).add_(crossed_GKK).add_(crossed_GKK.mT)


def lie_far(patches_GKP: Tensor) -> bool | None:
    """Whether a feature lies far from 0 compared with its variation; None: too few patches."""
    if (n_patches := patches_GKP.shape[-1]) < TELLING:
        return None
    deviation_GK, mean_GK = torch.std_mean(patches_GKP[..., :: -(-n_patches // ENOUGH) | 1], -1, correction=0)
    return bool((mean_GK.abs() > FAR * deviation_GK).any())


@dataclass
class Moments:
    """The sums for R rows of each of G groups; they grow with `add_inputs` and `add_rows`."""

    xx_GKK: Tensor
    dx_GRK: Tensor
    x_GK: Tensor
    d_GR: Tensor
    dd_GR: Tensor
    yy_GR: Tensor  # squares of the dense output without its bias; errors are relative to it
    n: float  # patches that are real

    @staticmethod
    def zeros(n_groups: int, n_rows: int, fan_in: int, device: torch.device) -> Moments:
        """No patches yet; `n_rows` of each group."""

        g, r, k = n_groups, n_rows, fan_in
        shapes = (g, k, k), (g, r, k), (g, k), (g, r), (g, r), (g, r)
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.zeros(sum(sizes), dtype=numerics.BOUND_DTYPE, device=device).split(
            sizes
        )  # one launch for all of them
        xx, dx, x, d, dd, yy = (part.view(shape) for part, shape in zip(parts, shapes))
        return Moments(xx, dx, x, d, dd, yy, 0.0)

    def add_inputs(self, xx_GKK: Tensor, x_GK: Tensor, mean_GK1: Tensor | None = None, n: int = 0) -> None:
        """Adds the sums that do not depend on the rows, of n patches from which `mean_GK1` was subtracted, if given."""
        self.xx_GKK += xx_GKK
        self.x_GK += x_GK
        if mean_GK1 is not None:
            mean_GK1, x_GK1 = mean_GK1.to(numerics.BOUND_DTYPE), x_GK[..., None].to(numerics.BOUND_DTYPE)
            crossed_GKK = (x_GK1 + n / 2 * mean_GK1) @ mean_GK1.mT
            self.xx_GKK += crossed_GKK + crossed_GKK.mT
            self.x_GK += n * mean_GK1[..., 0]

    def add_rows(self, patches_GKP: Tensor, gap_GRP: Tensor, dense_GRP: Tensor, mean_GK1: Tensor | None = None) -> None:
        """Adds the sums that depend on the rows: of patches, gaps and dense outputs, all of them 0 at padding."""
        self.dx_GRK += gap_GRP @ patches_GKP.mT
        gap_GR = gap_GRP.sum(-1)
        if mean_GK1 is not None:
            self.dx_GRK += gap_GR[..., None].to(numerics.BOUND_DTYPE) @ mean_GK1.mT.to(numerics.BOUND_DTYPE)
        self.d_GR += gap_GR
        self.dd_GR += gap_GRP.square().sum(-1)
        self.yy_GR += dense_GRP.square().sum(-1)

    def rows(self, at: Tensor) -> Moments:
        """The sums of a few rows of each group."""
        d_GR, dd_GR, yy_GR = self.d_GR[:, at], self.dd_GR[:, at], self.yy_GR[:, at]
        return Moments(self.xx_GKK, self.dx_GRK[:, at], self.x_GK, d_GR, dd_GR, yy_GR, self.n)

    def centred(self) -> tuple[Tensor, Tensor]:
        """xx and dx about the means, for least squares with a free intercept."""
        xx_GKK = self.xx_GKK - self.x_GK[:, :, None] * self.x_GK[:, None, :] / self.n
        return xx_GKK, self.dx_GRK - self.d_GR[..., None] * self.x_GK[:, None, :] / self.n

    def intercept(self, change_GRK: Tensor) -> Tensor:
        """The best intercept (G x R) for a change of weights: the mean residual."""
        return (self.d_GR - (change_GRK @ self.x_GK[..., None])[..., 0]) / self.n

    def error(self, change_GRK: Tensor, shift_GR: Tensor) -> Tensor:
        """The squared error (G x R) of the rows with these changes of weights and intercepts."""
        by_x_GR = (change_GRK @ self.x_GK[..., None])[..., 0]
        quadratic_GR = ((change_GRK @ self.xx_GKK - 2 * self.dx_GRK) * change_GRK).sum(-1)
        found_GR = self.dd_GR + quadratic_GR + shift_GR * (2 * by_x_GR - 2 * self.d_GR + self.n * shift_GR)
        return found_GR.clamp(min=0)


def _are_finite(some: Sequence[Moments]) -> bool:
    """Whether all sums of all of these are finite, as they are if all sums of squares are; one look at a GPU."""
    sums = [one.sum() for m in some for one in (m.xx_GKK, m.dd_GR, m.yy_GR)]
    return math.isfinite(torch.stack(sums).sum())  # inf and nan stay in a sum


@dataclass
class WeightMoments:
    """The moments of one weight on the fit points and on the validation points, per block of rows."""

    fit: dict[RowBlock, Moments] = field(default_factory=dict)
    validation: dict[RowBlock, Moments] = field(default_factory=dict)
    obstacle: str = ""  # why the sums cannot be used


def solvable(sums: WeightMoments) -> tuple[list[RowBlock], str]:
    """The blocks of rows in order, and why they cannot be solved; empty if they can."""
    if sums.obstacle:
        return [], sums.obstacle
    if not sums.fit or sums.fit.keys() != sums.validation.keys():
        return [], "no inputs reach it"
    keys, stop = sorted(sums.fit), 0
    for start, n_rows, _ in keys:
        if start < stop:
            return [], "its uses take rows that overlap"
        stop = start + n_rows
    looked_at = [part[key] for part in (sums.fit, sums.validation) for key in keys]
    if any(moments.n == 0 for moments in looked_at):
        return [], "no inputs reach it"
    return (keys, "") if _are_finite(looked_at) else ([], "its outputs or their squares are not finite")


def slice_of(key: RowBlock) -> slice:
    """The rows of a block."""
    return slice(key[0], key[0] + key[1])
