"""Shapes of layers and a budget in, the same share for every row out, exact in total."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.errors import OptionError


def even_rows(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[Tensor]:
    """How many weights each row of each F x K layer keeps: the same share of all, at most one weight apart from it.

    What rounding down leaves over goes to the rows that lost most by it, the first ones where they lost the same.
    With `least` no row gets fewer, as far as the budget reaches.
    """
    fan_ins = torch.cat([torch.full((n_rows,), fan_in, dtype=torch.int64, device="cpu") for n_rows, fan_in in shapes])
    n_weights = int(fan_ins.sum())
    if not 0 <= budget <= n_weights:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_weights}", option="budget")
    limits = fan_ins.clamp(max=least) if least * len(fan_ins) <= budget else torch.zeros_like(fan_ins)
    room, left = fan_ins - limits, budget - int(limits.sum())
    kept = limits + room * left // max(1, int(room.sum()))  # exact integers
    lost = room * left % max(1, int(room.sum()))
    most = torch.argsort(lost, descending=True, stable=True)
    kept[most[: budget - int(kept.sum())]] += 1
    return list(kept.split([n_rows for n_rows, _ in shapes]))
