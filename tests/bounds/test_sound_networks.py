"""The bound on a whole network: it covers the true error of every random network, and the record says what it means."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import covers
from sound_bounds import sound_bound
from torch import Tensor, nn

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
