"""Stores the model's own weights without their zeros while plans run: as values, and one bit per weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sipp.native import memory

MOST_KEPT = 0.9  # parameters with more nonzeros are not packed


@dataclass(frozen=True)
class PackedParameter:
    """A parameter without its zeros."""

    shape: torch.Size
    values: Tensor
    bits: Tensor  # uint8: eight weights each


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
            bits = torch.from_numpy(np.packbits(is_kept.flatten().numpy()))
            packed[name] = PackedParameter(weight.shape, weight[is_kept].clone(), bits)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")  # not earlier: Ctrl-C may end this


def unpack_parameters(model: nn.Module, packed: dict[str, PackedParameter]) -> None:
    """Restores the parameters, and removes them from `packed`."""
    for name, parameter in model.named_parameters():
        if name in packed:
            kept = packed[name]
            is_kept = torch.from_numpy(np.unpackbits(kept.bits.numpy(), count=kept.shape.numel()).astype(bool))
            weight = memory.zeros(*kept.shape, dtype=kept.values.dtype)
            weight.view(-1)[is_kept] = kept.values
            parameter.data = weight
            del packed[name]  # not earlier: the allocation above may fail
