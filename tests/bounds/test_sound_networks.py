"""The bound on a whole network: it covers the true error of every random network, and the record says what it means."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import covers, true_errors
from sound_bounds import sound_bound
from torch import Tensor, nn

import sipp
from sipp.bounds import sound

N_SEEDS = 20  # times seven architectures: 140 networks, each on four inputs


# Random networks.


class Residual(nn.Module):
    def __init__(self, stride: int, act: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.act = act
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.norm2 = nn.BatchNorm2d(6)
        self.short = nn.Conv2d(3, 6, 1, stride=stride)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm(self.first(x)))
        out = self.norm2(self.second(out))
        out += self.short(x)
        return self.head(F.relu(out).mean((2, 3)))


class Concat(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 3, 3, padding=2, dilation=2, padding_mode="reflect")
        self.narrow = nn.Conv2d(3, 2, 1)
        self.act = act
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.head = nn.Linear(8 * 16, 3)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([self.act(self.wide(x)), self.narrow(x), x], dim=1) * self.scale - 0.5
        return self.head(self.pool(out).view(x.size(0), -1)) / 2


class Shared(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Conv1d(2, 4, 3, stride=2)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.act = act
        self.offset = nn.Parameter(torch.zeros(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(x)
        for _ in range(3):
            out = self.act(self.conv(out)) + self.offset
        return torch.flatten(F.avg_pool1d(out, 2), 1)


def _mlp(act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), act, nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Sigmoid(), nn.Linear(7, 4))


def _convnet(stride: int, act: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=stride, padding=1, padding_mode="replicate"),
        act,
        nn.AvgPool2d(2, ceil_mode=True, padding=1),
        nn.Conv2d(4, 4, (3, 1), groups=4, padding="same", padding_mode="reflect"),
        nn.ReLU6(inplace=True),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.LogSoftmax(dim=1),
    )


def _volumes(act: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, 2, dilation=2),
        act,
        nn.BatchNorm3d(2),
        nn.MaxPool3d(2, 1),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
    )


def _deep(act: nn.Module) -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), copy.deepcopy(act)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2), nn.Softmax(-1))


ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LogSigmoid, nn.Mish, nn.Hardswish, nn.SELU, nn.Hardtanh]
ACTIVATIONS += [lambda: nn.LeakyReLU(1.5), lambda: nn.GELU(approximate="tanh"), lambda: nn.ReLU(inplace=True)]
IMAGE = (3, 8, 8)
ARCHITECTURES: dict[str, tuple[Callable[[int, nn.Module], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda stride, act: _mlp(act), (6,)),
    "convnet": (_convnet, IMAGE),
    "residual": (Residual, IMAGE),
    "concat": (lambda stride, act: Concat(act), IMAGE),
    "shared": (lambda stride, act: Shared(act), (2, 11)),
    "volumes": (lambda stride, act: _volumes(act), (1, 5, 5, 5)),
    "deep": (lambda stride, act: _deep(act), IMAGE),
}


@dataclass(frozen=True)
class Net:
    dense: nn.Module
    pruned: nn.Module
    x: Tensor


def _random_net(architecture: str, seed: int) -> Net:
    """A random network, a random pruning and re-weighting of it, and inputs of every size, zero among them."""
    generator = torch.Generator().manual_seed(seed)
    build, shape = ARCHITECTURES[architecture]
    act = ACTIVATIONS[seed % len(ACTIVATIONS)]()
    dense = build(1 + seed % 2, act)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter[0].numel(), 1) ** 0.5)
        for name, buffer in dense.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.1)
        pruned = copy.deepcopy(dense)
        keep = (0.1, 0.5, 0.9, 0.99)[seed % 4]
        for name, parameter in pruned.named_parameters():
            if "bias" in name and seed % 3:
                continue
            kept = torch.rand(parameter.shape, generator=generator) < keep
            weights = 1 + (seed % 5 == 0) * torch.randn(parameter.shape, generator=generator)
            parameter.mul_(kept * weights)
        if seed % 4 == 1:
            for name, buffer in pruned.named_buffers():
                if "running" in name:
                    buffer.mul_(1 + 0.2 * torch.rand(buffer.shape, generator=generator))
    x = torch.randn(4, *shape, generator=generator)
    x[1], x[2], x[3] = 0.0, x[2] * 1e-9, x[3] * 1e6
    return Net(dense, pruned, x)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_bound_covers_the_true_error_of_random_networks(architecture: str) -> None:
    nets = (_random_net(architecture, seed) for seed in range(N_SEEDS))
    uncovered = [
        seed
        for seed, net in enumerate(nets)
        if not covers(net.dense, net.pruned, net.x, sound_bound(net.dense, net.pruned, net.x))
    ]
    assert uncovered == []


def test_the_same_check_catches_what_a_layer_adds_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _random_net("mlp", 0)
    assert covers(net.dense, net.pruned, net.x, sound_bound(net.dense, net.pruned, net.x))
    monkeypatch.setattr(sound._Walk, "_in_pruned", lambda walk, tensor: tensor)
    assert "moves further than what the operations show" in sound_bound(net.dense, net.pruned, net.x).reason


def test_a_layers_own_change_is_measured_on_its_actual_input() -> None:
    dense = nn.Linear(3, 2).double()
    pruned = copy.deepcopy(dense)
    pruned.weight.data[0, 1] = 0.0
    pruned.bias.data[1] += 0.5
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bound = sound_bound(dense, pruned, x)
    assert torch.allclose(bound.absolute_B, true_errors(dense, pruned, x)[0], rtol=1e-6)
    assert (bound.epsilon_B >= bound.absolute_B / dense(x).norm(dim=1)).all()
    assert bound.epsilon == float(bound.epsilon_B.max())


# What the record says.


def test_equal_networks_have_error_zero_even_where_the_output_is_zero() -> None:
    dense = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    bound = sound_bound(dense, copy.deepcopy(dense), x)
    assert bound.epsilon_B.tolist() == [0.0, 0.0] and bound.absolute_B.tolist() == [0.0, 0.0]


def test_a_zero_output_of_networks_that_may_differ_has_no_relative_bound() -> None:
    dense = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    dense[0].weight.data[:], dense[0].bias.data[:] = 1.0, -5.0
    pruned = copy.deepcopy(dense)
    pruned[0].bias.data[:] = -4.0
    bound = sound_bound(dense, pruned, torch.tensor([[1.0], [9.0]]))
    assert bound.epsilon_B[0] == math.inf and bound.epsilon_B[1] == pytest.approx(0.25)
    assert bound.absolute_B.tolist() == pytest.approx([1.0, 1.0])


def test_overflow_makes_the_bound_infinite_not_small() -> None:
    dense = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Tanh()).double()
    for layer in dense[:2]:
        layer.weight.data[:] = 1e200
    pruned = copy.deepcopy(dense)
    pruned[0].weight.data[:] = -1e200
    bound = sound_bound(dense, pruned, torch.ones(1, 1))
    assert bound.absolute_B.item() == math.inf and bound.epsilon == math.inf


def test_an_infinite_error_stays_infinite_after_a_layer_of_zeros() -> None:
    dense = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    for layer, weight in zip((dense[0], dense[1], dense[3]), (1e200, 1e200, 0.0)):
        layer.weight.data[:] = weight
    pruned = copy.deepcopy(dense)
    pruned[0].weight.data[:] = -1e200
    assert sound_bound(dense, pruned, torch.ones(1, 1)).epsilon == math.inf  # zero times infinity is not a number


@pytest.mark.parametrize("last", [nn.Identity(), nn.Tanh()])
def test_values_that_overflow_have_no_finite_bound_even_between_equal_networks(last: nn.Module) -> None:
    dense = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), last).double()
    for layer in dense[:2]:
        layer.weight.data[:] = 1e200
    assert sound_bound(dense, copy.deepcopy(dense), torch.ones(1, 1)).epsilon == math.inf


def test_models_are_left_as_they_were() -> None:
    net = _random_net("residual", 0)
    net.dense.train()
    net.pruned.eval()
    net.dense.norm.eval()
    before = [copy.deepcopy(model.state_dict()) for model in (net.dense, net.pruned)]
    x = net.x.clone()
    sound_bound(net.dense, net.pruned, net.x)
    assert net.dense.training and not net.pruned.training and not net.dense.norm.training
    assert torch.equal(x, net.x)
    for model, state in zip((net.dense, net.pruned), before):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_half_precision_keyword_inputs_and_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.left(a) + self.right(b)

    dense = Two().to(torch.bfloat16)
    pruned = copy.deepcopy(dense)
    pruned.left.weight.data[0] = 0
    a, b = torch.ones(3, 2), torch.ones(3, 2)
    positional = sound_bound(dense, pruned, (a, b))
    assert positional.epsilon > 0
    assert sound_bound(dense, pruned, {"b": b, "a": a}).epsilon == positional.epsilon


def test_a_result_written_into_another_tensor_has_no_bound_of_nothing() -> None:
    class IntoBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            buffer = torch.empty_like(h)
            torch.add(h, torch.zeros_like(x), out=buffer)
            return x + buffer + 1e10

    torch.manual_seed(0)
    dense = IntoBuffer().double()
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude").model
    x = torch.rand(4, 6, dtype=torch.float64)
    bound = sound_bound(dense, pruned, x)
    assert bound.absolute_B is None and "writes its result into another tensor" in bound.reason


def test_values_that_leave_torch_have_no_bound_of_nothing() -> None:
    class ByNumpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tensor(self.fc(x).tolist(), dtype=x.dtype) + 1e10

    torch.manual_seed(0)
    dense = ByNumpy().double()
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude").model
    bound = sound_bound(dense, pruned, torch.rand(4, 6, dtype=torch.float64))
    assert bound.absolute_B is None and "moves further" in bound.reason
