"""A batch ready for the model, a prunable weight as rows, and the inputs that reach one weight in a batch.

Axis letters, used as suffixes of tensor names everywhere:
    B points of a batch     P patches        F rows of a weight (parameter groups)    K fan-in of a row
    G groups of a grouped convolution (1 elsewhere)      R rows of one group, F = G * R
    S, T signs of weights and of activations             Q quadrants of signs, and Z itself
    N, C, M: anything that is counted in one file (rows of all groups, knots of a curve, weights of a pattern); 1: kept
So `weight_FK` has one row per parameter group, `patches_GKP` holds P patches of fan-in K for each of G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


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


@dataclass(frozen=True)
class Weight:
    """One prunable parameter, seen as F rows of fan-in K."""

    name: str  # canonical parameter name, without wrapper prefixes
    aliases: tuple[str, ...]  # other names of the same tensor (tied weights)
    layer_type: str  # class name of the layer that holds it
    n_rows: int
    fan_in: int
    rows_last: bool  # stored transposed, K x F instead of F x K

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in


def to_rows(weight: Weight, tensor: Tensor) -> Tensor:
    """The parameter-shaped tensor as an F x K matrix (a view wherever the layout allows one)."""
    return tensor.t() if weight.rows_last else tensor.reshape(weight.n_rows, weight.fan_in)


def from_rows(weight: Weight, matrix_FK: Tensor, like: Tensor) -> Tensor:
    """The F x K matrix in the shape of the parameter `like`."""
    return matrix_FK.t().contiguous() if weight.rows_last else matrix_FK.reshape(like.shape)


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
