"""Relative error bounds of single rows, from their sensitivities and the weights kept or drawn (T5, T6, T17).

Both bounds speak of one quadrant of one row: |z^ - z| <= eps * z, where the ES inequality (T4) holds.
T7 stands here because it is what turns a number kept into a number drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sipp.allocation.row_loops import (
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


def sampling_constant(total_F: Tensor, *, n_outputs: int, delta: float, c_constant: float) -> Tensor:
    """S~ of T6, float64: (S C / 3) ln(16 eta / delta)."""
    log_union = math.log(UNION_FACTOR) + math.log(n_outputs) - math.log(delta)
    return total_F.to(BOUND_DTYPE) * (c_constant / 3.0 * log_union)


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
