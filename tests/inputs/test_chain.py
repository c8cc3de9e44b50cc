"""Only what is exactly a chain of fully-connected layers counts as one (T12)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import Apply
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sipp
from sipp.inputs.data import as_batch
from sipp.inputs.structure import why_no_chain
from sipp.inputs.trace import trace_layers


def recorded(model: Any, batch: Any) -> Any:
    return trace_layers(model, (), batch).recording


POINTS = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))
BATCH = as_batch(POINTS[:4], 0, "points")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def obstacle(model: nn.Module) -> str:
    weights = {f"{i}.weight" for i in (0, 2)} | {"first.weight", "second.weight"}
    return why_no_chain(model, recorded(model, BATCH), weights)


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Tenfold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


def hooked() -> nn.Module:
    model = plain()
    model[1].register_forward_hook(lambda module, args, output: 30 * output)
    return model


def patched() -> nn.Module:
    model = plain()
    model[1].forward = types.MethodType(lambda self, x: 30 * torch.sin(x), model[1])
    return model


def subclassed() -> nn.Module:
    model = plain()
    model[2] = Tenfold(8, 3)
    return model


def parametrised() -> nn.Module:
    model = plain()
    parametrizations.weight_norm(model[2], "weight")
    return model


DISGUISES = [hooked, patched, subclassed, parametrised]


def test_plain_chains_are_accepted() -> None:
    assert obstacle(plain()) == ""
    for between in (F.relu, torch.tanh, lambda x: F.dropout(x, training=False), lambda x: F.dropout(x, 0.5, False)):
        assert obstacle(Net(between)) == ""
    assert obstacle(Net(lambda x: F.leaky_relu(x, 0.3))) == ""


@pytest.mark.parametrize("make", DISGUISES)
def test_modules_with_a_changed_forward_are_no_chain(make: Callable[[], nn.Module]) -> None:
    assert obstacle(make()) != ""


@pytest.mark.parametrize("make", [hooked, patched])
def test_no_network_bound_is_met_for_modules_with_a_changed_forward(make: Callable[[], nn.Module]) -> None:
    options = {"keep": 0.5, "method": "sipp-det", "delta": 0.1, "c_constant": 1e6}
    pruned = sipp.prune(make(), POINTS, holdout=POINTS + 1, **options)
    assert not pruned.bound.met and pruned.bound.reason
    assert pruned.measured.epsilon is None
    assert sipp.prune(plain(), POINTS, **options).bound.met


def test_unsuitable_functions_in_a_chain_are_named() -> None:
    assert "op mul" in obstacle(Net(F.dropout))  # training=True unless said otherwise
    assert "mul" in obstacle(Net(lambda x: 3 * x))
    assert "_to_copy" in obstacle(nn.Sequential(nn.Linear(6, 8), Apply(lambda x: torch.softmax(x, 1, torch.half))))
    assert "slope" in obstacle(Net(lambda x: F.leaky_relu(x, 3.0)))
    assert "the others in its batch" in obstacle(Net(lambda x: torch.softmax(x, 0)))
    assert obstacle(Net(lambda x: x.t().reshape(x.shape))) != ""
    assert "op sum" in obstacle(Net(lambda x: x if x.sum() > 0 else 3 * x))
    assert "layer before it alone" in obstacle(Net(lambda x: x + torch.relu(x)))


def test_one_weight_in_two_places_is_no_chain() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    assert "op addmm in module 2 (Linear): 0.weight is used twice" in why_no_chain(
        tied, recorded(tied, BATCH), {"0.weight"}
    )
    free = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    assert "its weight was not scored" in why_no_chain(free, recorded(free, BATCH), {"0.weight"})


@pytest.mark.parametrize(
    "function", [lambda x: torch.ops.aten.elu.default(x, 1.0, 50.0, 1.0), nn.Softplus(), torch.sin]
)
def test_functions_that_are_not_known_to_be_flat(function: Callable[[Tensor], Tensor]) -> None:
    assert obstacle(Net(function)) != ""


class Borrowed(Net):
    """The bias of the second layer is made of the first one's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.second.weight, 100 * self.first.weight.sum() * torch.ones(3).to(x))


def test_bits_read_as_another_type_are_an_obstacle() -> None:
    assert "data type" in obstacle(Net(lambda h: torch.sigmoid(h.view(torch.int32))))


def test_a_bias_made_of_other_weights_is_an_obstacle() -> None:
    assert "bias" in obstacle(Borrowed(F.relu))
