"""A batch ready for the model, and the inputs that reach one weight in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # which imports this file
    from sipp.records.ranking import Weight


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
    steps_first: bool = False  # the input was steps x points, and was transposed
    real_BP: Tensor | None = None  # bool, for one position dimension: False is padding. None: no padding
    is_own_copy: bool = False  # the windows view memory that the model does not have, and cannot write to

    @property
    def n_groups(self) -> int:
        """The groups of rows, each with inputs of its own: 1 but for grouped convolutions."""
        return self.windows.shape[1]

    @property
    def n_positions(self) -> int:
        """The patches of each point, padding included."""
        return self.windows.shape[2 : 2 + self.n_position_dims].numel()

    @property
    def n_patches(self) -> int:
        """Points x positions: the patches of all points, padding included."""
        return len(self.windows) * self.n_positions

    @property
    def fan_in(self) -> int:
        """The values of one patch."""
        return self.windows.shape[2 + self.n_position_dims :].numel()

    def n_rows_of(self, weight: Weight) -> int:
        """How many rows of the weight meet these inputs."""
        return weight.n_rows - self.row_start if self.n_rows is None else self.n_rows

    def rows_of(self, weight: Weight) -> slice:
        """Which rows of the weight meet these inputs."""
        return slice(self.row_start, self.row_start + self.n_rows_of(weight))


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
