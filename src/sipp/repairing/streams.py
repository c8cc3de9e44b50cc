"""Residual streams: what the output of a layer is added to, as patches of the layer (T21)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sipp.inputs import Batch, ModelMap, Sum, WeightUse, with_padding_zeroed

SMALLEST_SCALE = 1e-2  # of the largest: rows that a norm scales by less correct nothing


def streams_in(found: ModelMap, *, inputs_differ: bool) -> dict[str, Sum]:
    """By weight, the residual stream to which its layer's output is added and which depends on earlier weights.

    The sum must be met before the block of the layer ends. With `inputs_differ`, weights of earlier blocks count too,
    which made the inputs.
    """
    return {
        weight: one
        for weight, one in found.sums.items()
        if one.in_block and (one.latest or (inputs_differ and one.of_inputs))
    }


def stream_as_use(model: nn.Module, stream: Sum, tensor: Tensor, like: WeightUse, batch: Batch) -> WeightUse:
    """A stream in units of the layer's output, laid out like a use of it, with rows in place of the fan-in."""
    module = model.get_submodule(stream.module)
    tensor = _in_units_of_output(model, stream, module, tensor)
    n_blocks = len(like.windows)  # the points; 1 if they cannot be told apart
    if isinstance(module, _ConvNd):
        if tensor.ndim == len(module.kernel_size) + 1:  # one image without a batch dimension
            tensor = tensor[None]
        images = tensor.unflatten(0, (n_blocks, -1)).movedim(2, 1)  # B x F x images x size
        windows = images.unflatten(1, (module.groups, -1)).movedim(2, -1)
        return WeightUse("", windows, n_position_dims=len(module.kernel_size) + 1)
    if isinstance(module, nn.MultiheadAttention) and tensor.ndim == 3 and not module.batch_first:
        tensor = tensor.transpose(0, 1)
    use = WeightUse("", tensor.reshape(n_blocks, 1, -1, tensor.shape[-1]), attributed=like.attributed)
    return with_padding_zeroed(use, batch)


def _in_units_of_output(model: nn.Module, stream: Sum, module: nn.Module, tensor: Tensor) -> Tensor:
    """The stream divided by the scales of the norms behind the layer, row by row."""
    if not stream.norms:
        return tensor
    scale_F = torch.ones((), dtype=torch.float64, device=tensor.device)
    for name in stream.norms:
        norm: Any = model.get_submodule(name)
        by_norm_F = (norm.running_var.double() + norm.eps).rsqrt()
        scale_F = scale_F * (by_norm_F if norm.weight is None else by_norm_F * norm.weight.detach().double())
    is_large_F = scale_F.abs() > SMALLEST_SCALE * scale_F.abs().max()
    factor_F = torch.where(is_large_F, scale_F.reciprocal(), 0.0).to(tensor.dtype)
    return tensor * factor_F.view(-1, *[1] * (tensor.ndim - 2 if isinstance(module, _ConvNd) else 0))
