"""Patches of fully-connected layers, and how a tensor of inputs is told apart by point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.patches import WeightUse


class Points(NamedTuple):
    """The first fields of a `WeightUse` after its parameter, in their order."""

    windows: Tensor
    n_position_dims: int
    row_start: int
    n_rows: int | None
    counts_B: Tensor | None
    attributed: bool


def by_point(inputs: Tensor, n_points: int) -> Points:
    """The input vectors (last dimension) grouped by the point they belong to, as the fields of a `WeightUse`.

    Points run along the first dimension, one by one or in equal consecutive blocks (windows or frames folded into the
    batch). If that cannot be, the patches stay together and `attributed` is False: a maximum needs no more.
    """
    fan_in = inputs.shape[-1]
    # an expert that got no tokens has none to attribute
    attributed = n_points == 1 or (inputs.ndim > 1 and inputs.numel() > 0 and inputs.shape[0] % n_points == 0)
    n_blocks = n_points if attributed else 1
    n_patches = inputs.shape[:-1].numel() // n_blocks
    return Points(inputs.reshape(n_blocks, 1, n_patches, fan_in), 1, 0, None, None, attributed)


def one_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a layer that takes one tensor."""
    given = (*args, *kwargs.values())
    if len(given) != 1:
        raise ModelError(f"is called with {len(given)} arguments, not one: sipp cannot reproduce its output")
    if not isinstance(given[0], Tensor):
        raise DataError(f"takes a tensor, not a {type(given[0]).__name__}")
    return given[0]


def linear_uses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Iterator[WeightUse]:
    """One use: every input vector is a patch, whatever the leading dimensions."""
    inputs = one_input(args, kwargs)
    if inputs.ndim == 0:
        raise DataError("takes vectors of features, not a single number")
    yield WeightUse("weight", *by_point(inputs, n_points))


def refuse_points_along_time(n_sequences: int, n_steps: int, n_points: int) -> None:
    """Raises if the points are really time steps of fewer sequences: points would be counted too often."""
    if n_sequences < n_points == n_steps:
        raise DataError(
            f"reads the {n_points} inputs of the batch as the {n_steps} time steps of {n_sequences} "
            "sequence(s); inputs run along dimension 0 of the data",
            fix="transpose the data, or wrap the model in one that transposes (where a sequence is that long by "
            "chance, use batches of another size)",
        )


def by_size(shape: tuple[int, ...]) -> str:
    """A shape in words: 200 x 9."""
    return " x ".join(map(str, shape)) or "a single number"
