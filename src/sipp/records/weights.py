"""One prunable parameter, seen as a matrix of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """One prunable parameter, seen as F rows of fan-in K."""

    name: str  # canonical parameter name, without wrapper prefixes
    aliases: tuple[str, ...]  # other names of the same tensor (tied weights)
    layer_type: str  # class name of the layer that holds it
    n_rows: int
    fan_in: int
    rows_last: bool  # stored K x F instead of F x K

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in


LARGE = 4 << 20  # weights in all


def is_like_a_language_model(weights: Sequence[Weight], parameters: Mapping[str, Tensor]) -> bool:
    """Whether they are many, and of linear layers: to try whole networks would cost as much as a search."""
    n_weights = sum(weight.n_weights for weight in weights)
    return n_weights > LARGE and all(parameters[weight.name].ndim == 2 for weight in weights)


def to_rows(weight: Weight, tensor: Tensor) -> Tensor:
    """The parameter-shaped tensor as an F x K matrix (a view wherever the layout allows one)."""
    return tensor.t() if weight.rows_last else tensor.reshape(weight.n_rows, weight.fan_in)


def from_rows(weight: Weight, matrix_FK: Tensor, like: Tensor) -> Tensor:
    """The F x K matrix in the shape of the parameter `like`."""
    return matrix_FK.t().contiguous() if weight.rows_last else matrix_FK.reshape(like.shape)
