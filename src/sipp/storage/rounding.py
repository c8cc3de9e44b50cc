"""Rounds kept values to fp16, bf16, or int8 with a scale per row, and restores them.

Rounding is idempotent, also for int8: the largest weight of a row, 127 times its scale rounded to float32, gives the
same scale again (true of all 2^23 significands), and every other level as well. So a network that was loaded from such
a file can be certified and saved again with the same bits. A row whose scale would be too small for this becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.errors import ModelError

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = 127  # of int8, on either side of zero
TINY_SCALE = 2.0**-110  # smaller ones, or weights of them, would have fewer bits


@dataclass(frozen=True)
class Rounded:
    """Rounded values, and how far rounding changed them."""

    stored_K: Tensor  # of the dtype that is stored
    scale_F: Tensor | None  # float32, for int8
    largest_change: float  # largest relative change of a weight
    norm_change: float  # ||stored - given|| / ||given||


def round_values(value_K: Tensor, row_K: Tensor | None, n_rows: int, rounding: str, name: str) -> Rounded:
    """Rounds the values; row_K is the row of each value, for int8. ModelError if one is out of range."""
    if rounding == "exact":
        return Rounded(value_K, None, 0.0, 0.0)
    if not bool(value_K.isfinite().all()):
        raise ModelError("a kept weight is infinite or NaN; save with values='fp32' or 'lossless'", where=name)
    if rounding == "int8" and row_K is not None:
        scale_F = _scales(value_K, row_K, n_rows)
        stored_K = _levels(value_K, row_K, scale_F)
    else:
        scale_F, stored_K = None, value_K.to(FORMATS[rounding])
    back_K = restore_values(stored_K, scale_F, row_K, value_K.dtype)
    if not bool(back_K.isfinite().all()):
        raise ModelError(f"a weight is too large for {rounding}; save with values='fp32' or 'lossless'", where=name)
    return Rounded(stored_K, scale_F, *_changes(value_K, back_K))


def restore_values(stored_K: Tensor, scale_F: Tensor | None, row_K: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The inverse of `round_values`: the values that `load` returns."""
    if scale_F is None or row_K is None:
        return stored_K.to(dtype)
    return (stored_K.to(torch.float32) * scale_F[row_K]).to(dtype)


def _scales(value_K: Tensor, row_K: Tensor, n_rows: int) -> Tensor:
    """The largest magnitude of each row divided by 127; 0 if it is tiny."""
    largest_F = torch.zeros(n_rows, dtype=torch.float64, device="cpu")
    largest_F.scatter_reduce_(0, row_K, value_K.abs().to(torch.float64), "amax")
    scale_F = (largest_F / LEVELS).to(torch.float32)
    return torch.where(scale_F < TINY_SCALE, 0.0, scale_F)


def _levels(value_K: Tensor, row_K: Tensor, scale_F: Tensor) -> Tensor:
    scale_K = scale_F.to(torch.float64)[row_K]
    level_K = torch.where(scale_K > 0, value_K.to(torch.float64) / scale_K, 0.0)
    return level_K.round().clamp(-LEVELS, LEVELS).to(torch.int8)


def _changes(given_K: Tensor, back_K: Tensor) -> tuple[float, float]:
    """The largest relative change of a weight, and the relative change of the whole vector."""
    given_K = given_K.to(torch.float64)
    moved_K = (back_K.to(torch.float64) - given_K).abs()
    is_moved_K = moved_K > 0  # a zero stays zero in every format, so that no ratio is over zero
    if not bool(is_moved_K.any()):
        return 0.0, 0.0
    largest = float((moved_K[is_moved_K] / given_K[is_moved_K].abs()).max())
    scale = given_K.abs().max()  # so that squares neither overflow nor vanish
    return largest, float((moved_K / scale).norm() / (given_K / scale).norm())
