"""Averages (EMA, SWA) of a network that is pruned while it trains: zero where the network is, if they are held too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sipp
from sipp.errors import ModelError, OptionError
from sipp.pruning.masking import hold, masks_of

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "EMA": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "own": lambda net: AveragedModel(net, avg_fn=lambda average, new, n: 0.5 * average + 0.5 * new),
    "with buffers": lambda net: AveragedModel(net, use_buffers=True),
}
X, Y = torch.rand(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def loop(net: nn.Module, update: Callable[[int], object]) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
        update(number)

    return step, optimizer


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def alive(net: nn.Module, masks: dict[str, Tensor]) -> int:
    """Weights outside the masks that are not zero."""
    return sum(int(torch.count_nonzero(net.get_parameter(name)[~mask])) for name, mask in masks.items())


@pytest.mark.parametrize("start", [0, 15])
@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_that_is_given_is_zero_where_the_network_is(kind: str, start: int) -> None:
    net = made()
    average = AVERAGES[kind](net)

    def update(number: int) -> None:
        if number >= start:
            average.update_parameters(net)
            average(X)
            assert alive(average.module, masks_of(net)) == 0

    step, optimizer = loop(net, update)
    done = sipp.gradual(net, step, X, keep=0.3, steps=20, optimizer=optimizer, average=average, method="magnitude")
    assert alive(average.module, done.masks) == alive(net, done.masks) == 0
    assert any(bool(average.module.get_parameter(key)[mask].any()) for key, mask in done.masks.items())
    assert masks_of(average) == {} and list(average.module.state_dict()) == list(net.state_dict())
    average.update_parameters(net)  # both are plain again
    assert int(average.n_averaged) == 20 - start + 1 and alive(average.module, done.masks) == 0


def test_an_average_that_is_not_given_is_left_alone() -> None:
    net = made()
    average = AveragedModel(net)
    step, optimizer = loop(net, lambda _: average.update_parameters(net))
    done = sipp.gradual(net, step, X, keep=0.3, steps=10, optimizer=optimizer, method="magnitude")
    assert alive(net, done.masks) == 0 and alive(average.module, done.masks) > 0 and masks_of(average) == {}


def test_what_is_no_average_is_refused_before_any_training() -> None:
    net = made()
    held = copy.deepcopy(net)
    hold(held, {"0.weight": torch.ones(8, 6, dtype=torch.bool)})
    steps: list[int] = []
    wrongs: list[Any] = ["ema", [None], net, nn.Linear(2, 2), held]
    for wrong in wrongs:
        with pytest.raises((OptionError, ModelError)) as caught:
            sipp.gradual(net, steps.append, X, keep=0.5, steps=4, average=wrong)
        assert "average" in str(caught.value)
    assert steps == []
