"""Shapes of layers and a budget in, the same share for every row or layer out, exact in total."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.errors import OptionError


def even_rows(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[Tensor]:
    """How many weights each row of each F x K layer keeps: the same share of all, rounded to the nearest.

    With `least` no row gets fewer, as far as the budget reaches.
    """
    fan_ins = torch.cat([torch.full((n_rows,), fan_in, dtype=torch.int64, device="cpu") for n_rows, fan_in in shapes])
    return list(_even(fan_ins, fan_ins.clamp(max=least), budget).split([n_rows for n_rows, _ in shapes]))


def even_layers(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[int]:
    """How many weights each F x K layer keeps: the same share of all, rounded to the nearest.

    With `least` no layer gets fewer than that for each of its rows, as far as the budget reaches.
    """
    table = torch.tensor([tuple(shape) for shape in shapes], dtype=torch.int64, device="cpu").view(-1, 2)
    n_rows, fan_ins = table.unbind(1)
    kept: list[int] = _even(n_rows * fan_ins, n_rows * fan_ins.clamp(max=least), budget).tolist()
    return kept


def _even(sizes: Tensor, limits: Tensor, budget: int) -> Tensor:
    """The same share of all sizes, rounded to the nearest, none below its limit, where the budget reaches for those.

    Rounding at one common share (Webster's method) is monotone: with a larger budget nobody gets less, so that pruning
    again takes away only. Of those that would be rounded up at the very same share, the first are.
    """
    n_weights = int(sizes.sum())
    if not 0 <= budget <= n_weights:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_weights}", option="budget")
    if int(limits.sum()) > budget:
        limits = torch.zeros_like(sizes)
    low, high = 0.0, 2.0  # shares at which too little, and enough, is kept: at 2 all of it
    while (middle := (low + high) / 2) not in (low, high):
        if int(_rounded(sizes, limits, middle).sum()) < budget:
            low = middle
        else:
            high = middle
    kept, most = _rounded(sizes, limits, low), _rounded(sizes, limits, high)
    waiting = (most > kept).nonzero().flatten()
    kept[waiting[: budget - int(kept.sum())]] += 1
    return kept


def _rounded(sizes: Tensor, limits: Tensor, share: float) -> Tensor:
    whole = torch.floor(sizes.to(torch.float64) * share + 0.5).to(torch.int64)
    return torch.minimum(torch.maximum(whole, limits), sizes)
