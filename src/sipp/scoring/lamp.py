"""LAMP (Lee et al. 2021): magnitudes relative to the larger ones of the same layer, comparable across layers."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.results import numerics
from sipp.scoring.task import ScoringTask


def lamp(task: ScoringTask) -> dict[str, Tensor]:
    """w_j^2 / sum of w_k^2 over the k of its layer with |w_k| >= |w_j|, {parameter name: tensor of its shape}.

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
