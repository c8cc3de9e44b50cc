"""Each operation must compute what its name says: what was put in its place, and odd arguments, have no bound."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import Apply
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import sipp
from sipp.bounds.chain import chain_obstacle
from sipp.bounds.sound import calls, operations, operator_norms, references

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def body(act: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 3))


def reasons(model: nn.Module, x: Tensor = X[:5]) -> tuple[str, str]:
    """Why T12 and T13 do not speak of the model; empty if they do."""
    weights = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return chain_obstacle(model, weights, x), sipp.sound_bound(model, copy.deepcopy(model), x).reason


def nine(*args: Any, **kwargs: Any) -> Tensor:
    return 9 * args[-1]


def as_if_stock(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], forward: Any) -> None:
    """A forward that was replaced before the library was imported."""
    monkeypatch.setattr(kind, "forward", forward)
    monkeypatch.setitem(calls._STOCK, kind, forward)


def test_a_class_patched_before_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(body(nn.ReLU())) == ("", "")
    as_if_stock(monkeypatch, nn.ReLU, nine)
    assert all("ReLU" in reason and "what its name says" in reason for reason in reasons(body(nn.ReLU())))


def test_an_inherited_forward_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Hardtanh, "forward", nine)
    assert all(reasons(body(nn.ReLU6())))


@pytest.mark.parametrize(
    ("function", "replaced"),
    [("relu", lambda x, inplace=False: 9 * x), ("linear", lambda x, w, b=None: 9 * torch.matmul(x, w.T) + b)],
)
def test_functions_of_pytorch_that_were_replaced(
    function: str, replaced: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, function, replaced)
    assert all("what its name says" in reason for reason in reasons(body(nn.ReLU())))


def test_the_call_of_one_module_that_was_replaced() -> None:
    model = body(nn.ReLU())
    model[1]._call_impl = nine
    assert all(reasons(model))


def test_the_convolution_of_one_module_that_was_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
    assert sipp.sound_bound(model, model, IMAGES).reason == ""
    model[0]._conv_forward = types.MethodType(lambda self, x, w, b: 9 * F.conv2d(x, w, b), model[0])
    assert "Conv2d" in sipp.sound_bound(model, model, IMAGES).reason


def test_only_the_pruned_network_was_replaced() -> None:
    model, odd = body(nn.ReLU()), body(nn.ReLU())
    odd[1]._call_impl = nine
    assert "ReLU" in sipp.sound_bound(model, odd, X[:3]).reason


def test_a_movement_that_does_more_than_move(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_stock(monkeypatch, nn.Flatten, lambda self, x: 10 * x.reshape(x.shape[0], -1))
    assert all("Flatten" in reason for reason in reasons(body(nn.Flatten())))
    as_if_stock(monkeypatch, nn.Flatten, lambda self, x: torch.relu(x))
    assert all("Flatten" in reason for reason in reasons(body(nn.Flatten())))


class StaysInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> StaysInTraining:
        super().train(mode)
        self.bn.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.first(x))


class TrainsInForward(StaysInTraining):
    def train(self, mode: bool = True) -> TrainsInForward:
        return nn.Module.train(self, mode)

    def forward(self, x: Tensor) -> Tensor:
        self.bn.train()
        return super().forward(x)


@pytest.mark.parametrize("kind", [StaysInTraining, TrainsInForward])
def test_batch_norm_that_stays_in_train_mode(kind: type[nn.Module]) -> None:
    assert "BatchNorm1d" in sipp.sound_bound(kind(), kind(), X[:5]).reason


def test_batch_norm_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval()
    assert sipp.sound_bound(model, model, X[:5]).reason == ""
    monkeypatch.setattr(_BatchNorm, "forward", lambda self, x: 9 * x)
    assert "BatchNorm1d" in sipp.sound_bound(model, model, X[:5]).reason


# Arguments.


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.ops.aten.elu.default(x, 1.0, 50.0, 1.0),
        lambda x: torch.ops.aten.elu.default(x.abs(), 1.0, 1.0, 50.0),  # nothing of it shows on these points
        lambda x: torch._C._nn.elu(x.abs(), 1.0, 1.0, 50.0),
        lambda x: torch._C._nn.elu(x, 1.0, 0.0),
        lambda x: torch.softmax(x, 1, torch.float16),
        lambda x: F.softplus(x, 1, 0),
    ],
)
def test_an_argument_that_is_not_understood_leaves_no_bound(function: Callable[[Tensor], Tensor]) -> None:
    assert all(reasons(body(Apply(function))))


@pytest.mark.parametrize("threshold", [0, 3, 20])
def test_softplus_jumps(threshold: int) -> None:
    act = nn.Softplus(threshold=threshold)
    assert all("oftplus" in reason for reason in reasons(body(act)))
    at = torch.tensor([threshold, threshold + 1e-12], dtype=torch.float64)
    assert (act(at)[1] - act(at)[0]).abs() > 2e-9  # it is not 1-Lipschitz


def test_every_operation_with_a_bound_has_a_formula() -> None:
    tables = {*operations._SEVERAL, *operations._WEIGHTED, *operations._GAINS, *operations.IDENTITIES, *operator_norms.SLOPES}
    assert tables <= references._FORMULAS.keys()


OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    *(
        lambda x, name=name: getattr(F, name)(x)
        for name in ("relu", "relu6", "tanh", "sigmoid", "gelu", "silu", "mish")
    ),
    *(
        lambda x, name=name: getattr(F, name)(x)
        for name in ("selu", "hardswish", "hardsigmoid", "softsign", "hardtanh")
    ),
    *(
        nn.LogSigmoid(),
        torch.abs,
        torch.neg,
        lambda x: F.celu(x, 0.5),
        lambda x: F.elu(x, 2.0),
        lambda x: x.clamp(-0.2),
    ),
    *(lambda x: F.hardtanh(x, -0.1, 2.0), lambda x: F.leaky_relu(x, 0.3), lambda x: F.gelu(x, approximate="tanh")),
    *(lambda x: F.softmax(x, 1), lambda x: F.log_softmax(x, -1), lambda x: x.mean((1, 3)), lambda x: x.sum(2, True)),
    *(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), lambda x: F.max_pool2d(x, 2, 1, dilation=2)),
    lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    lambda x: F.avg_pool2d(x, (2, 3), 2, (1, 1), ceil_mode=True),
    *(lambda x: F.adaptive_avg_pool2d(x, (4, 5)), lambda x: F.adaptive_max_pool2d(x, (4, 1))),
    *(lambda x: torch.sub(x, x, alpha=3), lambda x: x / 3 + 2 * x, lambda x: torch.stack([x, 2 * x], -1)),
]


@pytest.mark.parametrize("function", OPERATIONS)
def test_the_formulas_are_those_of_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    for scale in (1.0, 1e-9, 30.0):
        assert sipp.sound_bound(Apply(function), Apply(function), scale * IMAGES).reason == ""


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_the_formula_of_convolutions(mode: Any) -> None:
    conv = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2, padding_mode=mode)
    same = nn.Conv2d(2, 4, (4, 3), padding="same", padding_mode=mode)
    for module in (conv, same):
        assert sipp.sound_bound(module, module, IMAGES).reason == ""


# What the reasons say.


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 2


class Stubborn(nn.Sequential):
    def __getattr__(self, name: str) -> Any:
        if name == "parametrizations":
            raise KeyError(name)  # not an AttributeError
        return super().__getattr__(name)


def test_reasons_name_what_is_in_the_way() -> None:
    model = body(nn.ReLU())
    model[2] = Doubled(8, 3)
    assert "module 2 has a forward of its own" in reasons(model)[0]
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    assert "2.weight is tied to 0.weight" in chain_obstacle(tied, {"0.weight"}, X[:4])
    branching = body(Apply(lambda x: x if x.sum() > 0 else -x))
    assert "plain chains of fully-connected layers only" in reasons(branching)[0]


def test_attributes_that_raise_what_they_like() -> None:
    model = Stubborn(*body(nn.ReLU()))
    assert reasons(model)[1] == ""
