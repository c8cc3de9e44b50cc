"""A batch ready for the model, and what a layer met in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class WeightUse:
    """One meeting of (some rows of) a weight with patches, as a layer adapter reports it.

    `windows` is a view of shape (B, G, *positions, *fan_in): the positions are the patches of a point, the fan-in
    dimensions are flattened in the order of the weight's own. An adapter says in `real_BP` which patches are real;
    those that are only padding are zeroed, and counted in `counts_B`, before a use is handed on.
    """

    parameter: str  # local name in the module: "weight", "weight_ih_l0", "out_proj.weight"
    windows: Tensor
    n_position_dims: int = 1
    row_start: int = 0
    n_rows: int | None = None  # None: all rows from row_start on
    counts_B: Tensor | None = None
    attributed: bool = True  # False: the patches could not be told apart by point, B is 1 for the whole batch
    steps_first: bool = False  # the input lay steps x points, and was turned
    real_BP: Tensor | None = None  # bool, for one position dimension: False is padding. None: all are real
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
