"""Patches of fully-connected layers, and how a tensor of inputs is told apart by point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from sipp.records import Use


class Points(NamedTuple):
    """Fields of a Use in their order: windows, n_position_dims, row_start, n_rows, counts_B, attributed."""

    windows: Tensor
    n_position_dims: int
    row_start: int
    n_rows: int | None
    counts_B: Tensor | None
    attributed: bool


def by_point(inputs: Tensor, n_points: int) -> Points:
    """The input vectors (last dimension) grouped by the point they belong to, as the fields of a Use.

    Points run along the first dimension; along the second if that alone has their number (time-major tensors); or
    in equal consecutive blocks of the first (windows or frames folded into the batch). If none fits, the patches
    stay together and `attributed` is False: a maximum needs no more.
    """
    fan_in = inputs.shape[-1]
    attributed = True
    if inputs.ndim > 1 and inputs.shape[0] == n_points:
        grouped = inputs
    elif inputs.ndim > 2 and inputs.shape[1] == n_points:
        grouped = inputs.transpose(0, 1)
    elif inputs.ndim > 1 and inputs.shape[0] % n_points == 0:
        grouped = inputs
    else:
        attributed = n_points == 1
    if not attributed or n_points == 1:
        return Points(inputs.reshape(1, 1, -1, fan_in), 1, 0, None, None, attributed)
    return Points(grouped.reshape(n_points, 1, -1, fan_in), 1, 0, None, None, True)


def linear_uses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Iterator[Use]:
    """One use: every input vector is a patch, whatever the leading dimensions."""
    (inputs,) = (*args, *kwargs.values())
    yield Use("weight", *by_point(inputs, n_points))
