"""Scores of weights alone, without a look at the data: magnitude, random, LAMP and ERK."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.results import numerics
from sipp.scoring.task import ScoringTask


def magnitude(task: ScoringTask) -> dict[str, Tensor]:
    """The magnitude of every prunable weight, {parameter name: tensor of its shape}; data is not looked at."""
    return {name: parameter.detach().to(numerics.SCORE_DTYPE).abs() for name, parameter in task.parameters().items()}


def random(task: ScoringTask) -> dict[str, Tensor]:
    """A uniform random score for every prunable weight, {parameter name: tensor of its shape}."""
    generator = torch.Generator().manual_seed(task.seed)
    return {
        name: torch.rand(parameter.shape, generator=generator, dtype=numerics.SCORE_DTYPE, device="cpu").to(
            parameter.device
        )
        for name, parameter in task.parameters().items()
    }


def lamp(task: ScoringTask) -> dict[str, Tensor]:
    """w_j^2 / sum of w_k^2 over the k of its layer with |w_k| >= |w_j|, {parameter name: tensor of its shape}.

    Lee et al. 2021: magnitudes relative to the larger ones of their layer are comparable across layers.
    The largest weight of a layer has the score 1, so no layer dies while another has weights to give. Equal magnitudes
    are ordered by position, the first counts as the larger. Zeros score 0.
    """
    return {name: shares_of(parameter.detach()) for name, parameter in task.parameters().items()}


def shares_of(weight: Tensor) -> Tensor:
    """The scores of one layer's weights, or of other numbers used in their place."""
    magnitude = weight.to(numerics.BOUND_DTYPE).abs().flatten()
    largest = magnitude.amax()
    squares = (magnitude / largest).square() if bool(largest > 0) else magnitude  # no overflow, no underflow of all
    order = torch.argsort(squares, descending=True, stable=True)
    falling = squares[order]
    shares = torch.where(falling > 0, falling / falling.cumsum(0), 0.0)
    return torch.empty_like(shares).scatter_(0, order, shares).view(weight.shape)


def erk(task: ScoringTask) -> dict[str, Tensor]:
    """(sum of a layer's sizes) / (place - 1/2), places drawn at random: {parameter name: tensor of its shape}.

    Erdős–Rényi-Kernel (Evci et al. 2020): random weights, each layer's share follows the sum of its dimensions. It
    asks for a density proportional to (n_out + n_in + height + width) / (n_out n_in height width), at most
    1; what exceeds 1 goes to the other layers in the same proportion. So the number of kept weights is proportional to
    the sum of the sizes. The weight at place i is the i-th that its layer keeps, and its score is that sum over i.
    Keeping the largest scores yields these counts for any budget, each rounded and the total exact.
    (The paper's text has 1 - sum / product, which is the sparsity; its code has the density, as here.)

    Sizes are those of the parameter: of a grouped convolution n_in is that of one group. Within a layer the places are
    random, as at initialisation in the paper; weights that are 0 come last, so a pruned network is pruned further
    with the same shares.
    """
    generator = torch.Generator().manual_seed(task.seed)
    return {name: _of_layer(parameter.detach(), generator) for name, parameter in task.parameters().items()}


def _of_layer(weight: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(weight.numel(), generator=generator, dtype=numerics.BOUND_DTYPE, device="cpu")
    order = torch.argsort(torch.where(weight.flatten().cpu() != 0, drawn, 1 + drawn), stable=True)
    falling = sum(weight.shape) / (numerics.integers(0, len(order)).to(numerics.BOUND_DTYPE) + 0.5)
    return torch.empty_like(falling).scatter_(0, order, falling).view(weight.shape).to(weight.device)
