"""Stores the model's own weights while a plan runs: packed, or in the memory format that is fastest for torch.

Packed weights are stored as nonzero values and one bit per weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sipp.native import memory

Strides = dict[str, tuple[int, ...]]  # of parameters, by name
MOST_KEPT = 0.9  # parameters with more nonzeros are not packed


@dataclass(frozen=True)
class PackedParameter:
    """A parameter without its zeros."""

    shape: torch.Size
    values: Tensor
    bits: np.ndarray

    @property
    def n_bytes(self) -> int:
        return int(self.values.nbytes + self.bits.nbytes)


def pack_parameters(model: nn.Module, held: set[int], packed: dict[str, PackedParameter]) -> None:
    """Frees the parameters that are worth packing, and stores their values in `packed` by name (-0.0 counts as zero).

    Skips parameters whose memory (`held`, addresses) is used elsewhere: packing those would save nothing.
    """
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if weight.untyped_storage().data_ptr() in held:
            continue
        is_kept = weight != 0
        if weight.numel() and float(is_kept.sum()) <= MOST_KEPT * weight.numel():
            bits = np.packbits(is_kept.flatten().numpy())
            packed[name] = PackedParameter(weight.shape, weight[is_kept].clone(), bits)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")  # not earlier: Ctrl-C may end this


def unpack_parameters(model: nn.Module, packed: dict[str, PackedParameter]) -> None:
    """Restores the parameters, and removes them from `packed`."""
    for name, parameter in model.named_parameters():
        if name in packed:
            kept = packed[name]
            is_kept = torch.from_numpy(np.unpackbits(kept.bits, count=kept.shape.numel()).astype(bool))
            weight = memory.zeros(*kept.shape, dtype=kept.values.dtype)
            weight.view(-1)[is_kept] = kept.values
            parameter.data = weight
            del packed[name]  # not earlier: the allocation above may fail


def conv_strides(model: nn.Module) -> Strides:
    """The strides of convolution weights that are contiguous or channels-last."""
    formats = (torch.contiguous_format, torch.channels_last)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 4}
    return {
        name: weight.stride()
        for name, weight in weights.items()
        if any(weight.is_contiguous(memory_format=form) for form in formats)
    }


def other_formats(model: nn.Module, current: Strides) -> list[Strides]:
    """The strides of the same weights, all contiguous or all channels-last, where that differs from now."""
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in model.named_parameters()}
    choices = [
        {name: weights[name].contiguous(memory_format=form).stride() for name in current}
        for form in (torch.contiguous_format, torch.channels_last)
    ]
    return [strides for strides in choices if strides != current]


def set_strides(model: nn.Module, strides: Strides) -> None:
    """Copies these parameters into memory with these strides, if they have others."""
    for name, parameter in model.named_parameters():
        if name in strides and parameter.stride() != strides[name]:
            moved = torch.empty_strided(parameter.shape, strides[name], dtype=parameter.dtype, device="cpu")
            parameter.data = moved.copy_(parameter.detach())
