"""Only what is exactly a chain of fully-connected layers counts as one (T12)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sipp
from sipp.inputs.data import as_batch
from sipp.inputs.structure import why_no_chain
from sipp.inputs.trace import trace_layers

POINTS = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers with something between them; the second may have another bias."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Borrowed(Net):
    """The bias of the second layer is made of the first one's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.first(x)), self.second.weight, 100 * self.first.weight.sum() * torch.ones(3).to(x))


class Tenfold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


def changed(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    """A chain, and something done to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    change(model)
    return model


def hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, output: 30 * output)


def patch(model: nn.Sequential) -> None:
    model[1].forward = lambda x: 30 * torch.sin(x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def obstacle(model: nn.Module) -> str:
    recording = trace_layers(model, (), as_batch(POINTS[:4], 0, "points")).recording
    return why_no_chain(model, recording, {"0.weight", "2.weight", "first.weight", "second.weight"})


@pytest.mark.parametrize(
    "between",
    [F.relu, torch.tanh, lambda x: F.leaky_relu(x, 0.3), lambda x: F.dropout(x, 0.5, False), lambda x: x.view(x.shape)],
)
def test_plain_chains_are_accepted(between: Callable[[Tensor], Tensor]) -> None:
    assert obstacle(Net(between)) == ""


NO_CHAINS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (lambda: changed(hook), "op mul in module 1"),
    "patched": (lambda: changed(patch), "op sin in module 1"),
    "subclass": (lambda: nn.Sequential(Tenfold(6, 8), nn.Linear(8, 3)), "op mul in module 0"),
    "parametrised": (lambda: changed(lambda m: parametrizations.weight_norm(m[2], "weight")), "was not scored"),
    "not scored": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.ReLU(), nn.Linear(6, 6)), "was not scored"),
    "tied": (tied, "op addmm in module 2 (Linear): 0.weight is used twice"),
    "bias of weights": (lambda: Borrowed(F.relu), "its bias is not a parameter"),
    "dropout that is on": (lambda: Net(F.dropout), "op mul"),  # training=True unless said otherwise
    "scaled": (lambda: Net(lambda x: 3 * x), "op mul"),
    "half": (lambda: Net(lambda x: torch.softmax(x, 1, torch.half).float()), "_to_copy"),
    "bits": (lambda: Net(lambda x: torch.sigmoid(x.view(torch.int32))), "data type"),
    "steep": (lambda: Net(lambda x: F.leaky_relu(x, 3.0)), "slope"),
    "steep elu": (lambda: Net(lambda x: torch.ops.aten.elu.default(x, 1.0, 50.0, 1.0)), "slope"),
    "over the batch": (lambda: Net(lambda x: torch.softmax(x, 0)), "the others in its batch"),
    "other order": (lambda: Net(lambda x: x.t().reshape(x.shape)), "op t in"),
    "by values": (lambda: Net(lambda x: x if x.sum() > 0 else 3 * x), "op sum"),
    "sum": (lambda: Net(lambda x: x + torch.relu(x)), "layer before it alone"),
    "softplus": (lambda: Net(nn.Softplus()), "op softplus"),
}


@pytest.mark.parametrize("case", NO_CHAINS)
def test_what_is_no_chain_is_named(case: str) -> None:
    make, why = NO_CHAINS[case]
    assert why in obstacle(make().eval())


@pytest.mark.parametrize("change", [hook, patch])
def test_no_network_bound_is_met_for_modules_with_a_changed_forward(change: Callable[[nn.Sequential], None]) -> None:
    options = {"keep": 0.5, "method": "sipp-det", "delta": 0.1, "c_constant": 1e6}
    pruned = sipp.prune(changed(change), POINTS, holdout=POINTS + 1, **options)
    assert not pruned.bound.met and pruned.bound.reason
    assert pruned.measured.epsilon is None
    assert sipp.prune(changed(lambda model: None), POINTS, **options).bound.met
