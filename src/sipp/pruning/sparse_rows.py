"""The rows of a layer after pruning, each with its bound on the relative error (T5, T17).

A bound is about one quadrant of one row: |z^ - z| <= eps * z, where the ES inequality (T4) holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sipp.results import numerics

DET = 0  # the most sensitive weights, unchanged (T5)
RAND = 1  # a re-weighted sample (T6, T8)
WHOLE = 2  # nothing of positive sensitivity was lost
STRATEGIES = {DET: "det", RAND: "rand", WHOLE: "whole"}

CHUNK_CPU = 2**17  # weights worked on at once: their float64 temporaries stay in a core's cache
CHUNK_OTHER = 2**24  # elsewhere a chunk only bounds memory (128 MiB a temporary)


N_SUMS = 32  # number j of a row goes to the sum j % N_SUMS, and these meet at the end


@dataclass(frozen=True)
class SparseRows:
    """The rows of one weight after pruning."""

    values_FK: Tensor
    mask_FK: Tensor
    strategy_FS: Tensor  # int8: DET, RAND or WHOLE, of the row (S = 1) or of its weights of each sign (S = 2)
    n_draws_FS: Tensor  # float64, draws made; 0 where nothing was drawn
    eps_F: Tensor  # float64, the bound of T5, T6 or T9


def given_rows(
    weight_FK: Tensor, values_FK: Tensor, mask_FK: Tensor, sensitivity_FK: Tensor | None, *, c_constant: float
) -> SparseRows:
    """Rows with given values, however they were found, with the bound of T17.

    Without sensitivities the bound is 0 for a row that did not change, and infinite otherwise.
    """
    if sensitivity_FK is None:
        eps_F = torch.where((values_FK == weight_FK).all(1), 0.0, math.inf).to(numerics.BOUND_DTYPE)
    else:
        eps_F = eps_given(weight_FK, values_FK, sensitivity_FK, c_constant=c_constant)
    return _not_sampled(values_FK, mask_FK, eps_F)


def masked_rows(weight_FK: Tensor, mask_FK: Tensor, sensitivity_FK: Tensor | None, *, c_constant: float) -> SparseRows:
    """Rows with the masked weights unchanged, however the mask was chosen (T5, T17 with r_j = 0 or 1)."""
    values_FK = torch.where(mask_FK, weight_FK, 0.0)
    if sensitivity_FK is None:
        return given_rows(weight_FK, values_FK, mask_FK, None, c_constant=c_constant)
    eps_F = c_constant * tail_sum(torch.where(weight_FK != 0, sensitivity_FK, 0.0), mask_FK)
    return _not_sampled(values_FK, mask_FK, eps_F)


def _not_sampled(values_FK: Tensor, mask_FK: Tensor, eps_F: Tensor) -> SparseRows:
    strategy_F1 = torch.where(eps_F == 0, WHOLE, DET).to(torch.int8)[:, None]
    return SparseRows(values_FK, mask_FK, strategy_F1, n_draws_FS=torch.zeros_like(eps_F)[:, None], eps_F=eps_F)


def with_restored(rows: SparseRows, restored_FK: Tensor, weight_FK: Tensor) -> SparseRows:
    """The rows with these weights restored to their dense values."""
    values_FK = torch.where(restored_FK, weight_FK, rows.values_FK)
    return replace(rows, values_FK=values_FK, mask_FK=rows.mask_FK | restored_FK)


def eps_given(weight_FK: Tensor, values_FK: Tensor, sensitivity_FK: Tensor, *, c_constant: float) -> Tensor:
    """T17, F float64: C times the sum of |1 - r_j| s_j for rows whose weights w_j became r_j w_j, however chosen.

    With r_j = 0 for removed and 1 for kept weights this is T5. Infinite if a weight was 0 and no longer is, or is NaN:
    then there is no r_j.
    """
    sums = []
    for rows in row_chunks(*weight_FK.shape, device=weight_FK.device.type):
        weight, values = weight_FK[rows].to(numerics.BOUND_DTYPE), values_FK[rows].to(numerics.BOUND_DTYPE)
        changed = torch.where(values == weight, 0.0, (1.0 - values / weight).abs())  # infinite or NaN: no r_j
        lost = torch.where(changed < torch.inf, changed * sensitivity_FK[rows].to(numerics.BOUND_DTYPE), torch.inf)
        # torch splits the sum of a single long row among its threads, but not those of two rows
        sums.append((lost.expand(2, -1) if len(lost) == 1 else lost).sum(1)[: len(lost)])
    return c_constant * torch.cat([torch.zeros(0, dtype=numerics.BOUND_DTYPE, device=weight_FK.device), *sums])


def tail_sum(sensitivity_FK: Tensor, mask_FK: Tensor) -> Tensor:
    """F float64: the sum of the entries outside the mask, computed directly, not as a difference of sums."""
    tails = [
        row_totals(sensitivity_FK[rows].to(numerics.BOUND_DTYPE).masked_fill(mask_FK[rows], 0.0))
        for rows in row_chunks(*sensitivity_FK.shape, device=sensitivity_FK.device.type)
    ]
    return torch.cat([torch.zeros(0, dtype=numerics.BOUND_DTYPE, device=sensitivity_FK.device), *tails])


def row_totals(values_FK: Tensor) -> Tensor:
    """F float64: each row's sum. On a CPU in a fixed order; torch's depends on threads where rows are few."""
    if values_FK.device.type != "cpu":
        return values_FK.sum(1, dtype=numerics.BOUND_DTYPE)
    rows = values_FK.detach().numpy()
    sums = np.zeros((len(rows), N_SUMS))
    for start in range(0, rows.shape[1], N_SUMS):
        part = rows[:, start : start + N_SUMS]
        sums[:, : part.shape[1]] += part
    width = N_SUMS // 2
    while width > 0:
        sums = sums[:, :width] + sums[:, width:]
        width //= 2
    return torch.from_numpy(sums[:, 0].copy())


def row_chunks(n_rows: int, fan_in: int, *, device: str = "cpu") -> Iterator[slice]:
    """Slices of a bounded number of weights, at least a row, that cover a matrix on this kind of device."""
    step = max(1, (CHUNK_CPU if device == "cpu" else CHUNK_OTHER) // max(1, fan_in))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))
