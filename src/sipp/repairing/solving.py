"""Least squares of many rows at once, each restricted to its own kept weights, with a ridge.

Row f wants the c with  c_j = 0 off its mask  that minimises  c A c - 2 c.r,  where A = X'X + ridge I.
With A scaled to a unit diagonal, each row solves the rows and columns of A that it keeps, by a Cholesky factor.
Conjugate gradients on many rows at once are used if they cost less: where many weights are kept, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sipp.results import numerics

SOLVE_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}  # of the systems that are solved at a time
SCALE_BYTES = 8 << 20  # of the part of a float64 system that is scaled at a time

# Conjugate gradients, in float32, end when the steps between two checks add less than this share of the total gain of
# all rows in a chunk, or after the largest number of steps.
STEPS_PER_CHECK = 5
SMALL_GAIN = 1e-3
MOST_STEPS = 400
TYPICAL_STEPS = 40
SMALLEST = torch.finfo(numerics.SCORE_DTYPE).tiny  # a divisor: a row whose residual is 0 has an exact solution
N_KEPT_ALIVE = 8  # numbers that a step holds for each weight
# How much slower a product is in a factorization than in a step: a factor of a single row is small, and in float64.
# The kernel launches of a step cost as much as this number of products.
FACTOR_COST = {"cpu": 9.0, "cuda": 20.0}
LAUNCH_COST = {"cpu": 0.0, "cuda": 3e9}


def solve_rows(xx_GKK: Tensor, dx_GRK: Tensor, mask_GRK: Tensor, ridge_G: Tensor) -> Tensor:
    """The changes of weights (G x R x K, zero off the masks). Features that never occur are not changed.

    If a row's system is not positive definite after rounding, the row becomes NaN if it is factored, and stays at its
    last good step with conjugate gradients. Right-hand sides should be for changes, not for whole weights, because
    steps end when little is left to gain.
    """
    diagonal_GK = xx_GKK.diagonal(dim1=1, dim2=2) + ridge_G[:, None]
    scale_GK = torch.where(diagonal_GK > 0, diagonal_GK, torch.inf).rsqrt()  # 0 for features that never occur
    wanted_GRK = dx_GRK * scale_GK[:, None]
    n_rows, fan_in = wanted_GRK.shape[1:]
    mask_NK, wanted_NK = mask_GRK.flatten(0, 1), wanted_GRK.flatten(0, 1)
    n_kept = mask_NK.sum(1).tolist()  # the only sync with a GPU
    if _is_cheaper_by_steps(n_kept, fan_in, xx_GKK.device):
        small_GKK = scaled_system(xx_GKK, scale_GK)
        small_GKK.diagonal(dim1=1, dim2=2).fill_(1.0)
        return _by_steps(small_GKK, wanted_GRK, mask_GRK).mul_(scale_GK[:, None])
    system_GKK = (xx_GKK * scale_GK[:, :, None]).mul_(scale_GK[:, None, :])
    system_GKK.diagonal(dim1=1, dim2=2).fill_(1.0)
    found_NK = _by_factors(system_GKK, wanted_NK, mask_NK, {i: n for i, n in enumerate(n_kept) if n}, n_rows)
    found_GRK = torch.where(mask_NK, found_NK, 0.0).view_as(wanted_GRK)
    return found_GRK * scale_GK[:, None]


def scaled_system(xx_GKK: Tensor, scale_GK: Tensor) -> Tensor:
    """The system with scaled rows and columns, in float32; a few rows at a time, because a float64 copy is large."""
    made_GKK = torch.empty(xx_GKK.shape, dtype=numerics.SCORE_DTYPE, device=xx_GKK.device)
    most = max(1, SCALE_BYTES // max(1, numerics.BOUND_DTYPE.itemsize * xx_GKK[:, :1].numel()))
    for start in range(0, xx_GKK.shape[1], most):
        rows = slice(start, start + most)
        made_GKK[:, rows] = (xx_GKK[:, rows] * scale_GK[:, rows, None]).mul_(scale_GK[:, None, :])
    return made_GKK


def _is_cheaper_by_steps(n_kept: Sequence[int], fan_in: int, device: torch.device) -> bool:
    """Whether conjugate gradients cost less than a factor of each row."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    factors = sum(n**3 for n in n_kept) / 3 * FACTOR_COST[kind]
    return factors > TYPICAL_STEPS * (2.0 * len(n_kept) * fan_in**2 + LAUNCH_COST[kind])


def _by_steps(system_GKK: Tensor, wanted_GRK: Tensor, mask_GRK: Tensor) -> Tensor:
    """The solutions within the masks by conjugate gradients, as many rows at a time as fit in memory."""
    n_groups, n_rows, fan_in = wanted_GRK.shape
    n_bytes = numerics.for_device(SOLVE_BYTES, wanted_GRK.device)
    most = max(1, n_bytes // (N_KEPT_ALIVE * numerics.SCORE_DTYPE.itemsize * n_groups * fan_in))
    found_GRK = torch.zeros_like(wanted_GRK)
    for start in range(0, n_rows, most):
        rows = slice(start, start + most)
        residual_GRK = wanted_GRK[:, rows] * mask_GRK[:, rows]
        length_GR1 = residual_GRK.norm(dim=2, keepdim=True)  # float32 ends at 1e38: each row is scaled by its own norm
        length_GR1 = torch.where(length_GR1 == 0, 1.0, length_GR1)
        right_GRK, within_GRK = (
            (residual_GRK / length_GR1).to(numerics.SCORE_DTYPE),
            mask_GRK[:, rows].to(numerics.SCORE_DTYPE),
        )
        del residual_GRK
        with numerics.exact_matmul():  # rounding to TF32 may make a nearly singular system indefinite
            found_GRK[:, rows] = length_GR1 * _steps(system_GKK, right_GRK, within_GRK, length_GR1)
    return found_GRK


def _steps(system_GKK: Tensor, residual_GRK: Tensor, mask_GRK: Tensor, unit_GR1: Tensor) -> Tensor:
    """The solutions for right-hand sides that are 0 off the masks. A row stops if its curvature is not positive.

    Each step lowers  c A c - 2 c.r  by  step * |residual|^2;  summed in the units of the rows, that is the gain.
    """
    found_GRK, direction_GRK = torch.zeros_like(residual_GRK), residual_GRK.clone()
    length_GR1 = residual_GRK.square().sum(2, keepdim=True)
    weight_GR1 = (unit_GR1 / unit_GR1.nan_to_num(nan=0.0, posinf=0.0).max()).square()
    recent_GR1 = torch.zeros_like(length_GR1)  # the gain since the last check
    gained = torch.zeros((), dtype=numerics.BOUND_DTYPE, device=residual_GRK.device)
    for n_steps in range(1, MOST_STEPS + 1):
        product_GRK = (direction_GRK @ system_GKK).mul_(mask_GRK)
        curvature_GR1 = (direction_GRK * product_GRK).sum(2, keepdim=True)
        step_GR1 = torch.where(curvature_GR1 > 0, length_GR1 / curvature_GR1, 0.0)
        found_GRK.addcmul_(step_GR1, direction_GRK)
        residual_GRK = residual_GRK.addcmul(step_GR1, product_GRK, value=-1.0)
        recent_GR1.addcmul_(step_GR1, length_GR1)
        new_GR1 = residual_GRK.square().sum(2, keepdim=True)
        direction_GRK.mul_(new_GR1 / length_GR1.clamp_(min=SMALLEST)).add_(residual_GRK)
        length_GR1 = new_GR1
        if n_steps % STEPS_PER_CHECK == 0:
            recent = (weight_GR1 * recent_GR1).nansum()  # a row of NaN ends no other row
            gained = gained + recent
            if not bool(recent > SMALL_GAIN * gained):
                break
            recent_GR1.zero_()
    return found_GRK


def _by_factors(
    system_GKK: Tensor, wanted_NK: Tensor, mask_NK: Tensor, sizes: Mapping[int, int], n_rows: int
) -> Tensor:
    """The solutions within the masks by a factor of each row, given the sizes of the masks that are not empty."""
    found_NK = torch.zeros_like(wanted_NK)
    for rows in _alike(sizes, system_GKK.device):
        size, n_full = sizes[rows[0]], sizes[rows[-1]]  # padding comes last: nothing to clear before it
        batch_N = torch.tensor(rows, dtype=torch.int64, device=system_GKK.device)
        # the columns of the mask come first, in order; the rest is padding, with equations 1 x = 0
        is_kept_NK = mask_NK[batch_N]
        order_NS = is_kept_NK.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
        is_real_NS = is_kept_NK.gather(1, order_NS)
        group_N = batch_N // n_rows
        systems_NSS = system_GKK[group_N[:, None, None], order_NS[:, :, None], order_NS[:, None, :]]
        systems_NSS[:, n_full:] *= is_real_NS[:, n_full:, None]
        systems_NSS[:, :, n_full:] *= is_real_NS[:, None, n_full:]
        systems_NSS.diagonal(dim1=1, dim2=2).masked_fill_(~is_real_NS, 1.0)
        wanted_NS = wanted_NK[batch_N].gather(1, order_NS) * is_real_NS
        solved_NS = torch.cholesky_solve(wanted_NS[..., None], cholesky_or_nan(systems_NSS))[..., 0]
        found_NK[batch_N[:, None], order_NS] = solved_NS * is_real_NS
    return found_NK


def cholesky_or_nan(systems_BSS: Tensor) -> Tensor:
    """The Cholesky factors; NaN if a system is not positive definite after rounding, so its ridge is not chosen."""
    factor_BSS, failed_B = torch.linalg.cholesky_ex(systems_BSS)
    factor_BSS.diagonal(dim1=1, dim2=2).masked_fill_((failed_B != 0)[:, None], torch.nan)
    return factor_BSS


def _alike(sizes: Mapping[int, int], device: torch.device) -> Iterator[list[int]]:
    """The rows in batches of similar size whose systems fit in memory, the largest first."""
    rows = sorted(sizes, key=lambda row: -sizes[row])
    n_bytes = numerics.for_device(SOLVE_BYTES, device)
    start = 0
    while start < len(rows):
        most = max(1, n_bytes // (numerics.BOUND_DTYPE.itemsize * sizes[rows[start]] ** 2))
        yield rows[start : start + most]
        start += most
