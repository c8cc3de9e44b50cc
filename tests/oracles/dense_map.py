"""The matrix of a linear map, found by pushing unit vectors through it, and its largest singular value."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def dense_matrix(linear_map: Callable[[Tensor], Tensor], input_shape: Sequence[int]) -> Tensor:
    """The (outputs, inputs) float64 matrix of a map without offset, given as a function of a batch of inputs."""
    n_inputs = 1
    for size in input_shape:
        n_inputs *= size
    units = torch.eye(n_inputs, dtype=torch.float64).reshape(n_inputs, *input_shape)
    columns = [linear_map(unit.unsqueeze(0)).flatten() for unit in units]
    return torch.stack(columns, dim=1)


def dense_norm(linear_map: Callable[[Tensor], Tensor], input_shape: Sequence[int]) -> float:
    """The operator norm of the map: the largest singular value of its matrix."""
    return float(torch.linalg.svdvals(dense_matrix(linear_map, input_shape))[0])


def worst_direction(linear_map: Callable[[Tensor], Tensor], input_shape: Sequence[int]) -> Tensor:
    """The unit input that the map stretches most, in the shape of an input."""
    _, _, rows = torch.linalg.svd(dense_matrix(linear_map, input_shape))
    return rows[0].reshape(tuple(input_shape))
