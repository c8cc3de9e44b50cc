"""How the weights of convolutions lie in memory when torch runs a network: as they were given, or in another format."""

from __future__ import annotations

import torch
from torch import nn

Strides = dict[str, tuple[int, ...]]  # of parameters, by name


def strides_of(model: nn.Module) -> Strides:
    """Those of the weights of convolutions that lie in one of torch's two formats."""
    formats = (torch.contiguous_format, torch.channels_last)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 4}
    return {
        name: weight.stride()
        for name, weight in weights.items()
        if any(weight.is_contiguous(memory_format=form) for form in formats)
    }


def other_strides(model: nn.Module, given: Strides) -> list[Strides]:
    """The same weights, all of them in one of torch's two formats, where they are not so already."""
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in model.named_parameters()}
    made = [
        {name: weights[name].contiguous(memory_format=form).stride() for name in given}
        for form in (torch.contiguous_format, torch.channels_last)
    ]
    return [strides for strides in made if strides != given]


def lay_out(model: nn.Module, strides: Strides) -> None:
    """Lays out these parameters with these strides, where they are not so already."""
    for name, parameter in model.named_parameters():
        if name in strides and parameter.stride() != strides[name]:
            made = torch.empty_strided(parameter.shape, strides[name], dtype=parameter.dtype, device="cpu")
            parameter.data = made.copy_(parameter.detach())
