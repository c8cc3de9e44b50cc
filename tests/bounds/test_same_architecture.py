"""`assess` speaks of the dense network with other weights, and refuses any other network (T17)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError

X = torch.rand(120, 5, generator=torch.Generator().manual_seed(0)) - 0.3


def net(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), activation or nn.ReLU(), nn.Linear(7, 3))


def slightly_changed(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[0].weight[0, 0] *= 0.999
    return model


class Tied(nn.Module):
    def __init__(self, ties: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.load_state_dict(self.a.state_dict())
        if ties:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Renamed(nn.Sequential):
    """The same modules, and something more in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def other_slope() -> nn.Module:
    return slightly_changed(net(nn.LeakyReLU(0.5)))


@pytest.mark.parametrize(
    ("dense", "given", "word"),
    [
        (lambda: net(), lambda: slightly_changed(net(nn.Tanh())), r"1 is ReLU\(\) in the dense network, Tanh\(\)"),
        (lambda: net(nn.LeakyReLU(0.1)), other_slope, r"negative_slope=0.1\) in the dense network"),
        (lambda: net(), lambda: Renamed(*net()), "Renamed"),
        (lambda: net(), lambda: nn.Sequential(*net(), nn.Tanh()), "3 is missing"),
        (lambda: net(), lambda: nn.Sequential(*net(), nn.Linear(3, 3)), "in the pruned network only"),
    ],
)
def test_a_network_that_computes_something_else_is_refused(
    dense: Callable[[], nn.Module], given: Callable[[], nn.Module], word: str
) -> None:
    """A record for its weights alone would be "met" where all inputs violate it."""
    with pytest.raises(ModelError, match=word):
        sipp.assess(dense(), given(), X)


def test_every_name_of_a_tied_weight_is_compared() -> None:
    given = Tied(ties=False)
    assert sipp.assess(Tied(ties=True), given, X).layers[0].eps == 0  # the same numbers, in two places
    with torch.no_grad():
        given.b.weight.zero_()
    with pytest.raises(ModelError, match="tie"):
        sipp.assess(Tied(ties=True), given, X)


@pytest.mark.parametrize(
    "given", [nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, 3)), net().to("meta")], ids=["lazy", "meta"]
)
def test_networks_without_plain_numbers_are_refused_by_name(given: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"pruned: 0\.weight (has no shape yet|is on the meta device)"):
        sipp.assess(net(), given, X)


def test_a_copy_in_another_precision_and_random_layers_are_the_same_network() -> None:
    dense = nn.Sequential(net(), nn.Dropout(0.5))
    for given in (copy.deepcopy(dense), copy.deepcopy(dense).double(), copy.deepcopy(dense).bfloat16()):
        assert sipp.assess(dense, given, X).kept > 0
