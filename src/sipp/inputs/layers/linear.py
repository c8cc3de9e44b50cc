"""Patches of fully-connected layers: the vectors along the last dimension, told apart by the input they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.patches import WeightUse


def vectors(parameter: str, inputs: Tensor, n_points: int) -> WeightUse:
    """The use of all rows of a weight whose patches are the vectors along the last dimension of `inputs`.

    Points run along the first dimension, one by one or in equal consecutive blocks (windows or frames folded into the
    batch). If that cannot be, the patches stay together and `attributed` is False: a maximum needs no more.
    """
    # an expert that got no tokens has none to attribute
    attributed = n_points == 1 or (inputs.ndim > 1 and inputs.numel() > 0 and inputs.shape[0] % n_points == 0)
    n_blocks = n_points if attributed else 1
    n_patches = inputs.shape[:-1].numel() // n_blocks
    return WeightUse(parameter, inputs.reshape(n_blocks, 1, n_patches, inputs.shape[-1]), attributed=attributed)


def sequences(parameter: str, steps_BTK: Tensor, n_points: int, is_real_BT: Tensor | None = None) -> WeightUse:
    """The use of all rows of a weight whose patches are the steps of sequences, one for each point or together."""
    if len(steps_BTK) == n_points:
        return WeightUse(parameter, steps_BTK[:, None], real_BP=is_real_BT)
    together, real_BP = steps_BTK.flatten(0, 1)[None, None], None if is_real_BT is None else is_real_BT.flatten()[None]
    return WeightUse(parameter, together, attributed=False, real_BP=real_BP)


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
    yield vectors("weight", inputs, n_points)


def by_size(shape: tuple[int, ...]) -> str:
    """A shape in words: 200 x 9."""
    return " x ".join(map(str, shape)) or "a single number"
