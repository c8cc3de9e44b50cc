"""A network with every kind of entry that a saved file may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

import sipp


def network() -> tuple[nn.Module, dict[str, Tensor]]:
    """A network with sparse, dense, tied, integer, bool, scalar and empty tensors, in all encodings; and its masks."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 40, bias=False), nn.Linear(60, 50))
    net.register_parameter("tied", net[2].weight)
    net.register_buffer("flags", torch.tensor([True, False, True]))
    net.register_buffer("none", torch.zeros(0, 3, dtype=torch.float32))
    masks = {}
    with torch.no_grad():
        for name, keep in (("0.weight", 0.1), ("2.weight", 0.9), ("3.weight", 0.5)):
            weight = net.get_parameter(name)
            weight.copy_(torch.randn(weight.shape, generator=generator))
            masks[name] = torch.rand(weight.shape, generator=generator) < keep
            weight.mul_(masks[name])  # leaves some -0.0 outside of the mask: the mask gets positions of its own
    return net, masks


def with_masks(net: nn.Module, masks: Mapping[str, Tensor]) -> sipp.Pruned:
    """The record of a pruning that ended with this network and these masks."""
    return replace(sipp.prune(nn.Linear(4, 2), None, keep=0.5, method="magnitude"), model=net, masks=dict(masks))
