"""Patches of convolutions: the windows of the padded input, as a strided view without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs.layers.registry import Adapter, one_input, one_weight
from sipp.inputs.patches import WeightUse, by_size

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def conv_uses(module: Conv, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Iterator[WeightUse]:
    """One use: the windows of each group of channels, because filters read only the channels of their own group."""
    inputs = one_input(args, kwargs)
    n_axes = len(module.kernel_size)
    if inputs.ndim == n_axes + 1:  # an unbatched image
        if n_points == inputs.shape[0] > 1:
            raise DataError(
                f"is given one image without a batch dimension, so its {n_points} channels would count as images",
                fix="stack the images: torch.stack(list)",
            )
        inputs = inputs.unsqueeze(0)
    _check(module, inputs)
    n_images = len(inputs)
    attributed = n_images % n_points == 0
    padded = _pad(module, inputs)
    windows, is_own_copy = _windows(module, padded, n_points if attributed else 1), padded is not inputs
    yield WeightUse("weight", windows, n_position_dims=1 + n_axes, attributed=attributed, is_own_copy=is_own_copy)


def _check(module: Conv, inputs: Tensor) -> None:
    """Raises unless the input has the rank and the channels of the layer: no view is taken of any other."""
    n_axes = len(module.kernel_size)
    n_channels = module.groups * module.weight.shape[1]
    if inputs.ndim != n_axes + 2:
        raise DataError(
            f"takes inputs of {n_axes + 2} dimensions (batch, channels, size), or {n_axes + 1} without a batch, not "
            f"{by_size(inputs.shape)}"
        )
    if inputs.shape[1] != n_channels:
        raise DataError(
            f"takes {n_channels} channels in dimension 1, not {inputs.shape[1]} (its input is {by_size(inputs.shape)})"
        )


def _pad(module: Conv, inputs: Tensor) -> Tensor:
    """The input with the layer's own padding made explicit, and no gaps in the memory of a point.

    Ranges are read from the memory that windows view; a slice of a larger tensor would include values of others.
    """
    pairs: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):  # F.pad lists the last axis first
        if module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            pairs += [total // 2, total - total // 2]
        else:
            one = 0 if module.padding == "valid" else int(module.padding[axis])
            pairs += [one, one]
    if not any(pairs):
        span = 1 + sum((size - 1) * stride for size, stride in zip(inputs.shape[1:], inputs.stride()[1:]))
        return inputs if span == inputs.shape[1:].numel() else inputs.contiguous()
    return F.pad(inputs, pairs, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _windows(module: Conv, padded: Tensor, n_blocks: int) -> Tensor:
    """A view (B, G, images, *out, C/G, *kernel) of the padded input (images of all, C, *size), in B equal blocks.

    Images folded into the batch are one more position of their point.
    """
    n_axes = len(module.kernel_size)
    per_group = padded.shape[1] // module.groups
    strides = padded.stride()
    reach = [module.dilation[a] * (module.kernel_size[a] - 1) + 1 for a in range(n_axes)]
    if any(padded.shape[2 + a] < reach[a] for a in range(n_axes)):
        raise DataError(
            f"has a kernel of {by_size(tuple(reach))}, larger than its padded input ({by_size(padded.shape[2:])})"
        )
    n_each = padded.shape[0] // n_blocks
    n_out = [(padded.shape[2 + a] - reach[a]) // module.stride[a] + 1 for a in range(n_axes)]
    return padded.as_strided(
        (n_blocks, module.groups, n_each, *n_out, per_group, *module.kernel_size),
        (
            n_each * strides[0],
            per_group * strides[1],
            strides[0],
            *(module.stride[a] * strides[2 + a] for a in range(n_axes)),
            strides[1],
            *(module.dilation[a] * strides[2 + a] for a in range(n_axes)),
        ),
        padded.storage_offset(),
    )


CONV: Adapter = Adapter(one_weight, conv_uses)
