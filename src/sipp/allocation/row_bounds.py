"""Sensitivities and a number kept or drawn per row in, the row's relative error bound out (T5, T6, T7, T17).

Both bounds speak of one quadrant of one row: |z^ - z| <= eps * z, where the ES inequality (T4) holds.
T7 stands here because it is what turns a number kept into a number drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sipp.allocation.row_loops import (
    as_array,
    over_rows,
    row_totals,
)
from sipp.errors import DataError, OptionError
from sipp.records.numerics import BOUND_DTYPE

UNION_FACTOR = 16.0  # T6: two tails, four quadrants, half of delta for the ES inequality
CHUNK_CPU = 2**17  # weights worked on at once: their float64 temporaries stay in a core's cache
CHUNK_OTHER = 2**24  # elsewhere a chunk only bounds memory (128 MiB a temporary)


def eps_given(weight_FK: Tensor, values_FK: Tensor, sensitivity_FK: Tensor, *, c_constant: float) -> Tensor:
    """T17, F float64: C times the sum of |1 - r_j| s_j for rows whose weights w_j became r_j w_j, however chosen.

    With r_j = 0 for what is removed and 1 for what is kept this is T5. Infinite where a weight was 0 and is not any
    more, or is no number: there is no r_j.
    """
    sums = []
    for rows in row_chunks(weight_FK):
        weight, values = weight_FK[rows].to(BOUND_DTYPE), values_FK[rows].to(BOUND_DTYPE)
        changed = torch.where(values == weight, 0.0, (1.0 - values / weight).abs())  # infinite or NaN: no r_j
        lost = torch.where(changed < torch.inf, changed * sensitivity_FK[rows].to(BOUND_DTYPE), torch.inf)
        sums.append(lost.sum(1))
    return c_constant * torch.cat([torch.zeros(0, dtype=BOUND_DTYPE, device=weight_FK.device), *sums])


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


def largest_in_rows(values_FK: Tensor, kept_F: Tensor) -> Tensor:
    """F x K bool: the `kept_F` largest values of each row, ties going to the smaller column."""
    rows_FK, kept_F1 = as_array(values_FK), as_array(kept_F)[:, None]
    mask_FK = np.zeros(rows_FK.shape, dtype=bool)

    def work(_: int, first: int, end: int, __: np.ndarray) -> None:
        for rows in row_chunks(values_FK, end - first):
            here = slice(first + rows.start, min(first + rows.stop, end))
            mask_FK[here] = _largest(rows_FK[here], kept_F1[here])

    over_rows(work, [rows_FK.shape], n_scratch=0)
    return torch.from_numpy(mask_FK).to(values_FK.device)


def _largest(values_FK: np.ndarray, kept_F1: np.ndarray) -> np.ndarray:
    """The mask of a few rows. NumPy's vectorised sort is many times faster than torch's on a CPU."""
    fan_in = values_FK.shape[1]
    last_F1 = np.clip(fan_in - kept_F1, 0, fan_in - 1)  # position of the m-th largest in ascending order
    threshold_F1 = np.take_along_axis(np.sort(values_FK, axis=1), last_F1, axis=1)
    above_FK, tied_FK = values_FK > threshold_F1, values_FK == threshold_F1
    room_F1 = kept_F1 - above_FK.sum(1, keepdims=True)
    if not np.array_equal(room_F1, tied_FK.sum(1, keepdims=True)):  # more of the threshold's value than there is room
        tied_FK &= tied_FK.cumsum(1) <= room_F1
    return (above_FK & (kept_F1 > 0)) | tied_FK


def tail_sum(sensitivity_FK: Tensor, mask_FK: Tensor) -> Tensor:
    """F float64: the sum of what the mask leaves out of each row, added up itself, not as a difference of sums."""
    tails = [
        row_totals(sensitivity_FK[rows].to(BOUND_DTYPE).masked_fill(mask_FK[rows], 0.0))
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
                f"{where} holds values outside [0, inf) (from {low} to {high}): a NaN, infinite or "
                "negative sensitivity has no bound",
                fix="look for NaN in the weights or the data",
            )


def check_kept(kept_F: Tensor, matrix_FK: Tensor) -> None:
    """Raises an OptionError unless there is one number in [0, K] for each of the F rows."""
    n_rows, fan_in = matrix_FK.shape
    if kept_F.shape != (n_rows,):
        raise OptionError(f"kept_F has shape {tuple(kept_F.shape)}; it must hold one number for each of {n_rows} rows")
    if n_rows and not (float(kept_F.min()) >= 0 and float(kept_F.max()) <= fan_in):
        raise OptionError(
            f"kept_F runs from {kept_F.min().item()} to {kept_F.max().item()}: a row of fan-in {fan_in} "
            f"can keep between 0 and {fan_in} weights"
        )


def check_constants(*, c_constant: float, n_outputs: int = 1, delta: float = 0.5) -> None:
    """Raises an OptionError if a constant of T5 or T6 is outside its range."""
    if not (c_constant > 0 and math.isfinite(c_constant)):
        raise OptionError(f"c_constant={c_constant!r} must be a positive number (the paper uses 3)")
    if n_outputs < 1:
        raise OptionError(f"n_outputs={n_outputs!r} must be at least 1: it counts a network's output scalars (eta)")
    if not 0.0 < delta < 1.0:
        raise OptionError(
            f"delta={delta!r} must lie strictly between 0 and 1: it is a failure probability", option="delta"
        )
