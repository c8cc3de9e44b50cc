"""Replaced operations, odd arguments and train mode have no bound."""

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


def test_a_class_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(body(nn.ReLU())) == ("", "")
    monkeypatch.setattr(nn.ReLU, "forward", nine)
    assert all("forward of ReLU that was replaced" in reason for reason in reasons(body(nn.ReLU())))


def test_an_inherited_forward_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Hardtanh, "forward", nine)
    assert all(reasons(body(nn.ReLU6())))


def test_a_function_of_pytorch_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = body(Apply(lambda x: F.relu(x)))
    assert reasons(model) == ("", "")
    monkeypatch.setattr(F, "relu", lambda x: 9 * x)
    assert "mul" in reasons(model)[0]
    assert [node.op for node in sipp.sound_bound(model, model, X[:3]).nodes] == ["linear", "mul", "linear"]


def test_the_call_of_one_module_that_was_replaced() -> None:
    model = body(nn.ReLU())
    model[1]._call_impl = nine
    assert all(reasons(model))


def test_the_convolution_of_one_module_that_was_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
    assert sipp.sound_bound(model, model, IMAGES).reason == ""
    model[0]._conv_forward = types.MethodType(lambda self, x, w, b: 9 * F.conv2d(x, w, b), model[0])
    assert "in the place of its own in module 0" in sipp.sound_bound(model, model, IMAGES).reason


def test_only_the_pruned_network_was_replaced() -> None:
    model, odd = body(nn.ReLU()), body(nn.ReLU())
    odd[1]._call_impl = nine
    assert "in the place of its own in module 1 of the pruned" in sipp.sound_bound(model, odd, X[:3]).reason


def test_a_view_that_reinterprets_bits_has_no_bound() -> None:
    cast = Apply(lambda x: x.view(torch.float32))
    assert "it does more than move values" in sipp.sound_bound(cast, cast, X[:1]).reason


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


class TrainsForAMoment(TrainsInForward):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.bn.eval()
        return out


class AlwaysDrops(nn.Dropout):
    def train(self, mode: bool = True) -> AlwaysDrops:
        return super().train(True)


@pytest.mark.parametrize("kind", [StaysInTraining, TrainsInForward])
def test_batch_norm_that_stays_in_train_mode(kind: type[nn.Module]) -> None:
    assert "(BatchNorm1d) stays in train mode" in sipp.sound_bound(kind(), kind(), X[:5]).reason


def test_batch_norm_that_trains_for_a_moment() -> None:
    assert sipp.sound_bound(TrainsForAMoment(), TrainsForAMoment(), X[:5]).epsilon is None


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_that_stays_in_train_mode(p: float) -> None:
    assert all("train mode" in reason for reason in reasons(body(AlwaysDrops(p))))


def test_only_one_network_stays_in_train_mode() -> None:
    still, odd = nn.Sequential(*(nn.Linear(6, 8), nn.BatchNorm1d(8))), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    odd[1].train = lambda mode=True: odd[1]
    odd[1].training = True
    assert "stays in train mode" in sipp.sound_bound(still, odd, X[:5]).reason


def test_batch_norm_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval()
    assert sipp.sound_bound(model, model, X[:5]).reason == ""
    monkeypatch.setattr(_BatchNorm, "forward", lambda self, x: 9 * x)
    assert "BatchNorm1d" in sipp.sound_bound(model, model, X[:5]).reason


# Arguments.


def test_a_setting_that_differs_between_the_networks_and_that_no_repr_shows() -> None:
    dense, other = (nn.Sequential(nn.AvgPool2d(3, padding=1, count_include_pad=counted)) for counted in (True, False))
    assert "count_include_pad differs" in sipp.sound_bound(dense, other, IMAGES).reason


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
def test_operations_that_have_a_bound(function: Callable[[Tensor], Tensor]) -> None:
    for scale in (1.0, 1e-9, 30.0):
        assert sipp.sound_bound(Apply(function), Apply(function), scale * IMAGES).reason == ""


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_convolutions_have_a_bound(mode: Any) -> None:
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
