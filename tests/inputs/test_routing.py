"""Models whose control flow depends on values are recognised, because a few points do not show what others do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sipp.inputs.layer_checks import OperationRecorder


def depends_on_values(forward: Callable[[Tensor], object]) -> bool:
    routing, x = OperationRecorder([], follows=True), torch.randn(3, 4)
    with torch.no_grad(), routing:
        routing.follow(((x,), {}))
        forward(x)
    return routing.depends_on_values


BUFFER, WEIGHT = torch.zeros(3, 4), nn.Parameter(torch.ones(4, 4))


def through_a_view(x: Tensor) -> bool:
    BUFFER[:, 1:3].copy_(x[:, :2])
    return bool(BUFFER.sum() > 0)


def through_a_list(x: Tensor) -> bool:
    zeros = [torch.zeros(3, 4)]
    torch._foreach_add_(zeros, [x])
    return bool(zeros[0].sum() > 0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: bool((nn.functional.linear(x, WEIGHT)).relu().max() > 1),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.zeros(3, 4).add_(x).sum().item(),
        lambda x: bool(torch.where(torch.arange(4) > 1, x, 0.0).any()),
        lambda x: bool(nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).sum() > 0),
        through_a_view,
        through_a_list,
    ],
)
def test_control_flow_that_depends_on_values_is_found(forward: Callable[[Tensor], object]) -> None:
    assert depends_on_values(forward)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: bool((torch.arange(x.shape[1]) > 2).all()) and x,  # as transformers asks of positions
        lambda x: x[:, torch.arange(4) > 1],
        lambda x: x @ WEIGHT if bool(WEIGHT.sum() > 0) else x,
        lambda x: x[:, torch.tensor([1, 2])],
    ],
)
def test_control_flow_by_positions_or_weights_is_not_flagged(forward: Callable[[Tensor], object]) -> None:
    assert not depends_on_values(forward)
