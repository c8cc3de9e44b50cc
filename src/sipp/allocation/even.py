"""Shapes of layers and a budget in, the same share for every row or layer out, exact in total."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.errors import OptionError


def even_rows(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[Tensor]:
    """How many weights each row of each F x K layer keeps: the same share of all, at most one weight apart from it.

    With `least` no row gets fewer, as far as the budget reaches.
    """
    fan_ins = torch.cat([torch.full((n_rows,), fan_in, dtype=torch.int64, device="cpu") for n_rows, fan_in in shapes])
    return list(_even(fan_ins, fan_ins.clamp(max=least), budget).split([n_rows for n_rows, _ in shapes]))


def even_layers(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[int]:
    """How many weights each F x K layer keeps: the same share of all, at most one weight apart from it.

    With `least` no layer gets fewer than that for each of its rows, as far as the budget reaches.
    """
    table = torch.tensor([tuple(shape) for shape in shapes], dtype=torch.int64, device="cpu").view(-1, 2)
    n_rows, fan_ins = table.unbind(1)
    kept: list[int] = _even(n_rows * fan_ins, n_rows * fan_ins.clamp(max=least), budget).tolist()
    return kept


def _even(sizes: Tensor, limits: Tensor, budget: int) -> Tensor:
    """The same share of all sizes, none below its limit, where the budget reaches for the limits.

    What rounding down leaves over goes to those that lost most by it, the first ones where they lost the same.
    """
    n_weights = int(sizes.sum())
    if not 0 <= budget <= n_weights:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_weights}", option="budget")
    if int(limits.sum()) > budget:
        limits = torch.zeros_like(sizes)
    room, left = sizes - limits, budget - int(limits.sum())
    kept = limits + room * left // max(1, int(room.sum()))  # exact integers
    lost = room * left % max(1, int(room.sum()))
    most = torch.argsort(lost, descending=True, stable=True)
    kept[most[: budget - int(kept.sum())]] += 1
    return kept
