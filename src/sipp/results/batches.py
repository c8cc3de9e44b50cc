"""A batch ready for the model, and the inputs that reach one weight in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class WeightUse:
    """The inputs of (some rows of) a weight in one call of its layer, as a layer adapter reports them.

    `windows` is a view of shape (B, G, *positions, *fan_in): positions are the patches of a point; the fan-in
    dimensions are in the weight's own order. `real_BP` marks patches that are not padding. Before a use is passed on,
    padding is set to zero, and `counts_B` holds the number of real patches.
    """

    parameter: str  # local name in the module: "weight", "weight_ih_l0", "out_proj.weight"
    windows: Tensor
    n_position_dims: int = 1
    row_start: int = 0
    n_rows: int | None = None  # None: all rows from row_start on
    counts_B: Tensor | None = None
    attributed: bool = True  # False: patches cannot be assigned to points; B is 1 for the whole batch
    real_BP: Tensor | None = None  # bool, for one position dimension: False is padding. None: no padding
    is_own_copy: bool = False  # the windows view memory that the model does not have, and cannot write to


@dataclass(frozen=True)
class Batch:
    """One batch ready for the model: `model(*args, **kwargs)`."""

    index: int
    where: str  # its name in errors: "holdout batch 3"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any
    n_points: int
    real_BT: Tensor | None = None  # which positions of each point count; False is padding. None: all of them
