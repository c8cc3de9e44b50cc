"""What tests of repair share: inputs that depend on each other, their split, and masks with the same share of all."""

from typing import Any

import torch
from oracles.refit import Array
from torch import Tensor, nn

from sipp.inputs.data import data_of
from sipp.inputs.layers import find_prunable_layers
from sipp.repairing import DataSplit, split_data


def alike(*shape: int, seed: int = 0) -> Tensor:
    """Points whose neighbouring features are alike and not centred, so that one makes up for another."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise + 0.9 * noise.roll(1, 1) + 0.5


def f64(tensor: Tensor) -> Array:
    found: Array = tensor.detach().double().numpy()
    return found


def split_of(data: Any) -> DataSplit:
    return split_data(data_of(data, device=torch.device("cpu")))


def split_positions(n: int) -> tuple[list[int], list[int], list[int]]:
    """The numbers of the fit, validation and test points among n different ones."""
    split = split_of(torch.arange(float(n))[:, None])
    parts = (split.fit, split.validation, split.test)
    fit, validation, test = ([int(x) for batch in part for x in batch.args[0].flatten()] for part in parts)
    return fit, validation, test


def fit_points(points: Tensor) -> Tensor:
    return points[split_positions(len(points))[0]]


def even_masks(net: nn.Module, keep: float = 0.5) -> dict[str, Tensor]:
    """The largest weights of each layer, the same share of all."""
    names = [weight.name for layer in find_prunable_layers(net) for weight in layer.weights.values()]
    masks = {}
    for name in names:
        size = net.get_parameter(name).detach().abs()
        at = size.flatten().topk(round(keep * size.numel())).indices
        masks[name] = torch.zeros(size.numel(), dtype=torch.bool).index_fill(0, at, True).view_as(size)
    return masks
