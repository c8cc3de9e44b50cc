"""The model's own weights while a plan runs: packed, or in the memory format that is fastest for torch.

Packed they wait as values and one bit for each weight. Those of convolutions can lie in another memory format than
they were given in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sipp.native import memory

Strides = dict[str, tuple[int, ...]]  # of parameters, by name
MOST_KEPT = 0.9  # of a parameter: with more, it stays as it is


@dataclass(frozen=True)
class PackedParameter:
    """A parameter without its zeros."""

    shape: torch.Size
    values: Tensor
    bits: np.ndarray

    @property
    def n_bytes(self) -> int:
        return int(self.values.nbytes + self.bits.nbytes)


def pack_parameters(model: nn.Module, held: set[int]) -> dict[str, PackedParameter]:
    """Empties the parameters that have zeros to leave out (-0.0 too), and gives what they were, by name.

    But not those whose memory is `held` by others (addresses): it would not get less.
    """
    packed = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if weight.untyped_storage().data_ptr() in held:
            continue
        is_kept = weight != 0
        if weight.numel() and float(is_kept.sum()) <= MOST_KEPT * weight.numel():
            bits = np.packbits(is_kept.flatten().numpy())
            packed[name] = PackedParameter(weight.shape, weight[is_kept].clone(), bits)
    for name, parameter in model.named_parameters():
        if name in packed:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")
    return packed


def unpack_parameters(model: nn.Module, packed: dict[str, PackedParameter]) -> None:
    """Puts the parameters back as they were, and forgets what they were."""
    for name, parameter in model.named_parameters():
        if name in packed:
            kept = packed[name]
            is_kept = torch.from_numpy(np.unpackbits(kept.bits, count=kept.shape.numel()).astype(bool))
            weight = memory.zeros(*kept.shape, dtype=kept.values.dtype)
            weight.view(-1)[is_kept] = kept.values
            parameter.data = weight
            del packed[name]  # not before: memory may end


def conv_strides(model: nn.Module) -> Strides:
    """Those of the weights of convolutions that lie in one of torch's two formats."""
    formats = (torch.contiguous_format, torch.channels_last)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 4}
    return {
        name: weight.stride()
        for name, weight in weights.items()
        if any(weight.is_contiguous(memory_format=form) for form in formats)
    }


def other_formats(model: nn.Module, current: Strides) -> list[Strides]:
    """The same weights, all of them in one of torch's two formats, where they are not so already."""
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in model.named_parameters()}
    choices = [
        {name: weights[name].contiguous(memory_format=form).stride() for name in current}
        for form in (torch.contiguous_format, torch.channels_last)
    ]
    return [strides for strides in choices if strides != current]


def set_strides(model: nn.Module, strides: Strides) -> None:
    """Lays out these parameters with these strides, where they are not so already."""
    for name, parameter in model.named_parameters():
        if name in strides and parameter.stride() != strides[name]:
            moved = torch.empty_strided(parameter.shape, strides[name], dtype=parameter.dtype, device="cpu")
            parameter.data = moved.copy_(parameter.detach())
