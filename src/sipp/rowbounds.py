"""Sensitivities and a number kept or drawn per row in, the row's relative error bound out (T5, T6, T7).

Both bounds speak of one quadrant of one row: |z^ - z| <= eps * z, where the ES inequality (T4) holds.
T7 stands here because it is what turns a number kept into a number drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.numerics import BOUND_DTYPE

UNION_FACTOR = 16.0  # T6: two tails, four quadrants, half of delta for the ES inequality
CHUNK_CPU = 2**17  # weights worked on at once: their float64 temporaries stay in a core's cache
CHUNK_OTHER = 2**24  # elsewhere a chunk only bounds memory (128 MiB a temporary)
MAX_DRAWS = 1e300  # more draws than this would be infinite in float64, and an infinite N would claim an error of 0
LARGEST_SHARE = 1.0 - 2.0**-53  # keeps log(1 - q) finite where one weight has all of a row's sensitivity
_NEWTON_STEPS = 200
_NEWTON_TOLERANCE = 1e-13


def eps_det(sensitivity_FK: Tensor, kept_F: Tensor, *, c_constant: float) -> Tensor:
    """T5, F float64: C times the sum of all but the m largest sensitivities of each row."""
    check_sensitivity(sensitivity_FK)
    check_kept(kept_F, sensitivity_FK)
    check_constants(c_constant=c_constant)
    return c_constant * tail_sum(sensitivity_FK, largest_in_rows(sensitivity_FK, kept_F))


def eps_rand(total_F: Tensor, n_draws_F: Tensor, *, n_outputs: int, delta: float, c_constant: float) -> Tensor:
    """T6, float64: (S~ + sqrt(S~ (S~ + 6 N))) / N for rows of summed sensitivity `total_F` after N draws.

    Infinite for N = 0, 0 for a row without sensitivity; the two arguments may also be broadcast against each other.
    """
    check_constants(n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    total = total_F.to(BOUND_DTYPE)
    scale = sampling_constant(total, n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    return bernstein(scale, n_draws_F.to(total))


def bernstein(scale_F: Tensor, n_draws_F: Tensor) -> Tensor:
    """eps_rand of T6 from S~ and N: with t = S~ / N it is t + sqrt(t (t + 6)); 0 where S~ is 0, whatever N."""
    share = scale_F / n_draws_F
    # Two roots, because the square of t can leave the range of float64.
    return torch.where(scale_F > 0, share + share.sqrt() * (share + 6.0).sqrt(), 0.0)


def sampling_constant(total_F: Tensor, *, n_outputs: int, delta: float, c_constant: float) -> Tensor:
    """S~ of T6, float64: (S C / 3) ln(16 eta / delta)."""
    log_union = math.log(UNION_FACTOR) + math.log(n_outputs) - math.log(delta)
    return total_F.to(BOUND_DTYPE) * (c_constant / 3.0 * log_union)


def expected_kept(sensitivity_FK: Tensor, n_draws_F: Tensor) -> Tensor:
    """U(N) of T7, F float64: how many different weights N draws with replacement are expected to hit in each row."""
    check_sensitivity(sensitivity_FK)
    never_ends = torch.isinf(n_draws_F.to(sensitivity_FK.device))
    finite = n_draws_F.to(never_ends.device, BOUND_DTYPE).masked_fill(never_ends, 0.0)
    kept = [curve(sensitivity_FK[rows], finite[rows])[0] for rows in row_chunks(sensitivity_FK)]
    return torch.where(never_ends, (sensitivity_FK > 0).sum(1).to(BOUND_DTYPE), torch.cat([finite[:0], *kept]))


def draws_for(sensitivity_FK: Tensor, kept_F: Tensor) -> Tensor:
    """N(m) of T7, F float64: the draws after which m different weights are expected; 0 for m = 0.

    Infinite where m reaches the number of weights of positive sensitivity: no number of draws is sure to hit them all.
    """
    check_sensitivity(sensitivity_FK)
    check_kept(kept_F, sensitivity_FK)
    kept = kept_F.to(sensitivity_FK.device, BOUND_DTYPE)
    draws = [_invert(sensitivity_FK[rows], kept[rows]) for rows in row_chunks(sensitivity_FK)]
    return torch.cat([kept[:0], *draws])


def draws_for_eps(total_F: Tensor, eps_F: Tensor, *, n_outputs: int, delta: float, c_constant: float) -> Tensor:
    """The draws N after which T6 promises exactly `eps_F`: eps = t + sqrt(t (t + 6)) has t = eps^2 / (6 + 2 eps).

    Infinite for eps = 0, 0 for a row without sensitivity.
    """
    scale_F = sampling_constant(total_F, n_outputs=n_outputs, delta=delta, c_constant=c_constant)
    # Two divisions, because the square of a small eps can leave the range of float64.
    return torch.where(scale_F > 0, scale_F * ((6.0 / eps_F + 2.0) / eps_F), 0.0)


def reaches(sensitivity_FK: Tensor, kept_F: Tensor, n_draws_F: Tensor, where_F: Tensor) -> Tensor:
    """F bool: whether N(m) >= n_draws, told by m >= U(n_draws) without solving for N(m) (T7); False outside `where_F`.

    With the draws of `draws_for_eps` it says whether sampling m weights has a bound of at most that eps.
    """
    result_F = torch.zeros_like(where_F)
    asked = (where_F & torch.isfinite(n_draws_F)).nonzero()[:, 0]
    for rows in row_chunks(sensitivity_FK, len(asked)):
        index = asked[rows]
        hit_FK = torch.expm1(rates(sensitivity_FK[index]) * -n_draws_F[index, None])
        result_F[index] = kept_F[index] >= hit_FK.sum(1).neg_()
    return result_F


def rates(sensitivity_FK: Tensor) -> Tensor:
    """-log(1 - q), float64, with q = s / S: the rate at which U's terms decay in N."""
    share = sensitivity_FK.to(BOUND_DTYPE)
    total = share.sum(1, keepdim=True)
    share = share / torch.where(total > 0, total, 1.0)
    return share.clamp_(max=LARGEST_SHARE).neg_().log1p_().neg_()


def curve(sensitivity_FK: Tensor, n_draws_F: Tensor, rates_FK: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U(N), dU/d log N and sum_j y_j^2 e^-y_j with y_j = -N log(1 - q_j): minus d2U/d(log N)^2 plus dU/d log N."""
    exponent = (rates(sensitivity_FK) if rates_FK is None else rates_FK) * n_draws_F[:, None]
    kept = torch.expm1(-exponent).neg_().sum(1)
    first = torch.exp(-exponent).mul_(exponent)
    gain = first.sum(1)
    return kept, gain, first.mul_(exponent).sum(1)


def _invert(sensitivity_FK: Tensor, kept_F: Tensor) -> Tensor:
    """N(m) by Newton's method on log(K+ - U(N)), which is convex in N: from below it never passes the solution."""
    rates_FK = rates(sensitivity_FK)
    cap = (sensitivity_FK > 0).sum(1).to(BOUND_DTYPE)
    solvable = (kept_F > 0) & (kept_F < cap)
    kept, ceiling = torch.where(solvable, kept_F, 0.5), torch.where(solvable, cap, 1.0)
    total_rate = torch.where(solvable, rates_FK.sum(1), 1.0)
    # U(N) <= K+ (1 - exp(-N mean rate)) since 1 - e^-y is concave: the first guess is below N(m), exact for equal q.
    draws = -(ceiling / total_rate) * torch.log1p(-kept / ceiling)
    for _ in range(_NEWTON_STEPS):
        reached, gain, _ = curve(sensitivity_FK, draws, rates_FK)
        lack = (kept - reached) / (ceiling - kept)
        step = torch.where(solvable, (ceiling - reached) / gain * torch.log1p(lack), 0.0)
        draws = (draws * (1.0 + step)).clamp(max=MAX_DRAWS)
        if bool(((step.abs() <= _NEWTON_TOLERANCE) | (draws == MAX_DRAWS)).all()):
            break
    return torch.where(solvable, draws, torch.where(kept_F > 0, math.inf, 0.0))


def largest_in_rows(values_FK: Tensor, kept_F: Tensor) -> Tensor:
    """F x K bool: the `kept_F` largest values of each row, ties going to the smaller column."""
    mask_FK = torch.zeros(values_FK.shape, dtype=torch.bool, device=values_FK.device)
    fan_in = values_FK.shape[1]
    for rows in row_chunks(values_FK):
        values, kept = values_FK[rows], kept_F[rows, None].to(values_FK.device)
        last = (fan_in - kept).clamp(0, fan_in - 1)  # position of the m-th largest in ascending order
        threshold = _ascending(values).gather(1, last)
        above, tied = values > threshold, values == threshold
        room = kept - above.sum(1, keepdim=True)
        mask_FK[rows] = (above & (kept > 0)) | (tied & (tied.cumsum(1) <= room))
    return mask_FK


def tail_sum(sensitivity_FK: Tensor, mask_FK: Tensor) -> Tensor:
    """F float64: the sum of what the mask leaves out of each row, added up itself, not as a difference of sums."""
    tails = [
        sensitivity_FK[rows].to(BOUND_DTYPE).masked_fill(mask_FK[rows], 0.0).sum(1)
        for rows in row_chunks(sensitivity_FK)
    ]
    return torch.cat([torch.zeros(0, dtype=BOUND_DTYPE, device=sensitivity_FK.device), *tails])


def row_chunks(matrix_FK: Tensor, n_rows: int | None = None) -> Iterator[slice]:
    """Slices of bounded size (at least one row) that cover the rows of the matrix, or as many as `n_rows` says."""
    size = CHUNK_CPU if matrix_FK.device.type == "cpu" else CHUNK_OTHER
    step = max(1, size // max(1, matrix_FK.shape[1]))
    for start in range(0, matrix_FK.shape[0] if n_rows is None else n_rows, step):
        yield slice(start, start + step)


def check_sensitivity(sensitivity_FK: Tensor, where: str = "sensitivity") -> None:
    """Nothing comes back; a DataError if the tensor is not F x K, finite and non-negative."""
    if sensitivity_FK.ndim != 2 or sensitivity_FK.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"{where} must be a float32 or float64 matrix of F rows and K columns, "
            f"got {sensitivity_FK.dtype} of shape {tuple(sensitivity_FK.shape)}"
        )
    if sensitivity_FK.numel():
        low, high = (float(end) for end in torch.aminmax(sensitivity_FK))
        if not (low >= 0.0 and math.isfinite(high)):
            raise DataError(
                f"{where} holds values outside [0, inf) (from {low} to {high}): "
                "a NaN, infinite or negative sensitivity has no bound; look for NaN in the weights or the data"
            )


def check_kept(kept_F: Tensor, matrix_FK: Tensor) -> None:
    """Nothing comes back; an OptionError unless there is one number in [0, K] for each of the F rows."""
    n_rows, fan_in = matrix_FK.shape
    if kept_F.shape != (n_rows,):
        raise OptionError(f"kept_F has shape {tuple(kept_F.shape)}; it must hold one number for each of {n_rows} rows")
    if n_rows and not (float(kept_F.min()) >= 0 and float(kept_F.max()) <= fan_in):
        raise OptionError(
            f"kept_F runs from {kept_F.min().item()} to {kept_F.max().item()}: a row of fan-in {fan_in} "
            f"can keep between 0 and {fan_in} weights"
        )


def check_constants(*, c_constant: float, n_outputs: int = 1, delta: float = 0.5) -> None:
    """Nothing comes back; an OptionError if a constant of T5 or T6 is outside its range."""
    if not (c_constant > 0 and math.isfinite(c_constant)):
        raise OptionError(f"c_constant={c_constant!r} must be a positive number (the paper uses 3)")
    if n_outputs < 1:
        raise OptionError(f"n_outputs={n_outputs!r} must be at least 1: it counts a network's output scalars (eta)")
    if not 0.0 < delta < 1.0:
        raise OptionError(f"delta={delta!r} must lie strictly between 0 and 1: it is a failure probability")


def _ascending(values: Tensor) -> Tensor:
    """Each row sorted; NumPy's vectorised sort is many times faster than torch's on a CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.detach().numpy(), axis=1))
    return values.sort(dim=1).values
