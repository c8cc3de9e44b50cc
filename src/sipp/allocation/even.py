"""Shapes of layers and a budget in, the same share for every row out, exact in total."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.errors import OptionError


def even_rows(shapes: Sequence[tuple[int, ...]], budget: int) -> list[Tensor]:
    """How many weights each row of each F x K layer keeps: the same share of all, at most one weight apart from it.

    What rounding down leaves over goes to the rows that lost most by it, the first ones where they lost the same.
    """
    fan_ins = torch.cat([torch.full((n_rows,), fan_in, dtype=torch.int64, device="cpu") for n_rows, fan_in in shapes])
    n_weights = int(fan_ins.sum())
    if not 0 <= budget <= n_weights:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_weights}")
    kept = fan_ins * budget // n_weights  # exact integers
    lost = fan_ins * budget % n_weights
    most = torch.argsort(lost, descending=True, stable=True)
    kept[most[: budget - int(kept.sum())]] += 1
    return list(kept.split([n_rows for n_rows, _ in shapes]))
